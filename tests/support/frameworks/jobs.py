"""Jobs that tests kill and start again; their ranks are forks of one process."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.crash.launcher import Process, Zygote, quiet_environment
from tests.support.frameworks.scenario import VARIABLE, Scenario
from tierckpt.testing import free_ports

PATIENCE_SECONDS = 90.0
Line = dict[str, Any]


class Job:
    """The runs of one job. With `settings=None` it has no checkpoints: the undisturbed job."""

    def __init__(self, zygote: Zygote, scenario: Scenario) -> None:
        self._zygote, self.scenario = zygote, scenario
        self.runs = 0
        Path(scenario.folder).mkdir()

    def start(
        self, kill: str = "", environment: Mapping[str, str] | None = None, **changes: Any
    ) -> Run:
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

    def fired(self, point: str) -> bool:
        """Whether a rank came to this point, and was killed or signalled there."""
        return (Path(self.scenario.folder) / f"fired {point.replace(':', ' ')}").exists()


class Run:
    """The records of one run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario

    def await_end(self, processes: list[Process]) -> None:
        """Return when all ranks have ended. If one ends early, kill those that wait for it."""
        end = time.monotonic() + PATIENCE_SECONDS
        waiting = dict(enumerate(processes))
        while waiting and time.monotonic() < end:
            next(iter(waiting.values())).ended(0.05)
            over = [rank for rank, process in waiting.items() if process.ended()]
            for rank in over:
                del waiting[rank]
            if not all(self.of_kind("done", rank) for rank in over):
                break
        for process in waiting.values():
            process.kill()

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

    def place_in(self, undisturbed: Run, rank: int = 0, up_to_its_last_step: bool = False) -> int:
        """The number of the rank's first line in the undisturbed job; asserts that all lines follow
        there, too, or those until the last step. 0 if the rank wrote none."""
        ours = [line for line in self.lines(rank) if line["kind"] != "raised"]
        while up_to_its_last_step and ours and ours[-1]["kind"] != "step":
            ours.pop()
        theirs = undisturbed.lines(rank)
        if not ours:
            return 0
        assert ours[0] in theirs, f"rank {rank}: {ours[0]}\n{self.output()}"
        first = theirs.index(ours[0])
        pairs = zip(ours, theirs[first:], strict=False)
        wrong = [f"{a} is not {b}" for a, b in pairs if a != b]
        assert not wrong, f"rank {rank}, {len(ours)} lines: {wrong[:3]}\n{self.output()}"
        return first

    def ended(self) -> bool:
        """Whether all ranks came to their end."""
        return all(self.of_kind("done", rank) for rank in range(self.scenario.ranks))


__all__ = ["Job", "Run"]
