"""Schedule: the levels that each version goes to, decided alike on every rank.

Pure. The agreement is one small vector of integers per rank, min-reduced over all ranks while the
next iteration computes, and read at the next boundary. Each decision is a function of such vectors
and of the version, so all ranks take, skip and forget the same versions without waiting for each
other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from tierckpt.config import AUTO, Config, Steps
from tierckpt.core.tuning.autotune import Change, Tuner

from .levels import INTERVALS, LOCAL, MEMORY, Level
from .votes import Vote


@dataclass(frozen=True)
class Decision:
    """The action of all ranks at one boundary."""

    take: tuple[Level, ...] = ()
    """Levels that take the version; includes `memory` whenever there is any."""
    skipped: tuple[tuple[Level, str], ...] = ()
    """(level, reason) of each level that is due and cannot take a version now. A level that stays
    due is named once, and again when its interval has passed another time."""
    again: frozenset[Level] = frozenset()
    """Levels that were already skipped at the previous boundary."""
    wait: bool = False
    """Wait for busy levels instead of skipping, as the user wants (`when_busy="wait"`)."""
    changes: tuple[Change, ...] = ()
    """Automatic intervals that change at this boundary."""


@dataclass
class Schedule:
    """The levels' due versions. `decide` advances it alike on every rank."""

    config: Config
    last: dict[Level, int] = field(default_factory=lambda: dict.fromkeys(INTERVALS, 0))
    """The version that each level took last."""
    skipping: frozenset[Level] = frozenset()
    """Levels whose due version was already reported as skipped."""
    requested: frozenset[Level] = frozenset()
    """Levels that have not yet taken the version that a user requested."""
    tuner: Tuner = field(init=False)
    """Chooses the automatic intervals."""
    seen: int = 0
    """The version of the last boundary."""

    def __post_init__(self) -> None:
        """Start with the first intervals."""
        self.tuner = Tuner(self.config)
        # A request goes to the levels that a save waits for, whatever their intervals are.
        used = [level for level in INTERVALS if level.facts.awaited or self.config.uses(level)]
        self._ways = {level: {level, level.source or level} for level in used}
        self._every_steps: dict[Level, Steps] = {
            level: getattr(self.config, level).every_steps for level in INTERVALS
        }

    def start_at(self, version: int) -> None:
        """Start after a restore: nothing is due before the intervals have passed again."""
        self.last, self.seen = dict.fromkeys(INTERVALS, version), version

    def due(self, version: int, agreed: Vote) -> set[Level]:
        """Return the levels where this version is due."""
        asked, due = agreed.no_request == 0, set[Level]()
        for level, goes_to in self._ways.items():
            wanted = asked or agreed.levels[level].time_left == 0
            if level == LOCAL and self.config.local.journal_steps:
                wanted = wanted or self._journal_needs(version)
            if wanted or (self._every_steps[level] and self._steps_passed(level, version)):
                due |= goes_to
        return due

    def _journal_needs(self, version: int) -> bool:
        """Whether the journal of gradients needs a version to begin with, or a newer one."""
        most, last = self.config.local.journal_steps, self.last[LOCAL]
        return last == 0 or version - last >= most

    def _steps_passed(self, level: Level, version: int) -> bool:
        every = self._every_steps[level]
        if every == AUTO:
            return self.tuner.due(level, self.last[level], version)
        return _crossed(self.last[level], version, every)

    def decide(self, version: int, agreed: Vote) -> Decision:
        """Decide which levels take the version; a version that had to be skipped stays due."""
        automatic = bool(self.tuner.every_steps)
        changes = self.tuner.heed(version, self.seen, agreed.figures) if automatic else ()
        decision = self._decide(version, agreed)
        self.seen = version
        return replace(decision, changes=changes) if changes else decision

    def _decide(self, version: int, agreed: Vote) -> Decision:
        if agreed.no_request == 0:
            self.requested = frozenset(self.due(version, agreed))
        due = self.due(version, agreed) | self.requested
        if not due:
            return Decision()
        busy = {level for level in {MEMORY, *due} if not agreed.levels[level].free}
        wait = bool(busy) and self.config.when_busy == "wait"
        held = _held(due, busy) if busy and not wait else {}
        take = due - held.keys()
        if take:
            take.add(MEMORY)
        self.last.update(dict.fromkeys(take, version))
        self.requested -= take
        again = self.skipping
        fresh = (level for level in held if level not in again or self._one_more(level, version))
        skipped = tuple((level, held[level]) for level in fresh)
        self.skipping = frozenset(held)
        return Decision(
            tuple([level for level in INTERVALS if level in take]), skipped, again, wait
        )

    def _one_more(self, level: Level, version: int) -> bool:
        """True when a multiple of the interval lies between the previous boundary and this one."""
        every = self._every_steps[level]
        return every != AUTO and _crossed(self.seen, version, every)


def _held(due: Collection[Level], busy: Collection[Level]) -> dict[Level, str]:
    """Return the due levels that cannot take a version, each with the reason of a busy level."""
    held = {}
    for level in INTERVALS:
        way = (MEMORY, level.source or level, level)
        if level in due and (busy_ones := [each for each in way if each in busy]):
            held[level] = busy_ones[-1].facts.busy
    return held


def _crossed(last: int, version: int, every: int) -> bool:
    """True when a multiple of `every` lies in (last, version]."""
    return every > 0 and version // every > last // every
