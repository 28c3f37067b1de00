"""Tuning: intervals that are `auto`, from what checkpoints turn out to cost.

Each rank has a `StepTimer`, which looks at how long steps take with and without a checkpoint. Its
figures go into the ballot as integers, the largest of all ranks comes out, and from that every
rank's `Tuner` draws the same conclusions: no rank ever decides by a clock of its own. To measure
while the training runs, and to keep to an overhead that the user chose, is the idea of CheckFreq
(J. Mohan et al., FAST 2021); here intervals also become shorter again.

Costs are often smaller than the noise of steps. So a `StepTimer` says another figure only where
noise does not explain it (`window`); what changes for good is noticed all the sooner the more it
is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import hypot, sqrt
from statistics import median
from typing import NamedTuple

from tierckpt.config import AUTO, Config
from tierckpt.core.levels import INTERVALS, LOCAL, MEMORY, PERSISTENT, Level

from .interval_model import LevelModel, optimum, rates, whole_steps, within_budget
from .rolling_stats import Hysteresis, RollingStats

WINDOW_STEPS, FRESH_STEPS = 512, 8
"""At most so many of the newest steps of a kind count, and so many may tell that it has changed:
their median, so that an evaluation or a slow batch now and then changes nothing."""
WINDOW_COMMITS, FRESH_COMMITS = 64, 4
"""The same, of versions to local."""
LATEST = 8
"""How many steps a commit or a flush lasts, so many of the newest say."""
ENOUGH_STEPS = 4
"""Nothing is said of a kind of step before so many of it were seen."""
LOOK_STEPS = 16
"""Intervals change at multiples of this only."""
PROBE_STEPS = 16
"""Where a version is due at every step, one in so many is left out, to see a step without."""
MOST_STEPS = 1_000_000
RARE = 1e-9
"""Failures per second, where their rate is not known and their shares alone count: so few that
nothing but these does."""
SLACK_UP, SLACK_DOWN = 1.1, 0.7
"""An interval stays as long as the one wanted is not longer or shorter than by these factors: noise
shall not move it back and forth."""


class Cost(NamedTuple):
    """What versions on one level cost; 0: not known yet."""

    us: int = 0
    """Microseconds that one adds to the steps during which it is written."""
    steps: int = 0
    """How many steps that is; 0 where it is within one."""


@dataclass(frozen=True)
class CostEstimate:
    """What checkpoints cost; 0: not known yet."""

    step_us: int = 0
    """Microseconds of a step during which no checkpoint is made."""
    levels: Mapping[Level, Cost] = field(default_factory=dict)
    """Without those of which nothing is measured."""

    def of(self, level: Level) -> Cost:
        """What a version on a level adds to one that is on the levels before."""
        return self.levels.get(level, FREE)


FREE = Cost()
UNKNOWN = CostEstimate()


class StepTimer:
    """How long this rank's steps take, by what is done meanwhile. Training thread."""

    def __init__(self, tells_flushes: bool = False) -> None:
        """`tells_flushes`: what a flush costs is to be known; without, it is a part of all steps,
        as where the store is so slow that one is always under way."""
        self._tells_flushes = tells_flushes
        self._plain = RollingStats(WINDOW_STEPS, FRESH_STEPS)
        self._copying = RollingStats(WINDOW_STEPS, FRESH_STEPS)
        """Seconds of steps with a version to memory, but nothing written to local."""
        self._stalls = RollingStats(WINDOW_STEPS, FRESH_STEPS)
        self._commits = RollingStats(WINDOW_COMMITS, FRESH_COMMITS)
        """Seconds that each version to local added."""
        self._commit_steps: deque[int] = deque(maxlen=LATEST)
        """Steps that the writing of each lasted."""
        self._commit: list[tuple[float, int, bool]] = []
        """Steps of the one under way: seconds, steps, and whether a version was copied, too."""
        self._beside_flush = RollingStats(WINDOW_STEPS, FRESH_STEPS)
        """Seconds that steps during a flush took longer than others of their kind."""
        self._flushes: deque[int] = deque(maxlen=LATEST)
        """Steps that each flush lasted."""
        self._flush_steps = 0
        """Of the one under way."""
        self._memory, self._local, self._flush = Hysteresis(), Hysteresis(), Hysteresis()
        """What is said of each level, in seconds."""
        self._last: tuple[float, int, bool, bool, bool] | None = None

    def stalled(self, seconds: float) -> None:
        """A version to memory kept the training thread for so long: it cost at least that."""
        self._stalls.append(seconds)

    def boundary(
        self,
        now_seconds: float,
        version: int,
        take: Collection[str],
        busy: bool,
        flushing: bool = False,
    ) -> None:
        """A step is over, at any monotonic clock's `now_seconds`, and the next begins.

        `take`: the levels that this version goes to; `busy`: the agent is writing an older one;
        `flushing`: some node may be flushing one to the persistent level.
        """
        if self._last is not None:
            begin, before, copied, written, flushed = self._last
            steps = max(1, version - before)
            self._flush_steps += steps * flushed
            self._passed(now_seconds - begin, steps, copied, written, flushed)
        if self._commit and not busy:  # true also where the next is taken: it waits for this one
            self._end_commit()
        if self._flush_steps and not flushing:
            self._end_flush()
        flushing = flushing and self._tells_flushes
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
            # What it adds to one step, also where a loop makes several between two boundaries.
            self._copying.append(seconds - (steps - 1) * (self._plain.median or seconds / steps))
        else:
            self._plain.append(seconds / steps)

    def _end_commit(self) -> None:
        steps = sum(n for _, n, _ in self._commit)
        step = self._step_seconds()
        # Where every step has a version to memory, what that costs is in `step` already.
        memory = self._memory_seconds() if self._plain else 0.0
        usual = steps * step + memory * sum(copied for _, _, copied in self._commit)
        if step:
            self._commits.append(sum(s for s, _, _ in self._commit) - usual)
            self._commit_steps.append(steps)
        self._commit.clear()

    def _end_flush(self) -> None:
        """Those that took much longer than the last one say nothing any more: they made the
        interval long, and others like it would come that late. What was a chance shows soon."""
        last, self._flush_steps = self._flush_steps, 0
        alike = [steps for steps in self._flushes if steps <= 2 * last]
        self._flushes = deque([*alike, last], LATEST)

    def _step_seconds(self) -> float:
        """Without a checkpoint; with one where every step has one."""
        return self._plain.median or self._copying.median

    def _memory_seconds(self) -> float:
        longer = self._copying.median - self._plain.median if self._known(self._plain) else 0.0
        return max(longer, self._stalls.median, 0.0)

    @staticmethod
    def _known(values: RollingStats) -> bool:
        return len(values) >= ENOUGH_STEPS

    def figures(self) -> CostEstimate:
        """As far as known."""
        step = self._step_seconds()
        if not self._known(self._plain) and not self._known(self._copying):
            return UNKNOWN
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
        # One commit tells nothing of noise; steps do.
        noise = (self._plain or self._copying).spread * sqrt(median(self._commit_steps))
        return _us(self._local.follow(self._commits.median, self._commits.error(noise)))

    def _flush_us(self) -> int:
        if not self._flushes or not self._known(self._beside_flush):
            return 0
        beside = self._flush.follow(self._beside_flush.median, self._beside_flush.error())
        return _us(max(0.0, beside) * median(self._flushes))


