"""The runs behind goodput.py: what a version costs, and what is left of the time under SIGKILLs."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lib.goodput import elastic_job, killed_job
from lib.goodput.killed_job import Course, Order, StuckError
from lib.goodput.methods import RESUMABLE
from lib.processes import MARK, Family
from tierckpt.core.tuning.interval_model import daly_seconds

ELASTIC = "hvd-elastic"
NEVER_STEPS = 1_000_000_000
WARM_STEPS = 5
"""First steps of a run that are not timed when costs are measured."""


@dataclass
class Cost:
    """What a version costs: slowdown_seconds by wall time, stall_seconds by its own account."""

    slowdown_seconds: float
    stall_seconds: float

    @property
    def seconds(self) -> float:
        """A slowdown that drowns in noise is no less than the stall."""
        return max(self.slowdown_seconds, self.stall_seconds, 1e-4)


@dataclass
class Result:
    """One method at one rate."""

    method: str
    title: str
    mtbf_seconds: float
    every_steps: int
    cost_seconds: float
    step_seconds: float
    wall_seconds: float = 0.0
    useful_steps: int = 0
    made_steps: int = 0
    failures: int = 0
    back_seconds: list[float] = field(default_factory=list)
    status: str = "ok"

    @property
    def goodput(self) -> float:
        """Useful steps, at the pace of a training that nobody disturbs, over wall time."""
        if not self.wall_seconds:
            return 0.0
        return self.useful_steps * self.step_seconds / self.wall_seconds

    @property
    def judged(self) -> bool:
        """False where it did better than a training that nobody disturbs: that one's pace, taken
        before and after, was not the machine's while ranks were killed."""
        return self.goodput <= 1.0


class Bench:
    """All jobs of one run; each has folders of its own, and leaves nothing running."""

    def __init__(self, options: argparse.Namespace, folder: Path, memory: Path) -> None:
        self.options, self.folder, self.memory = options, folder, memory
        self.count = 0

    def course(
        self,
        method: str,
        every: int,
        seconds: float,
        kills: Sequence[float] = (),
        **more: Any,
    ) -> tuple[Course, float | None]:
        """One job from the beginning; also what a version stalled it by its own account."""
        self.count += 1
        family = Family(uuid.uuid4().hex)
        os.environ[MARK] = family.token  # for what ranks start and leave behind
        folder = self.folder / f"{self.count:03d}-{method}"
        memory = self.memory / folder.name
        memory.mkdir()
        order = Order(
            method=method,
            every=every,
            model=self.options.model,
            batch=self.options.batch,
            world=self.options.world,
            folder=folder,
            memory=memory,
            **more,
        )
        try:
            runner = elastic_job.run if method == ELASTIC else killed_job.run
            found = runner(order, seconds, kills, self.options.seed)
            stall = folder / "stall"
            return found, float(stall.read_text()) if stall.exists() else None
        finally:
            family.kill()
            shutil.rmtree(memory, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)

    def block(self, method: str, every: int) -> tuple[float, float]:
        """Seconds a step, and of a stall, without failures."""
        steps = WARM_STEPS + self.options.steps
        found, stall = self.course(method, every, self.options.patience, steps=steps)
        ends = found.last_life()
        if len(ends) < steps:
            raise StuckError(f"{method}: {len(ends)} of {steps} steps in {self.options.patience} s")
        return (ends[-1] - ends[WARM_STEPS - 1]) / self.options.steps, stall or 0.0

    def plain(self, method: str) -> float:
        """Seconds a step of the training alone, as this method's launcher runs it."""
        return self.block(ELASTIC if method == ELASTIC else "nothing", NEVER_STEPS)[0]

    def cost(self, method: str) -> Cost:
        """What a version costs at `--every`; and where that would have them come closer, what it
        costs there, if that is more: little drowns in the noise of what is far apart."""
        cost, every = self._cost_at(method, self.options.every), self.options.every
        step_seconds = self.plain(method)
        closest = min(interval_steps(cost, mtbf, step_seconds) for mtbf in self.options.mtbf)
        if closest < every:
            cost = max(cost, self._cost_at(method, closest), key=lambda each: each.seconds)
        return cost

    def _cost_at(self, method: str, every: int) -> Cost:
        """Plain and with versions in turns; medians."""
        slower, stalls = [], []
        for _ in range(self.options.rounds):
            plain = self.plain(method)
            step, stall = self.block(method, every)
            slower.append(every * (step - plain))
            stalls.append(stall)
        return Cost(median(slower), median(stalls))

    def measure(self, method: str, cost: Cost, mtbf: float) -> Result:
        """The method at its own best interval, while ranks are killed."""
        before = self.plain(method)
        every = interval_steps(cost, mtbf, before)
        result = Result(method, RESUMABLE[method].title, mtbf, every, cost.seconds, before)
        window = self.options.failures * mtbf
        kills = arrivals(window, self.options.failures, self.options.seed)
        found, _ = self.course(method, every, window, kills)
        result.step_seconds = (before + self.plain(method)) / 2
        result.wall_seconds = found.wall_seconds
        result.useful_steps, result.made_steps = found.useful, found.made
        result.failures, result.back_seconds = len(found.kills), found.back_seconds
        return result


def interval_steps(cost: Cost, mtbf_seconds: float, step_seconds: float) -> int:
    """The best one (Daly's), in steps."""
    return max(1, round(daly_seconds(cost.seconds, 1 / mtbf_seconds) / step_seconds))


def arrivals(window_seconds: float, count: int, seed: int) -> list[float]:
    """When failures come, independent of each other, the same for every method.

    A Poisson process of which one knows that it brings just so many: a few failures more or less
    would say more about chance than about a method.
    """
    chance = random.Random(seed)
    return sorted(chance.uniform(0, window_seconds) for _ in range(count))


def everything(bench: Bench) -> Iterator[Result]:
    """Costs first, then rate by rate, method by method."""
    costs: dict[str, Cost] = {}
    for method in bench.options.methods:
        say(f"what does a version cost: {method}")
        try:
            costs[method] = bench.cost(method)
        except StuckError as error:
            say(str(error))
            continue
        say(f"  {1e3 * costs[method].seconds:.1f} ms")
    for mtbf in bench.options.mtbf:
        for method, cost in costs.items():
            say(f"a failure every {mtbf:g} s: {method}")
            try:
                yield bench.measure(method, cost, mtbf)
            except StuckError as error:
                say(str(error))
                title = RESUMABLE[method].title
                yield Result(method, title, mtbf, 0, cost.seconds, 0.0, status=str(error))


def say(text: str) -> None:
    """Progress, for whoever waits."""
    print(text, file=sys.stderr, flush=True)
