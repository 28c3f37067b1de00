"""A job's plan, and what the logs of its ranks say: steps, losses, and the moments of each start.

A log has a line of JSON for each start and each step; times are those of the day, by the clock that
all processes share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from lib.files import SHARED_MEMORY, temporary

LOOK_SECONDS = 0.02
ENDLESS = 1_000_000_000
MOMENTS = ("begun", "imported", "met", "built", "attached", "restored")
"""Of a start, in order: the script's first line, the imports, the process group, model and
optimizer, the method, the state."""

Line = dict[str, Any]
Losses = dict[tuple[int, int], set[str]]
"""Exact losses by rank and step; a repeated step may add another one."""


@dataclass(frozen=True)
class Plan:
    """A job: `steps` in all, a version every `every` steps.

    killed_at: for each start, the step after which `victims` (all ranks if empty) kill themselves;
    further starts run to the end. drains: they wait for their checkpoints before. held_at: the
    steps after which all ranks wait until `release`: whoever disturbs the job then never comes
    after its end, however short its steps are. batch: samples a rank, if not those of the model.
    """

    model: str
    method: str
    world: int
    steps: int
    every: int
    folder: str
    memory: str
    launcher: str = "torchrun"
    killed_at: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    drains: bool = False
    held_at: tuple[int, ...] = ()
    batch: int = 0

    @classmethod
    def of_json(cls, text: str) -> Plan:
        """The plan from a rank's argument."""
        plan = json.loads(text)
        lists = {name: tuple(plan[name]) for name in ("killed_at", "victims", "held_at")}
        return cls(**{**plan, **lists})

    def to_json(self) -> str:
        """The argument of a rank."""
        return json.dumps(asdict(self))

    def log_of(self, rank: int) -> Path:
        """The log of a rank."""
        return Path(self.folder) / f"log{rank}"

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
        """Make the folders of the job, and that of a file system which all nodes share."""
        for path in (self.folder, self.memory, f"{self.folder}/shared"):
            Path(path).mkdir(parents=True)


@contextmanager
def planned(parent: Path, *job: Any, **more: Any) -> Iterator[Plan]:
    """A plan with temporary folders, in `parent` and in shared memory. job: from its model to
    `every`."""
    with temporary(parent) as folder, temporary(SHARED_MEMORY) as memory:
        yield Plan(*job, str(folder / "job"), str(memory / "job"), **more)


class Log:
    """The log of a rank, over all starts; a line is in the file when a call returns."""

    def __init__(self, plan: Plan, rank: int) -> None:
        path = plan.log_of(rank)
        self.starts = path.read_text().count('"begun"') if path.exists() else 0
        """How often the job has started before."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, **line: Any) -> None:
        os.write(self._file, (json.dumps(line) + "\n").encode())


def lines_of(plan: Plan, rank: int) -> list[Line]:
    """The log of a rank, over all starts."""
    path = plan.log_of(rank)
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def last_step(plan: Plan, rank: int = 0) -> int:
    """The last step in the log of a rank."""
    return max((line["step"] for line in lines_of(plan, rank) if "step" in line), default=0)


def have_done(plan: Plan, step: int) -> bool:
    """Whether this step is in the logs of all ranks."""
    return all(last_step(plan, rank) >= step for rank in range(plan.world))


# --- the losses, beside those of an undisturbed job ----------------------------------------------


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
    made = sum("step" in line for line in lines_of(plan, 0))
    return {
        "losses_compared": len(mine),
        "losses_differing": len(differing),
        "steps_repeated": made - len({step for _, step in mine}),
    }


# --- the starts after failures -------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """A start after a failure, in seconds since that: until the last rank had made its model,
    from then until the last one had loaded, and until rank 0 had done a step. parts: the seconds
    of rank 0 until each of its moments, from the one before."""

    resumed_from: int
    built_seconds: float
    load_seconds: float
    back_seconds: float
    parts: dict[str, float]


def starts_of(plan: Plan, since: Sequence[float]) -> list[Start]:
    """The start of the job after each of these moments; of several attempts the last one."""
    logs = [lines_of(plan, rank) for rank in range(plan.world)]
    found = []
    for moment, limit in zip(since, [*since[1:], float("inf")], strict=True):
        begins = [_last_begin(log, moment, limit) for log in logs]
        at_all = [log[begin] for log, begin in zip(logs, begins, strict=True)]
        built = max(each["built"] for each in at_all)
        stepped = logs[0][begins[0] + 1]["end"]
        moments = [moment, *(at_all[0][name] for name in MOMENTS), stepped]
        names = ("started", *MOMENTS[1:], "stepped")
        found.append(
            Start(
                resumed_from=at_all[0]["resumed_from"],
                built_seconds=built - moment,
                load_seconds=max(each["restored"] for each in at_all) - built,
                back_seconds=stepped - moment,
                parts={
                    name: after - before
                    for name, before, after in zip(names, moments, moments[1:], strict=False)
                },
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


def kills_of(plan: Plan) -> list[float]:
    """The times at which the first victim killed itself."""
    lines = lines_of(plan, plan.victims[0] if plan.victims else 0)
    return [line["killed"] for line in lines if "killed" in line]
