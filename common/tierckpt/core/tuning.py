"""Tuning: the cost of a version, and how often one is worth it. Pure.

The interval model: times are in seconds, rates in failures per second of wall time. An interval is
the training time between two checkpoints, without their cost. Failures are independent of each
other and of the past (exponential gaps). The interval of one level is J. W. Young's
(Communications of the ACM, 1974) as refined by J. T. Daly (Future Generation Computer Systems,
2006). Several levels, each for its own kind of failures, go back to N. Vaidya (1995) and A. Moody
et al. (SC 2010). The best intervals of levels do not depend on each other, to first order: S. Di
et al. (IPDPS 2014) and A. Benoit et al. (IEEE Transactions on Computers, 2017).

Intervals that are `auto` follow from the measured costs of checkpoints. Each rank has a
`StepTimer`, which measures how long steps take with and without a checkpoint. Its figures go into
the ballot as integers, and the reduction returns the largest of all ranks. From these every rank's
`Tuner` computes the same intervals: no rank decides by its own clock. Measuring during the
training and holding to an overhead that the user chose is the idea of CheckFreq (J. Mohan et al.,
FAST 2021); here intervals also become shorter again.

Costs are often smaller than the noise of steps. So a `StepTimer` changes a figure only where noise
does not explain the difference; the larger a lasting change is, the sooner it is noticed. Noise
falls with the number of values, so the window of `RollingStats` is long. Where its newest values
differ from the older ones by more than noise, the older ones are dropped: a real change is
followed as fast as with a short window. The idea is ADWIN's (A. Bifet and R. Gavaldà, SDM 2007).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from math import hypot, sqrt
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from tierckpt.config import AUTO, Config
from tierckpt.core.levels import (
    INTERVALS,
    LOCAL,
    MEMORY,
    PERSISTENT,
    UNMEASURED,
    Cost,
    CostEstimate,
    Level,
)

MEDIAN_ERROR = 1.2533
"""Ratio of the standard error of a median to that of a mean."""
CERTAIN = 4.0
"""A difference of this many standard errors is not chance."""


class RollingStats:
    """At most `most` values; `fresh` new ones are enough to show a change."""

    def __init__(self, most: int, fresh: int) -> None:
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self._most, self._fresh = most, fresh
        self._unchecked = 0

    def __len__(self) -> int:
        return len(self._values)

    def append(self, value: float) -> None:
        """Add the newest value."""
        if len(self._values) == self._most:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)
        self._unchecked += 1
        if self._unchecked >= self._fresh:
            self._unchecked = 0
            self._forget_others()

    def _forget_others(self) -> None:
        """Drop older values that differ. Few values show a great change, more a smaller one."""
        values = list(self._values)
        newest = self._fresh
        while len(values) >= 3 * newest:
            if _differ(values[:-newest], values[-newest:]):
                self._values = deque(values[-newest:])
                self._sorted = sorted(self._values)
                return
            newest *= 2

    @property
    def median(self) -> float:
        """The median; 0 without values."""
        n = len(self._sorted)
        return (self._sorted[(n - 1) // 2] + self._sorted[n // 2]) / 2 if n else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation of normal values; from quartiles, which ignore outliers."""
        return _spread(self._sorted)

    def error(self, spread: float = 0.0) -> float:
        """Return the standard error of the median; `spread` is the least spread to assume."""
        n = len(self._sorted)
        return MEDIAN_ERROR * max(spread, self.spread) / math.sqrt(n) if n else 0.0


