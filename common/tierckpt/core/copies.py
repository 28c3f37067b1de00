"""Copies: which shards of which versions were found, and where. Values only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from tierckpt.errors import NewerFormatError
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import ParityKey, ShardKey, VersionId

from .levels import FAR

EVERYWHERE = "*"
"""Host of what every node can read."""


@dataclass(frozen=True, order=True)
class Location:
    """One copy of one shard."""

    level: str
    host: str
    where: str
    """Path of the segment, directory of the store, address of the persistent one, or an agent."""
    encoded: bool = False
    """On the local level: codecs have changed it."""
    in_memory: bool = False
    """Behind an agent: in a slot of its node, and not on its disk."""

    @property
    def is_far(self) -> bool:
        """True when a shard has to be fetched from there; any rank may."""
        return self.level in FAR

    @property
    def mappable(self) -> bool:
        """True when its bytes are there as soon as it is opened."""
        return not self.is_far and not self.encoded


@dataclass(frozen=True)
class Found:
    """A shard that some rank sees, by its manifest; its data was not looked at."""

    key: ShardKey
    place: Location
    facts: VersionFacts
    """As its manifest, or on the persistent level the version's, has them."""
    created_seconds: float | None = None
    """When it was taken, by the clock of its rank; None where its manifest was not read."""


@dataclass(frozen=True)
class FoundParity:
    """Parity that some rank sees, by its manifest."""

    key: ParityKey
    place: Location
    facts: VersionFacts
    group: tuple[int, ...]
    """The members' shard numbers, in the order of the ring."""
    k: int
    m: int


class Problem(NamedTuple):
    """Why something cannot be used, or seen."""

    place: Location
    why: str
    newer: bool = False
    """It is of a newer format."""
    keys: tuple[ShardKey, ...] = ()
    """What exists there by its name, though what its manifest says cannot be used."""

    @staticmethod
    def of(
        place: Location, error: Exception, what: str = "", keys: tuple[ShardKey, ...] = ()
    ) -> Problem:
        """What `error` makes of it; `what` comes first, where the place says too little."""
        why = str(error).removeprefix(f"{place.where}: ")  # errors of a store begin so
        return Problem(place, f"{what}{why}", isinstance(error, NewerFormatError), keys)


@dataclass(frozen=True)
class Inventory:
    """What one rank sees."""

    found: tuple[Found, ...]
    problems: tuple[Problem, ...]
    """Manifests that were read and cannot be used, and why."""
    unseen: tuple[Problem, ...]
    """What could not be looked at, be it a level or one manifest, and why."""
    generation: int
    """The newest generation seen, also in what is not restorable."""
    host: str = ""
    """The node's."""
    token: str = ""
    """Random; of rank 0's are made the name and the secret of the run that begins now."""
    parities: tuple[FoundParity, ...] = ()
    pins: tuple[Pin, ...] = ()
    """On this node's local level."""
    suspects: tuple[tuple[VersionId, str], ...] = ()
    """Versions that are marked as suspect on this node, and what the marks say."""

    def plus(self, others: Iterable[Inventory]) -> Inventory:
        """With what this rank was told of other nodes."""
        all_ = [self, *others]
        return replace(
            self,
            found=tuple(f for each in all_ for f in each.found),
            problems=tuple(p for each in all_ for p in each.problems),
            unseen=tuple(p for each in all_ for p in each.unseen),
            parities=tuple(p for each in all_ for p in each.parities),
            suspects=tuple(s for each in all_ for s in each.suspects),
            generation=max(each.generation for each in all_),
        )


class Pin(NamedTuple):
    """A mark on the local level."""

    version: VersionId
    everywhere: bool
    """It is meant for the persistent level, too."""


__all__ = [
    "EVERYWHERE",
    "Found",
    "FoundParity",
    "Inventory",
    "Location",
    "Pin",
    "Problem",
]
