"""Interval model: how often to take a checkpoint, from its cost and the rate of failures.

Pure. Times are in seconds, rates in failures per second of wall time. An interval is the training
time between two checkpoints, without their cost. Failures are independent of each other and of the
past (exponential gaps).

The interval of one level is J. W. Young's (Communications of the ACM, 1974) as refined by
J. T. Daly (Future Generation Computer Systems, 2006). Several levels, each for its own kind of
failures, go back to N. Vaidya (1995) and A. Moody et al. (SC 2010). The best intervals of levels
do not depend on each other, to first order: S. Di et al. (IPDPS 2014) and A. Benoit et al. (IEEE
Transactions on Computers, 2017). Holding to an overhead that the user chose is the idea of
J. Mohan et al. (CheckFreq, FAST 2021).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tierckpt.core.levels import INTERVALS

SHARES: dict[str, float] = {level: interval.failure_share for level, interval in INTERVALS.items()}
"""Share of all failures after which a level is the first that still has a version."""

TINY = 1e-12


@dataclass(frozen=True)
class LevelModel:
    """One level's costs and failures."""

    name: str
    cost_seconds: float
    """Wall time that one checkpoint adds, beyond the cost on the levels before."""
    failures_per_second: float
    """Rate of failures after which this level is the first that still has a version."""
    restart_seconds: float = 0.0
    """Time from such a failure until training reaches the version again."""
    latency_seconds: float = 0.0
    """Time from the boundary until the version is complete here. After a failure in between, the
    job resumes from the version before. No other version is taken here in between."""


@dataclass(frozen=True)
class Overhead:
    """The shares of time that checkpoints and failures take."""

    checkpoints: float
    """Seconds of checkpoints for each second of training."""
    lost: float
    """Share of the wall time spent on steps that are lost, or repeated."""
    restarts: float
    """Share of the wall time spent on restarts."""

    @property
    def goodput(self) -> float:
        """Useful seconds of training for each second of wall time; 0 when there is no progress."""
        return max(0.0, 1 - self.lost - self.restarts) / (1 + self.checkpoints)


def young_seconds(cost_seconds: float, failures_per_second: float) -> float:
    """Return the interval at which checkpoints cost as much as the steps lost between them."""
    if failures_per_second <= 0:
        return math.inf
    return math.sqrt(2 * cost_seconds / failures_per_second)


def daly_seconds(cost_seconds: float, failures_per_second: float) -> float:
    """Return Young's interval, corrected for failures during a checkpoint.

    The overhead is right to a few parts in a thousand as long as a checkpoint takes less than half
    of the mean time between failures. Beyond that the interval is the mean time between failures.
    """
    young = young_seconds(cost_seconds, failures_per_second)
    if math.isinf(young) or cost_seconds == 0:
        return young
    x = cost_seconds * failures_per_second / 2
    if x >= 1:
        return 1 / failures_per_second
    return young * (1 + math.sqrt(x) / 3 + x / 9) - cost_seconds


def optimum(levels: Sequence[LevelModel], step_seconds: float = 0.0) -> list[float]:
    """Return every level's best interval, the cheapest level first; infinite without failures.

    Taken alone, a level would often be best off with a shorter interval than a cheaper level. But a
    version on a level is also on those before it, so such levels share an interval: that of one
    level with the sum of their costs and rates. (Overhead is convex in the intervals' logarithms,
    so joining neighbours until they are in order finds the optimum, as in isotonic regression.)

    No interval is shorter than a step, or than its level's latency.
    """
    groups: list[list[LevelModel]] = []
    for level in levels:
        groups.append([level])
        while len(groups) > 1 and _best(groups[-2]) >= _best(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    found: list[float] = []
    for group in groups:
        for level in group:
            before = found[-1] if found else step_seconds
            found.append(max(before, _best(group), level.latency_seconds))
    return found


def _best(group: Iterable[LevelModel]) -> float:
    """Return the interval of levels that are always taken together."""
    group = list(group)
    return daly_seconds(
        sum(level.cost_seconds for level in group),
        sum(level.failures_per_second for level in group),
    )


def overhead(levels: Sequence[LevelModel], intervals_seconds: Sequence[float]) -> Overhead:
    """Return the average cost of these intervals in the long run.

    A failure costs half an interval, the latency, and the restart. The model is good as long as
    failures are rare compared with intervals and restarts; otherwise it is a little pessimistic.
    """
    checkpoints = lost = restarts = 0.0
    for level, interval in zip(levels, intervals_seconds, strict=True):
        if level.cost_seconds > 0:
            checkpoints += level.cost_seconds / interval if interval > 0 else math.inf
        if level.failures_per_second > 0:
            period = interval + level.cost_seconds
            lost += level.failures_per_second * (period / 2 + level.latency_seconds)
            restarts += level.failures_per_second * level.restart_seconds
    return Overhead(checkpoints, lost, restarts)


def within_budget(
    levels: Sequence[LevelModel],
    intervals_seconds: Sequence[float],
    budget: float,
    use_all: bool = False,
    least_seconds: float = 0.0,
) -> list[float]:
    """Return the best intervals with which checkpoints take at most `budget` of the training time.

    All are stretched by one factor: that loses least, since the best intervals of a smaller failure
    rate are the same intervals, stretched. With `use_all` they are also shortened until the budget
    is spent; this is for an unknown failure rate of which only the division into levels is known.

    None is shorter than `least_seconds`, or than its level's latency. The budget that such a level
    cannot spend goes to the others.
    """
    intervals = list(intervals_seconds)
    least = [max(least_seconds, level.latency_seconds) for level in levels]
    held: set[int] = set()
    """Levels at their least interval."""

    def spent(which: Iterable[int], each: Sequence[float]) -> float:
        which = list(which)
        return overhead([levels[i] for i in which], [each[i] for i in which]).checkpoints

    factor = 1.0
    while others := [i for i in range(len(levels)) if i not in held]:
        left = max(budget - spent(held, least), TINY * budget)  # rounding may leave nothing
        factor = spent(others, intervals) / left
        factor = factor if use_all else max(factor, 1.0)
        shorter = {i for i in others if factor * intervals[i] < least[i]}
        if not shorter:
            break
        held |= shorter
    return [least[i] if i in held else factor * t for i, t in enumerate(intervals)]


def rates(levels: Collection[str], failures_per_second: float) -> list[float]:
    """Divide the failure rate among the levels in use, by `SHARES`.

    A level also repairs the failures of unused levels before it; the last one repairs all that are
    left.
    """
    dealt: list[float] = []
    waiting = 0.0
    for name, share in SHARES.items():
        waiting += share
        if name in levels:
            dealt.append(waiting)
            waiting = 0.0
    dealt[-1] += waiting
    return [failures_per_second * share for share in dealt]


def whole_steps(intervals_seconds: Sequence[float], step_seconds: float, most: int) -> list[int]:
    """Return intervals as numbers of steps, rounded up, from 1 to `most`.

    Each is a multiple of the one before: a version that goes to a level also goes to those before
    it, and should coincide with theirs.
    """
    found: list[int] = []
    for interval in intervals_seconds:
        ratio = interval / step_seconds
        steps = most if ratio >= most else max(1, math.ceil(ratio - 1e-9))
        unit = found[-1] if found else 1
        found.append(min(most, math.ceil(steps / unit) * unit))
    return found
