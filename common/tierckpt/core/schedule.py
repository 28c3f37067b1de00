"""Policy: what every rank concludes, alike, from the version and from what all ranks agreed on.

Pure. The agreement is one small vector of integers per rank, min-reduced over all ranks while the
next iteration computes, and read at the next boundary. Everything a rank may decide is a function
of such vectors and of the version, so all ranks take, skip and forget the same versions without
ever waiting for each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tierckpt.config import AUTO, Config
from tierckpt.core.tuning.autotune import Change, Tuner

from .votes import Vote

LEVELS = ("memory", "local", "persistent")
"""Every version that a level takes, those before it take, too."""


@dataclass(frozen=True)
class Decision:
    """What to do at a boundary."""

    take: tuple[str, ...] = ()
    """Levels the version goes to; `memory` whenever there is any."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(level, reason) of what is due and cannot be taken now. One that stays due is named once,
    until another one is due behind it."""
    again: frozenset[str] = frozenset()
    """Of these levels one was skipped at the boundary before, too."""
    wait: bool = False
    """The user prefers to wait (`when_busy="wait"`) for what is busy."""
    changes: tuple[Change, ...] = ()
    """Automatic intervals that are others from now on."""


@dataclass
class Schedule:
    """When versions are due. Advanced by `decide` on every rank alike."""

    config: Config
    last_memory: int = 0
    last_local: int = 0
    last_persistent: int = 0
    skipping: frozenset[str] = frozenset()
    """Levels whose due version was already reported as skipped."""
    requested: frozenset[str] = frozenset()
    """Levels that a user's request has not reached yet."""
    tuner: Tuner = field(init=False)
    """Of intervals that are automatic."""
    seen: int = 0
    """The version of the last boundary."""

    def __post_init__(self) -> None:
        """Begin with the first intervals."""
        self.tuner = Tuner(self.config)

    def start_at(self, version: int) -> None:
        """After a restore: nothing is due before the intervals have passed again."""
        self.last_memory = self.last_local = self.last_persistent = self.seen = version

    def due(self, version: int, agreed: Vote) -> set[str]:
        """Levels that want this version."""
        asked = agreed.no_request == 0
        due = set()
        if (
            asked
            or agreed.memory_time_left == 0
            or self._steps_passed("memory", self.last_memory, version)
        ):
            due.add("memory")
        if (
            asked
            or agreed.local_time_left == 0
            or self._steps_passed("local", self.last_local, version)
        ):
            due.add("local")
        if self.config.uses("persistent") and (
            asked
            or agreed.persistent_time_left == 0
            or self._steps_passed("persistent", self.last_persistent, version)
        ):
            due |= {"local", "persistent"}
        return due

    def _steps_passed(self, level: str, last: int, version: int) -> bool:
        every = getattr(self.config, level).every_steps
        if every == AUTO:
            return self.tuner.due(level, last, version)
        return _crossed(last, version, every)

    def decide(self, version: int, agreed: Vote) -> Decision:
        """Take or skip; a version that had to be skipped stays due."""
        changes = self.tuner.heed(version, self.seen, agreed.figures)
        decision = self._decide(version, agreed)
        self.seen = version
        return replace(decision, changes=changes) if changes else decision

    def _decide(self, version: int, agreed: Vote) -> Decision:
        if agreed.no_request == 0:
            self.requested = frozenset(self.due(version, agreed))
        due = self.due(version, agreed) | self.requested
        if not due:
            return Decision()
        busy = not agreed.slot_free or ("local" in due and not agreed.local_free)
        wait = busy and self.config.when_busy == "wait"
        skipped: list[tuple[str, str]] = []
        take = set(due)
        if not wait and not agreed.slot_free:
            skipped = [
                (level, "on some rank all slots (buffers in memory) are still in use")
                for level in sorted(due)
            ]
            take = set()
        elif not wait and "local" in due and not agreed.local_free:
            why = "some rank is still writing the version before"
            skipped = [(level, why) for level in sorted(due - {"memory"})]
            take &= {"memory"}
        if take:
            self.last_memory = version
            take.add("memory")
        if "local" in take:
            self.last_local = version
        if "persistent" in take:
            self.last_persistent = version
        self.requested -= take
        again = self.skipping
        fresh = tuple(s for s in skipped if s[0] not in again or self._one_more(s[0], version))
        self.skipping = frozenset(level for level, _ in skipped)
        return Decision(tuple(level for level in LEVELS if level in take), fresh, again, wait)

    def _one_more(self, level: str, version: int) -> bool:
        """A multiple of the interval lies between the boundary before and this one."""
        every = getattr(self.config, level).every_steps
        return every != AUTO and _crossed(self.seen, version, every)


def _crossed(last: int, version: int, every: int) -> bool:
    """True when a multiple of `every` lies in (last, version]."""
    return every > 0 and version // every > last // every
