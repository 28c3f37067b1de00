"""Copies: the shards and parity that were found, their places, and the bytes for their exchange.

Pure: values only. A job of many ranks has a copy of every shard, on each of its levels, and at a
restart every rank receives a line about each. So the line is short: facts of a version and places
are named once, and a copy is a few numbers. That is a tenth of the bytes of the pickled objects,
and of the time to read them.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from tierckpt.errors import NewerFormatError
from tierckpt.format.ids import Key, ParityKey, ShardKey, VersionId
from tierckpt.format.records import VersionFacts

from .branches import Rollback, RollbackRequest
from .levels import FAR

__all__ = [
    "EVERYWHERE",
    "Found",
    "FoundParity",
    "Inventory",
    "Location",
    "Pin",
    "Problem",
    "distinct",
    "inventory_digest",
    "pack_inventory",
    "unpack_inventory",
]


EVERYWHERE = "*"
"""Host of a location that every node can read."""


@dataclass(frozen=True, order=True)
class Location:
    """One copy of one shard."""

    level: str
    host: str
    where: str
    """Path of a segment, directory of a store, URL of the persistent level, or an agent's address.
    """
    encoded: bool = False
    """The copy on the local level is encoded by codecs."""
    in_memory: bool = False
    """For a copy that an agent holds: it is in a slot of the agent's node, not on its disk."""

    @property
    def is_far(self) -> bool:
        """True when a shard has to be fetched from this location; any rank may fetch it."""
        return self.level in FAR

    @property
    def mappable(self) -> bool:
        """True when the bytes are readable as soon as the copy is opened."""
        return not self.is_far and not self.encoded


@dataclass(frozen=True)
class Found:
    """A shard that a rank found by its manifest. Its data was not read."""

    key: ShardKey
    place: Location
    facts: VersionFacts
    """Facts from the shard's manifest; on the persistent level, from the version's manifest."""
    created_seconds: float | None = None
    """Time of the version by the clock of its rank; None where its manifest was not read."""


@dataclass(frozen=True)
class FoundParity:
    """Parity that a rank found by its manifest. Its data was not read."""

    key: ParityKey
    place: Location
    facts: VersionFacts
    group: tuple[int, ...]
    """The members' shard numbers, in the order of the ring."""
    k: int
    m: int


class Problem(NamedTuple):
    """The reason why a copy or a place cannot be used or seen."""

    place: Location
    why: str
    newer: bool = False
    """The data is in a newer format."""
    keys: tuple[ShardKey, ...] = ()
    """Shards that exist there by name, although their manifests cannot be used."""

    @staticmethod
    def of(
        place: Location, error: Exception, what: str = "", keys: tuple[ShardKey, ...] = ()
    ) -> Problem:
        """Make a problem from `error`; `what` precedes its text where the place says too little."""
        why = str(error).removeprefix(f"{place.where}: ")  # errors of a store start with this
        return Problem(place, f"{what}{why}", isinstance(error, NewerFormatError), keys)


@dataclass(frozen=True)
class Inventory:
    """Everything that one rank sees at a restart."""

    found: tuple[Found, ...]
    problems: tuple[Problem, ...]
    """Manifests that were read and cannot be used, and why."""
    unseen: tuple[Problem, ...]
    """Levels and single manifests that could not be read, and why."""
    generation: int
    """The newest generation seen, also among versions that cannot be restored."""
    host: str = ""
    """The node's name."""
    token: str = ""
    """Random; rank 0's token becomes the name and the secret of the run that starts now."""
    parities: tuple[FoundParity, ...] = ()
    pins: tuple[Pin, ...] = ()
    """Pins on this node's local level."""
    suspects: tuple[tuple[VersionId, str], ...] = ()
    """Versions that are marked as suspect on this node, with the text of the mark."""
    requests: tuple[RollbackRequest, ...] = ()
    """Requests to go back, on this node and on the persistent level."""
    rollbacks: tuple[Rollback, ...] = ()
    """Records of runs that went back, in the same places."""

    def plus(self, others: Iterable[Inventory]) -> Inventory:
        """Return this inventory together with the inventories of other nodes."""
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


T = TypeVar("T")


def distinct(each_rank: Iterable[T]) -> list[T]:
    """Return each object once, by identity. Ranks of one node share the object with their copies
    (see `packed_inventory`), so a look at the distinct ones is a look at all copies."""
    return [*{id(each): each for each in each_rank}.values()]


class Pin(NamedTuple):
    """A mark on the local level that keeps a version."""

    version: VersionId
    everywhere: bool
    """The pin also applies to the persistent level."""


DIGEST_BYTES = 16

Value = TypeVar("Value", bound=Hashable)


class _Table(Generic[Value]):
    """Values by number, each once."""

    def __init__(self) -> None:
        self._numbers: dict[Value, int] = {}

    def number(self, value: Value) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> tuple[Value, ...]:
        return tuple(self._numbers)


def pack_inventory(inventory: Inventory) -> bytes:
    """Return the inventory without its token. Equal inventories of two ranks of one node usually
    give equal bytes."""
    tables: tuple[_Table[Any], ...] = tuple(_Table[Any]() for _ in range(4))
    facts, places, ids, codes = tables

    def line(copy: Found | FoundParity) -> tuple[int, int, int, int]:
        id_ = ids.number((copy.key.id, copy.key.shards))
        return id_, copy.key.shard, facts.number(copy.facts), places.number(copy.place)

    found = [(*line(f), f.created_seconds) for f in inventory.found]
    parities = [(*line(p), codes.number((p.group, p.k, p.m))) for p in inventory.parities]
    rest = replace(inventory, found=(), parities=(), token="")
    content = rest, [table.values() for table in tables], found, parities
    return zlib.compress(pickle.dumps(content, pickle.HIGHEST_PROTOCOL), level=1)


def unpack_inventory(data: bytes, token: str = "") -> Inventory:
    """Return the inventory of these bytes, which another rank of the job made."""
    rest: Inventory
    rest, (facts, places, ids, codes), found, parities = pickle.loads(zlib.decompress(data))
    return replace(
        rest,
        token=token,
        found=tuple(
            Found(_key(ShardKey, ids[i], shard), places[place], facts[fact], created)
            for i, shard, fact, place, created in found
        ),
        parities=tuple(
            FoundParity(_key(ParityKey, ids[i], shard), places[place], facts[fact], *codes[code])
            for i, shard, fact, place, code in parities
        ),
    )


def inventory_digest(data: bytes) -> bytes:
    """Return the checksum by which ranks recognise equal inventories."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _key(kind: type[Key], id_: tuple[Any, int], shard: int) -> Key:
    return kind(id_[0], shard, id_[1])
