"""The jobs of SCR-Exa's experiment: their plan, their processes, and the figures of their logs."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from lib.launchers import environment
from lib.processes import MARK, Family

SCRIPT = Path(__file__).resolve().with_name("rank.py")
BENCHMARKS = SCRIPT.parents[3]
LOOK_SECONDS = 0.02
LINGER_SECONDS = 120
"""An agent waits for the next start, which may take long on a busy machine."""

Line = dict[str, Any]
Losses = dict[tuple[int, int], set[str]]
"""Exact losses by rank and step; a repeated step may add another one."""


class JobError(RuntimeError):
    """A job did not end as it should; the text has the last output of its ranks."""


@dataclass(frozen=True)
class Plan:
    """A job. `killed_at`: for each start, the step after which all ranks kill themselves; further
    starts run to the end. `held_at`: the steps after which all ranks wait until `release`: whoever
    disturbs the job then never comes after its end, however short its steps are."""

    model: str
    launcher: str
    method: str
    world: int
    steps: int
    every: int
    folder: str
    memory: str
    killed_at: tuple[int, ...] = ()
    held_at: tuple[int, ...] = ()

    def log_of(self, rank: int) -> Path:
        """The log of a rank."""
        return Path(self.folder) / f"losses{rank}"

    def calm(self) -> Plan:
        """The same training without checkpoints and kills, in folders of its own."""
        places = {"folder": f"{self.folder}-calm", "memory": f"{self.memory}-calm"}
        return replace(self, method="nothing", killed_at=(), held_at=(), **places)

    def release(self, step: int) -> None:
        """Let the ranks continue after a step in `held_at`, in this start and in later ones."""
        self._released(step).touch()

    def hold(self, step: int) -> None:
        """Wait in a rank until `release`, if the step is in `held_at`."""
        while step in self.held_at and not self._released(step).exists():
            time.sleep(LOOK_SECONDS)

    def _released(self, step: int) -> Path:
        return Path(self.folder) / f"released{step}"

    def make_folders(self) -> None:
        """Make the folders of the job."""
        for path in (self.folder, self.memory, f"{self.folder}/shared"):
            Path(path).mkdir(parents=True)

    def command(self) -> list[str]:
        """The script of a rank with its argument."""
        return [str(SCRIPT), json.dumps(asdict(self))]


@dataclass(frozen=True)
class Start:
    """A start after a failure, in seconds since that: until the last rank had made its model,
    from then until the last one had loaded, and until rank 0 had done a step."""

    resumed_from: int
    built_seconds: float
    load_seconds: float
    back_seconds: float


def of_json(text: str) -> Plan:
    """The plan from a rank's argument."""
    plan = json.loads(text)
    steps = {name: tuple(plan[name]) for name in ("killed_at", "held_at")}
    return Plan(**{**plan, **steps})


class Watched:
    """The processes of a job, with the agents that outlive them. `close` ends them all."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.family = Family(uuid.uuid4().hex)
        self.output = Path(plan.folder) / "output"
        path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
        self.environment = {
            **environment(Path(plan.folder).parent),  # what one job has learnt, the next one knows
            "PYTHONPATH": path,
            "TIERCKPT_AGENT_LINGER_SECONDS": str(LINGER_SECONDS),
            MARK: self.family.token,
        }

    def last_words(self) -> str:
        """The end of the ranks' output."""
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        return f"{self.plan.method}: the job failed; its last output:\n{text[-3000:]}"

    def last_step(self, rank: int = 0) -> int:
        """The last step in the log of a rank."""
        lines = lines_of(self.plan, rank)
        return max((line["step"] for line in lines if "step" in line), default=0)

    def have_done(self, step: int) -> bool:
        """Whether this step is in the logs of all ranks."""
        return all(self.last_step(rank) >= step for rank in range(self.plan.world))


def lines_of(plan: Plan, rank: int) -> list[Line]:
    """The log of a rank, over all starts."""
    path = plan.log_of(rank)
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses_of(plan: Plan) -> Losses:
    """The losses of all ranks."""
    found: Losses = {}
    for rank in range(plan.world):
        for line in lines_of(plan, rank):
            if "step" in line:
                found.setdefault((rank, line["step"]), set()).add(line["loss"])
    return found


def compared(plan: Plan, calm: Losses) -> dict[str, Any]:
    """Compare the losses of all ranks with those of the undisturbed job, bit for bit.

    Both jobs have ended: their logs are complete.
    """
    mine = losses_of(plan)
    differing = [place for place, losses in mine.items() if losses != calm.get(place)]
    return {
        "losses_compared": len(mine),
        "losses_differing": len(differing),
        "steps_repeated": _steps_made(plan) - len({step for _, step in mine}),
    }


def _steps_made(plan: Plan) -> int:
    return sum("step" in line for line in lines_of(plan, 0))


def starts_of(plan: Plan, since: Sequence[float]) -> list[Start]:
    """The start of the job after each of these moments; of several attempts the last one."""
    logs = [lines_of(plan, rank) for rank in range(plan.world)]
    found = []
    for moment, limit in zip(since, [*since[1:], float("inf")], strict=True):
        begins = [_last_begin(log, moment, limit) for log in logs]
        at_all = [log[begin] for log, begin in zip(logs, begins, strict=True)]
        built = max(each["built"] for each in at_all)
        stepped = logs[0][begins[0] + 1]["end"]
        found.append(
            Start(
                resumed_from=at_all[0]["resumed_from"],
                built_seconds=built - moment,
                load_seconds=max(each["restored"] for each in at_all) - built,
                back_seconds=stepped - moment,
            )
        )
    return found


def _last_begin(log: Sequence[Line], moment: float, limit: float) -> int:
    """The place of the last start between two moments."""
    return max(place for place, line in enumerate(log) if moment < line.get("begun", 0) < limit)


def figures_of(starts: Sequence[Start]) -> dict[str, Any]:
    """Medians and all values, for a row of results."""
    names = ("built_seconds", "load_seconds", "back_seconds")
    medians = {name: median(getattr(start, name) for start in starts) for name in names}
    return {**medians, "starts": [asdict(start) for start in starts]}


def python(arguments: Sequence[str]) -> list[str]:
    """A command of this interpreter."""
    return [sys.executable, *arguments]
