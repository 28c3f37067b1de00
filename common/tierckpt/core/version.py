"""Versions in flight: one object for each, with all that a rank knows of it.

Pure. A version is in flight from the boundary that takes it until all ranks know what became of it
on every level. On each level it goes this way:

    not there --open--> PENDING --tell--> DONE or BROKEN --votes of all ranks--> safe or broken

`open`, and the step to safe or broken, happen at the same boundary on all ranks; `tell` is one
rank's own news, from any thread.

`Versions` has those of one rank, and for each level a `Ledger`: the newest version that is safe
there, and the last ones that broke.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from tierckpt.format.ids import VersionId
from tierckpt.format.records import VersionFacts

from .levels import AWAITED, BROKEN, LEDGERS, LOCAL, MEMORY, PENDING, Level

__all__ = ["REMEMBERED", "Ledger", "Version", "Versions", "superseded_by"]

REMEMBERED = 16
"""Number of broken versions that agents are informed of again, in case they missed the first
message."""


def superseded_by(safe: VersionId, protected: set[VersionId]) -> set[VersionId]:
    """Return the versions of `protected` to protect once `safe` is known complete on all ranks."""
    return {safe, *(v for v in protected if v > safe)}


class Version:
    """One version in flight, on one rank. Training thread, except `tell`; and the thread that ends
    the copy sets `nbytes` and `metric`, before the commit of which others learn, and `snapshot` to
    None, last."""

    snapshot: Any = None
    """The `Snapshot` that copies it, until that is sealed or failed."""
    nbytes = 0
    """Size of this rank's shard on its way to local."""
    metric: float | None = None
    """The metric in that shard's manifest."""
    flush: VersionFacts | None = None
    """Its facts, if it is to go to the persistent level when it is complete on local."""
    is_void = False
    """All ranks know that it is none: no event is to report it as lost."""
    is_shown = False
    """An event of this rank has told why it is lost."""

    def __init__(self, id_: VersionId, *levels: Level) -> None:
        """It is on its way to these levels."""
        self.id = id_
        self.open: set[Level] = {*levels}
        """The levels that it is on its way to; equal on every rank."""
        self._news: dict[Level, int] = {}

    def start(self, *levels: Level) -> None:
        """It is on its way to these levels, perhaps once more."""
        self.open.update(levels)
        for level in levels:
            self._news.pop(level, None)

    def tell(self, level: Level, state: int) -> None:
        """Record this rank's news: it is DONE or BROKEN on a level. Any thread."""
        self._news[level] = state

    def here(self, level: Level) -> int:
        """This rank's state of it on a level where it is open."""
        return self._news.get(level, PENDING)

    def undecided(self) -> set[Level]:
        """The levels where it is open, and of which this rank has no news."""
        return self.open - self._news.keys()


class Ledger:
    """What all ranks know of one level; equal on every rank."""

    def __init__(self, level: Level, versions: Versions, safe: VersionId | None = None) -> None:
        self.level, self._versions = level, versions
        self.safe = safe
        """The newest version known to be complete on all ranks: it is never overwritten."""
        self.broken: list[VersionId] = []
        """The last `REMEMBERED` versions that are known to be incomplete on some rank."""

    @property
    def open(self) -> list[VersionId]:
        """Versions on their way here, with an outcome not yet known to all ranks; oldest first."""
        return [version.id for version in self._versions.flying if self.level in version.open]

    def protected(self) -> set[VersionId]:
        """Return the versions that must not be overwritten."""
        known = set(self.open)
        if self.safe is not None:
            known.add(self.safe)
        return known

    def resolve(self, state: int, version: Version) -> bool:
        """Record the state that all ranks agreed on. True if it is decided with that."""
        if state == PENDING or self.level not in version.open:
            return False
        version.open.remove(self.level)
        if version.id in self.broken:  # it was taken again
            self.broken.remove(version.id)
        if state == BROKEN:
            self.broken = [*self.broken, version.id][-REMEMBERED:]
        else:
            self.safe = version.id
        return True


class Versions:
    """The versions in flight of one rank, and the ledgers. Training thread."""

    def __init__(
        self,
        safe: Mapping[Level, VersionId | None] = MappingProxyType({}),
        broken: Iterable[VersionId] = (),
        copied: Iterable[Version] = (),
    ) -> None:
        """Start with these versions as safe, and with `broken` ones on local disks. `copied`:
        versions of the run before, of which nothing is to become when their copies have ended."""
        self.flying: tuple[Version, ...] = tuple(copied)
        """The versions in flight, oldest first: in the same order on every rank, as far as they are
        open on some level."""
        for version in self.flying:
            version.open, version.flush = set(), None
        self.ledgers = {level: Ledger(level, self, safe.get(level)) for level in LEDGERS}
        self.ledgers[LOCAL].broken = sorted(broken)[-REMEMBERED:]

    def find(self, id_: VersionId) -> Version | None:
        """The version in flight with this name. Any thread."""
        for version in self.flying:
            if version.id == id_:
                return version
        return None

    def open(self, id_: VersionId, levels: Iterable[Level]) -> Version:
        """A version that all ranks, or all nodes, bring to these levels from now on."""
        flying = self.flying
        version = self.find(id_) if flying and flying[-1].id >= id_ else None
        if version is None:
            version = Version(id_, *levels)
            at = len(flying)
            while at and flying[at - 1].id > id_:  # it is repaired, or committed late
                at -= 1
            self.flying = (*flying[:at], version, *flying[at:])
        else:
            version.start(*levels)
        return version

    def on(self, level: Level) -> list[Version]:
        """The versions open on a level, oldest first."""
        return [version for version in self.flying if level in version.open]

    def forget(self, id_: VersionId) -> None:
        """Forget that a version is open in memory and on local: it will be taken again."""
        if (version := self.find(id_)) is not None:
            version.open.difference_update(AWAITED)

    def land(self) -> None:
        """Forget the versions of which nothing is to become any more."""
        left: list[Version] = []
        for version in self.flying:
            if version.open or version.snapshot is not None or version.flush is not None:
                left.append(version)
        self.flying = tuple(left)

    def needed(self) -> list[VersionId]:
        """Return the versions with slots that cannot be reused at the next boundary.

        One vote is about one version. The next boundary's vote is about the oldest one then open,
        and proves that older ones are superseded (see `last_word`): usually the newest one now.
        After a lost vote, or a vote about a version still being copied, votes lag; they catch up at
        a boundary that takes no version.
        """
        opened = self.on(MEMORY) if self.flying else []
        if not opened:
            safe = self.ledgers[MEMORY].safe
            return [safe] if safe else []
        decided = len(opened) > 1 and opened[0].here(MEMORY) != PENDING
        return [version.id for version in (opened[1:] if decided else opened)]