def _spread(values: Sequence[float]) -> float:
    n = len(values)
    return (values[-1 - n // 4] - values[n // 4]) / 1.349 if n else 0.0


def _differ(older: Sequence[float], newer: Sequence[float]) -> bool:
    spread = _spread(sorted(older))
    error = MEDIAN_ERROR * spread * math.sqrt(1 / len(newer) + 1 / len(older))
    return abs(median(newer) - median(older)) > CERTAIN * error


class Hysteresis:
    """An estimate that stays constant as long as noise explains the difference.

    Upwards it follows sooner: a cost that was underestimated exceeds the user's budget.
    """

    UP, DOWN = 1.5, 2.5
    """Standard errors."""

    def __init__(self) -> None:
        self.value = 0.0
        self._known = False

    def follow(self, estimate: float, error: float) -> float:
        """Return the value after the new `estimate`."""
        up, down = self.value + self.UP * error, self.value - self.DOWN * error
        if not self._known or not down <= estimate <= up:
            self.value, self._known = estimate, True
        return self.value


SHARES: dict[str, float] = {level: interval.failure_share for level, interval in INTERVALS.items()}
"""Share of all failures after which a level is the first that still has a version."""

TINY = 1e-12


class LevelModel(Struct, frozen=True):
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


class Overhead(Struct, frozen=True):
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


WINDOW_STEPS, FRESH_STEPS = 512, 8
"""The number of newest steps of a kind that count, and the number that shows a change.
Both use medians, so that an evaluation or a slow batch now and then changes nothing."""
WINDOW_COMMITS, FRESH_COMMITS = 64, 4
"""The same numbers for versions to the local level."""
LATEST = 8
"""Number of newest commits and flushes that determine how many steps one lasts."""
MIN_STEPS = 4
"""Number of steps of one kind that must be seen before its figure counts."""
LOOK_STEPS = 16
"""Intervals change only at multiples of this."""
PROBE_STEPS = 16
"""Where a version is due at every step, one of this many is left out, to time a step without it."""
MAX_STEPS = 1_000_000
RARE = 1e-9
"""Failures per second, of which only the levels' shares count: so few that the rate itself has no
effect."""
SLACK_UP, SLACK_DOWN = 1.1, 0.7
"""An interval stays unless the wanted one differs by more than these factors, so that noise does
not move it back and forth."""


class StepTimer:
    """Durations of this rank's steps by the checkpoint work during them. Training thread."""

    def __init__(self, times_flushes: bool = False) -> None:
        """`times_flushes`: measure the cost of a flush. Without it, that cost is part of all steps,
        for a store so slow that a flush is always under way."""
        self._times_flushes = times_flushes
        self._plain = RollingStats(WINDOW_STEPS, FRESH_STEPS)
        self._copying = RollingStats(WINDOW_STEPS, FRESH_STEPS)
        """Seconds of steps with a version to memory and no write to local."""
        self._stalls = RollingStats(WINDOW_STEPS, FRESH_STEPS)
        self._commits = RollingStats(WINDOW_COMMITS, FRESH_COMMITS)
        """Seconds that each version to local added."""
        self._commit_steps: deque[int] = deque(maxlen=LATEST)
        """Number of steps that each write to local lasted."""
        self._commit: list[tuple[float, int, bool]] = []
        """Steps of the write under way: seconds, steps, and whether a version was also copied."""
        self._beside_flush = RollingStats(WINDOW_STEPS, FRESH_STEPS)
        """Seconds that steps during a flush took beyond others of their kind."""
        self._flushes: deque[int] = deque(maxlen=LATEST)
        """Number of steps that each flush lasted."""
        self._flush_steps = 0
        """Steps of the flush under way."""
        self._memory, self._local, self._flush = Hysteresis(), Hysteresis(), Hysteresis()
        """The figure of each level, in seconds."""
        self._last: tuple[float, int, bool, bool, bool] | None = None

    def stalled(self, seconds: float) -> None:
        """Record that a version to memory blocked the training thread: its least cost."""
        self._stalls.append(seconds)

    def boundary(
        self,
        now_seconds: float,
        version: int,
        take: Collection[str],
        busy: bool,
        flushing: bool = False,
    ) -> None:
        """Record the end of a step at `now_seconds` of a monotonic clock, and the next one's start.

        `take`: the levels that this version goes to; `busy`: the agent is writing an older one;
        `flushing`: a node may be flushing one to the persistent level.
        """
        if self._last is not None:
            start, before, copied, written, flushed = self._last
            steps = max(1, version - before)
            self._flush_steps += steps * flushed
            self._passed(now_seconds - start, steps, copied, written, flushed)
        if self._commit and not busy:  # true also where the next is taken: it waits for this one
            self._end_commit()
        if self._flush_steps and not flushing:
            self._end_flush()
        flushing = flushing and self._times_flushes
        self._last = now_seconds, version, bool(take), busy or "local" in take, flushing

    def _passed(
        self, seconds: float, steps: int, copied: bool, written: bool, flushed: bool
    ) -> None:
        if written:
            self._commit.append((seconds, steps, copied))
        elif flushed:
            usual = steps * self._step_seconds()
            usual += self._memory_seconds() if copied and self._plain else 0.0
            if self._step_seconds():
                self._beside_flush.append((seconds - usual) / steps)
        elif copied:
            # The cost for one step, also in a loop with several steps between two boundaries.
            self._copying.append(seconds - (steps - 1) * (self._plain.median or seconds / steps))
        else:
            self._plain.append(seconds / steps)

    def _end_commit(self) -> None:
        steps = sum(n for _, n, _ in self._commit)
        step = self._step_seconds()
        # Where every step has a version to memory, `step` already includes its cost.
        memory = self._memory_seconds() if self._plain else 0.0
        usual = steps * step + memory * sum(copied for _, _, copied in self._commit)
        if step:
            self._commits.append(sum(s for s, _, _ in self._commit) - usual)
            self._commit_steps.append(steps)
        self._commit.clear()

    def _end_flush(self) -> None:
        """Drop flushes that took much longer than the last one: they made the interval long, and
        would otherwise count for as long. If this flush was short by chance, the next ones show it.
        """
        last, self._flush_steps = self._flush_steps, 0
        alike = [steps for steps in self._flushes if steps <= 2 * last]
        self._flushes = deque([*alike, last], LATEST)

    def _step_seconds(self) -> float:
        """Return the seconds of a step without a checkpoint; with one where every step has one."""
        return self._plain.median or self._copying.median

    def _memory_seconds(self) -> float:
        longer = self._copying.median - self._plain.median if self._known(self._plain) else 0.0
        return max(longer, self._stalls.median, 0.0)

    @staticmethod
    def _known(values: RollingStats) -> bool:
        return len(values) >= MIN_STEPS

    def figures(self) -> CostEstimate:
        """Return the costs that are known so far."""
        step = self._step_seconds()
        if not self._known(self._plain) and not self._known(self._copying):
            return UNMEASURED
        return CostEstimate(
            step_us=_us(step),
            levels={
                MEMORY: Cost(self._memory_us()),
                LOCAL: Cost(self._local_us(), max(self._commit_steps, default=0)),
                PERSISTENT: Cost(self._flush_us(), max(self._flushes, default=0)),
            },
        )

    def _memory_us(self) -> int:
        if not self._known(self._copying):
            return 0
        error = hypot(self._copying.error(), self._plain.error())
        seconds = self._memory.follow(self._memory_seconds(), error)
        return _us(seconds) if seconds else 0

    def _local_us(self) -> int:
        if not self._commits:
            return 0
        # One commit does not show the noise; steps do.
        noise = (self._plain or self._copying).spread * sqrt(median(self._commit_steps))
        return _us(self._local.follow(self._commits.median, self._commits.error(noise)))

    def _flush_us(self) -> int:
        if not self._flushes or not self._known(self._beside_flush):
            return 0
        beside = self._flush.follow(self._beside_flush.median, self._beside_flush.error())
        return _us(max(0.0, beside) * median(self._flushes))


def _us(seconds: float) -> int:
    """Convert to microseconds, at least 1: 0 means unknown."""
    return max(1, round(1e6 * seconds))


class Change(Struct, frozen=True):
    """An interval that changes."""

    level: Level
    every_steps: int
    before_steps: int
    cost_seconds: float
    step_seconds: float

    def text(self) -> str:
        """The change, as text."""
        return (
            f"every {self.every_steps} steps (was {self.before_steps}): a version costs "
            f"{1e3 * self.cost_seconds:.2f} ms, a step takes {1e3 * self.step_seconds:.1f} ms"
        )


class Tuner:
    """The intervals; a function of agreed figures alone, so equal on every rank."""

    def __init__(self, config: Config) -> None:
        self.every_steps = {
            level: interval.first_steps
            for level, interval in INTERVALS.items()
            if getattr(config, level).every_steps == AUTO
        }
        """The automatic intervals, by level."""
        self._budget = config.overhead_budget
        there = [level for level in INTERVALS if config.uses(level)]
        self._rates = dict(zip(there, rates(there, RARE) if there else [], strict=True))

    def due(self, level: Level, last: int, version: int) -> bool:
        """True when a version of this automatic level is due; `last` is the last one taken."""
        every = self.every_steps[level]
        probe = level == MEMORY and every == 1 and version % PROBE_STEPS == 0
        return not probe and version // every > last // every

    def heed(self, version: int, before: int, agreed: CostEstimate) -> tuple[Change, ...]:
        """Return the changes at this boundary, given the agreed figures of the last one.

        `before`: the version of the last boundary.
        """
        known = [level for level in self.every_steps if agreed.of(level).us]
        if version // LOOK_STEPS == before // LOOK_STEPS or not agreed.step_us or not known:
            return ()
        step_seconds = agreed.step_us / 1e6
        # Twice the duration of a write, so that steps without one are also seen.
        levels = [
            LevelModel(
                level,
                agreed.of(level).us / 1e6,
                self._rates[level],
                latency_seconds=2 * agreed.of(level).steps * step_seconds,
            )
            for level in known
        ]
        ideal = self._ideal_steps(levels, step_seconds)
        steady = [self._near(level, steps) for level, steps in zip(known, ideal, strict=True)]
        wanted = whole_steps(steady, 1.0, MAX_STEPS)
        before_steps = [self.every_steps[level] for level in known]
        changes = tuple(
            Change(level, steps, was, agreed.of(level).us / 1e6, step_seconds)
            for level, steps, was in zip(known, wanted, before_steps, strict=True)
            if steps != was
        )
        self.every_steps |= {change.level: change.every_steps for change in changes}
        return changes

    def _ideal_steps(self, levels: list[LevelModel], step_seconds: float) -> list[float]:
        # Stretch first, then apply each level's latency: a slow level need not be rare.
        best = optimum([replace(level, latency_seconds=0.0) for level in levels])
        best = within_budget(levels, best, self._budget, use_all=True, least_seconds=step_seconds)
        return [seconds / step_seconds for seconds in best]

    def _near(self, level: Level, steps: float) -> float:
        """Return the present interval, if it is near enough."""
        every = self.every_steps[level]
        return every if SLACK_DOWN * every <= steps <= SLACK_UP * every else steps
