"""Lightning jobs that tests kill and start again; their ranks are forks of one process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.crash.launcher import Process, Zygote, quiet_environment
from tests.support.lightning.scenario import VARIABLE, Scenario
from tests.support.slurm_cluster import free_ports

PATIENCE_SECONDS = 90.0
JOB = "tests.support.lightning.job"
Line = dict[str, Any]


class LightningJob:
    """The runs of one job. With `settings=None` it has no checkpoints: the undisturbed job."""

    def __init__(self, zygote: Zygote, scenario: Scenario) -> None:
        self._zygote, self.scenario = zygote, scenario
        self.runs = 0
        Path(scenario.folder).mkdir()

    def start(self, kill: str = "", environment: Mapping[str, str] | None = None, **changes: Any) -> Run:
        """A run to its end: of all ranks, or of one rank, and then the rest is killed."""
        self.runs += 1
        scenario = replace(self.scenario, run=self.runs, kill=kill, **changes)
        port = str(free_ports(1)[0])
        processes = []
        for rank in range(scenario.ranks):
            launched = {
                **quiet_environment(),
                VARIABLE: scenario.to_json(),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(scenario.ranks),
                "LOCAL_WORLD_SIZE": str(scenario.ranks),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": "test",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                **(environment or {}),
            }
            log = Path(scenario.folder) / f"run{self.runs}-rank{rank}.log"
            processes.append(self._zygote.fork(launched, log))
        run = Run(scenario)
        run.await_end(processes)
        return run


class Run:
    """The records of one run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario

    def await_end(self, processes: list[Process]) -> None:
        waiting = [*processes]
        while waiting:
            first = waiting[0]
            # A rank that ended with an error leaves the others in a collective.
            others = waiting[1:]
            for _ in range(int(PATIENCE_SECONDS / 0.1)):
                if first.ended(0.1) or any(each.ended() for each in others):
                    break
            else:
                break
            over = [each for each in waiting if each.ended()]
            waiting = [each for each in waiting if each not in over]
            if not self.is_whole(len(processes) - len(waiting)):
                break
        for each in waiting:
            each.kill()

    def is_whole(self, ended: int) -> bool:
        """Whether none of the ranks has ended early."""
        done = sum(bool(self.of_kind("done", rank)) for rank in range(self.scenario.ranks))
        return done >= ended

    def lines(self, rank: int = 0) -> list[Line]:
        """What the rank wrote."""
        path = Path(self.scenario.folder) / f"run{self.scenario.run}-rank{rank}"
        return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []

    def of_kind(self, kind: str, rank: int = 0) -> list[Line]:
        return [line for line in self.lines(rank) if line["kind"] == kind]

    def output(self) -> str:
        """The output of all ranks."""
        paths = sorted(Path(self.scenario.folder).glob(f"run{self.scenario.run}-rank*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths)

    def error(self, rank: int = 0) -> str:
        """The exception that ended the rank."""
        return next(iter(x["text"] for x in self.of_kind("raised", rank)), "")

    def continues(self, undisturbed: Run, amid: bool = True) -> None:
        """Assert that all ranks went on, to the end, with exactly the steps of the undisturbed
        job. `amid`: neither from its start, nor after its end."""
        for rank in range(self.scenario.ranks):
            ours, theirs = self.lines(rank), undisturbed.lines(rank)
            assert ours, self.output()
            assert ours[-1]["kind"] == "done", self.output()
            expected = theirs[len(theirs) - len(ours) :]
            wrong = [(a, b) for a, b in zip(ours, expected, strict=True) if a != b]
            assert not wrong, (rank, len(wrong), wrong[:1], ours[0], self.output())
            assert not amid or 2 < len(ours) < len(theirs), self.output()

    def preceded(self, undisturbed: Run) -> None:
        """Assert that all ranks had made exactly the first steps of the undisturbed job."""
        for rank in range(self.scenario.ranks):
            ours = self.lines(rank)
            ours = [line for line in ours if line["kind"] != "raised"]
            assert ours == undisturbed.lines(rank)[: len(ours)], self.output()


__all__ = ["JOB", "LightningJob", "Run"]