def _us(seconds: float) -> int:
    """At least 1: 0 is unknown."""
    return max(1, round(1e6 * seconds))


@dataclass(frozen=True)
class Change:
    """An interval that is another one from now on."""

    level: Level
    every_steps: int
    before_steps: int
    cost_seconds: float
    step_seconds: float

    def text(self) -> str:
        """For people."""
        return (
            f"every {self.every_steps} steps (was {self.before_steps}): a version costs "
            f"{1e3 * self.cost_seconds:.2f} ms, a step takes {1e3 * self.step_seconds:.1f} ms"
        )


class Tuner:
    """The intervals; a function of agreed figures alone, so alike on every rank."""

    def __init__(self, config: Config) -> None:
        self.every_steps = {
            level: interval.first_steps
            for level, interval in INTERVALS.items()
            if getattr(config, level).every_steps == AUTO
        }
        """By level: those that are automatic."""
        self._budget = config.overhead_budget
        self._rate_known = config.mean_failure_seconds > 0
        there = [level for level in INTERVALS if config.uses(level)]
        rate = 1 / config.mean_failure_seconds if self._rate_known else RARE
        self._rates = dict(zip(there, rates(there, rate) if there else [], strict=True))

    def due(self, level: Level, last: int, version: int) -> bool:
        """True when a version of this automatic level is due, `last` having been taken."""
        every = self.every_steps[level]
        probe = level == MEMORY and every == 1 and version % PROBE_STEPS == 0
        return not probe and version // every > last // every

    def heed(self, version: int, before: int, agreed: CostEstimate) -> tuple[Change, ...]:
        """What changes at this boundary, given what all ranks agreed on at the last one.

        `before`: the version of the last boundary.
        """
        known = [level for level in self.every_steps if agreed.of(level).us]
        if version // LOOK_STEPS == before // LOOK_STEPS or not agreed.step_us or not known:
            return ()
        step_seconds = agreed.step_us / 1e6
        # As long again as one lasts, so that steps without it are seen, too.
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
        wanted = whole_steps(steady, 1.0, MOST_STEPS)
        before_steps = [self.every_steps[level] for level in known]
        changes = tuple(
            Change(level, steps, was, agreed.of(level).us / 1e6, step_seconds)
            for level, steps, was in zip(known, wanted, before_steps, strict=True)
            if steps != was
        )
        self.every_steps |= {change.level: change.every_steps for change in changes}
        return changes

    def _ideal_steps(self, levels: list[LevelModel], step_seconds: float) -> list[float]:
        # Stretched, and only then held to what a level can do: one that is slow need not be rare.
        best = optimum([replace(level, latency_seconds=0.0) for level in levels])
        use_all = not self._rate_known
        best = within_budget(levels, best, self._budget, use_all, least_seconds=step_seconds)
        return [seconds / step_seconds for seconds in best]

    def _near(self, level: Level, steps: float) -> float:
        """The interval that there is, if that is near enough."""
        every = self.every_steps[level]
        return every if SLACK_DOWN * every <= steps <= SLACK_UP * every else steps
