"""The runs of goodput.py: the cost of a version, then goodput under SIGKILLs."""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from lib.goodput.course import Course, stall_of
from lib.goodput.jobs import run
from lib.jobs.plan import ENDLESS, Plan
from lib.jobs.processes import JobError
from lib.methods.resumable import RESUMABLE
from lib.terminal import say
from tierckpt.core.tuning import daly_seconds

ELASTIC = "hvd-elastic"
RUN = "ours-run"
WORLD = 2
PATIENCE_SECONDS = 300.0
"""For one block."""
EVERY = 5
"""Steps a version where its cost is measured first."""
WARM_STEPS = 5
"""Steps at the start of a run that are not timed when costs are measured."""


@dataclass
class Cost:
    """The cost of a version: slowdown_seconds by wall time, stall_seconds as the method reports."""

    slowdown_seconds: float
    stall_seconds: float

    @property
    def seconds(self) -> float:
        """The larger one: the stall is a lower bound where the slowdown is lost in the noise."""
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
        """Useful steps, at the pace of an undisturbed training, over wall time."""
        if not self.wall_seconds:
            return 0.0
        return self.useful_steps * self.step_seconds / self.wall_seconds


class Bench:
    """All jobs of one run. Each has its own folders and leaves no process."""

    def __init__(self, options: argparse.Namespace, folder: Path, memory: Path) -> None:
        self.options, self.folder, self.memory = options, folder, memory
        self.count = 0

    def course(
        self,
        method: str,
        every: int,
        seconds: float,
        kills: Sequence[float] = (),
        steps: int = ENDLESS,
    ) -> tuple[Course, float]:
        """Run one job from the start; also return the stall per version that it reports."""
        self.count += 1
        name = f"{self.count:03d}-{method}"
        folder, memory = str(self.folder / name), str(self.memory / name)
        options = self.options
        plan = Plan(options.model, method, WORLD, steps, every, folder, memory)
        try:
            return run(plan, seconds, kills, options.seed), stall_of(plan)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def block(self, method: str, every: int) -> tuple[float, float]:
        """Seconds per step and per stall, without failures."""
        steps = WARM_STEPS + self.options.steps
        found, stall = self.course(method, every, PATIENCE_SECONDS, steps=steps)
        ends = found.last_run()
        if len(ends) < steps:
            raise JobError(f"{method}: {len(ends)} of {steps} steps in {PATIENCE_SECONDS} s")
        return (ends[-1] - ends[WARM_STEPS - 1]) / self.options.steps, stall

    def plain(self, method: str) -> float:
        """Seconds per step of the training alone, under the launcher of this method."""
        return self.block(ELASTIC if method == ELASTIC else "nothing", ENDLESS)[0]

    def cost(self, method: str) -> Cost:
        """The cost of a version at the interval EVERY.

        If that cost leads to a shorter interval, measure again there, and take the larger cost: a
        small cost of rare versions is lost in the noise.
        """
        cost = self._cost_at(method, EVERY)
        step_seconds = self.plain(method)
        closest = min(interval_steps(cost, mtbf, step_seconds) for mtbf in self.options.mtbf)
        if closest < EVERY:
            cost = max(cost, self._cost_at(method, closest), key=lambda each: each.seconds)
        return cost

    def _cost_at(self, method: str, every: int) -> Cost:
        """Measure blocks with and without versions by turns; return medians."""
        slower, stalls = [], []
        for _ in range(self.options.rounds):
            plain = self.plain(method)
            step, stall = self.block(method, every)
            slower.append(every * (step - plain))
            stalls.append(stall)
        return Cost(median(slower), median(stalls))

    def measure(self, method: str, cost: Cost, mtbf: float) -> Result:
        """Measure the method at its best interval while ranks are killed."""
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
    """The best interval by Daly's formula, in steps."""
    return max(1, round(daly_seconds(cost.seconds, 1 / mtbf_seconds) / step_seconds))


def arrivals(window_seconds: float, count: int, seed: int) -> list[float]:
    """Times of `count` independent failures, the same for every method.

    A Poisson process with a fixed number of events, so that chance gives no method fewer failures.
    """
    chance = random.Random(seed)
    return sorted(chance.uniform(0, window_seconds) for _ in range(count))


def everything(bench: Bench) -> Iterator[Result]:
    """Measure all costs, then every method at every rate."""
    costs: dict[str, Cost] = {}
    for method in bench.options.methods:
        basis = "ours" if method == RUN else method
        if basis in costs:  # a version costs the same under any launcher
            costs[method] = costs[basis]
            continue
        say(f"cost of a version: {method}")
        try:
            costs[method] = costs[basis] = bench.cost(basis)
        except JobError as error:
            say(str(error))
            continue
        say(f"  {1e3 * costs[method].seconds:.1f} ms")
    for mtbf in bench.options.mtbf:
        for method in [name for name in bench.options.methods if name in costs]:
            cost = costs[method]
            say(f"a failure every {mtbf:g} s: {method}")
            try:
                yield bench.measure(method, cost, mtbf)
            except JobError as error:
                say(str(error))
                title = RESUMABLE[method].title
                yield Result(method, title, mtbf, 0, cost.seconds, 0.0, status=str(error))
