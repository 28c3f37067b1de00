"""Restore plan: the version that a restart uses, and the rank that reads each shard. Pure.

All ranks exchange their inventories (see `inventory`) once and then make the same plan without
further communication.

Copies: the shards and parity that were found, their places, and the bytes for their exchange.

Pure: values only. A job of many ranks has a copy of every shard, on each of its levels, and at a
restart every rank receives a line about each. So the line is short: facts of a version and places
are named once, and a copy is a few numbers: a tenth of the bytes of the pickled objects,
and of the time to read them.
"""

from __future__ import annotations

import hashlib
import heapq
import pickle
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from tierckpt.errors import NewerFormatError, RestoreError
from tierckpt.format.ids import (
    NO_RUN,
    Key,
    Lineage,
    Name,
    ParityKey,
    ShardKey,
    VersionId,
    newest_first,
)
from tierckpt.format.records import VersionFacts

from .branches import Rollback, RollbackRequest
from .levels import FAR, PEER, RANK, Level

if TYPE_CHECKING:
    from tierckpt.erasure.codes import Segment

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


class Location(Name, frozen=True):
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


class Found(Struct, frozen=True):
    """A shard that a rank found by its manifest. Its data was not read."""

    key: ShardKey
    place: Location
    facts: VersionFacts
    """Facts from the shard's manifest; on the persistent level, from the version's manifest."""
    created_seconds: float | None = None
    """Time of the version by the clock of its rank; None where its manifest was not read."""


class FoundParity(Struct, frozen=True):
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


class Inventory(Struct, frozen=True):
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
    (see `pack_inventory`), so a look at the distinct ones is a look at all copies."""
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


REBUILT = Location(PEER, EVERYWHERE, "rebuilt")
"""The location of a rebuilt shard."""


class Source(Struct, frozen=True):
    """The place that one shard is read from."""

    shard: int
    place: Location
    reader: int
    """The rank that reads and verifies the shard, or rebuilds it."""
    direct: bool
    """Every rank sees the same copy and maps it itself; otherwise the reader broadcasts it."""

    @property
    def rebuilt(self) -> bool:
        """True when the shard is lost: its reader rebuilds it and holds it."""
        return self.place == REBUILT


class ParitySource(Struct, frozen=True):
    """The place of the parity beside one member's shard, and the rank that reads and checks it."""

    member: int
    """Position on the ring."""
    key: ParityKey
    place: Location
    reader: int
    segments: tuple[int, ...]
    """The segments that are read; the others are not needed."""


class Rebuild(Struct, frozen=True):
    """Lost shards of one redundancy group, and the parity to rebuild them from."""

    group: tuple[int, ...]
    lost: tuple[int, ...]
    """Shard numbers."""
    parities: tuple[ParitySource, ...]
    """The parity to read; shards of members that are not lost are elsewhere in the plan."""
    left: frozenset[ParityKey] = frozenset()
    """All parity of the group that exists and was not found damaged."""


class RestorePlan(Struct, frozen=True):
    """The version to restore, and each shard's source, by shard number."""

    id: VersionId
    sources: tuple[Source, ...]
    run_id: str = ""
    rebuilds: tuple[Rebuild, ...] = ()

    @property
    def levels(self) -> dict[str, int]:
        """Number of shards from each level."""
        names = [s.place.level for s in self.sources]
        return {level.value: names.count(level) for level in Level if level in names}


Bad = frozenset[tuple[ShardKey, Location]]
Readers = Mapping[tuple[ShardKey, Location], int]
"""The rank that read a copy in an earlier attempt, and still has it."""
Unreachable = frozenset[tuple[ShardKey, Location, int]]
"""Copies that a rank could not read, with that rank; others may be able to."""


def plan_restore(
    inventories: Sequence[Sequence[Found]],
    bad: Bad = frozenset(),
    version: int | None = None,
    parities: Sequence[Sequence[FoundParity]] = (),
    readers: Readers = MappingProxyType({}),
    unreachable: Unreachable = frozenset(),
    nodes: Sequence[str] = (),
    avoid: Container[VersionId] = (),
    rollback: tuple[int, int] = NO_RUN,
    abandoned: bool = False,
) -> RestorePlan | None:
    """Plan the newest version that can be read or rebuilt, each shard from its cheapest place.

    All shards of a version are of one run. `bad` are copies found damaged; `version` restricts the
    choice to that number. `readers` read the same copies again. No rank reads a copy `unreachable`
    to it (see `_Sight`), and a copy that no rank can read is lost. `nodes` has the node of every
    rank; without it each rank is on a node of its own. `avoid` are versions that must not be
    chosen. `rollback` is the last rollback's entry in the lineage (see `core.branches`); it
    does not restrict `version`. With `abandoned`, a `version` in no run's past counts as well,
    after all others. Returns None when there is no such version. Same inputs give the same plan:
    every rank calls this.
    """
    nodes = nodes or [str(rank) for rank in range(len(inventories))]
    sight = _Sight(len(inventories), readers, unreachable)
    found, made = _by_version(inventories), _by_version(parities)
    lineages = {id_: items[0][0].facts.lineage for (id_, *_), items in (found | made).items()}
    line = newest_first(lineages.items(), rollback if version is None else NO_RUN)
    if abandoned and version is not None:
        line += sorted(lineages.keys() - {*line}, reverse=True)
    for id_ in line:
        if (version is not None and id_.version != version) or id_ in avoid:
            continue
        for run_id, shards in sorted({(r, n) for i, r, n in (*found, *made) if i == id_}):
            this = id_, run_id, shards
            keys = [ShardKey(id_, s, shards) for s in range(shards)]
            seen = _places(found.get(this, ()), bad)
            places_of = {k: p for k in keys if (p := sight.of(k, seen.get(k, {})))}
            made_of = _parities_of(made.get(this, ()), bad, sight)
            there, rebuilds, lost = _put_together(keys, places_of, made_of, nodes)
            if not lost:
                sources = tuple(_assign(keys, there, nodes))
                return RestorePlan(id_, sources, run_id, rebuilds)
    return None


def newest_whole(found: Iterable[Found], rollback: tuple[int, int] = NO_RUN) -> VersionId | None:
    """Return the newest version of which every shard was found, all of one run; None without any.

    The version that `plan_restore` chooses from copies that no rank failed to read, without the
    rebuilds and the work of assigning readers. `rollback`: as there.
    """
    lineages: dict[VersionId, Lineage] = {}
    there: dict[tuple[VersionId, str, int], set[int]] = {}
    for f in found:
        lineages[f.key.id] = f.facts.lineage
        there.setdefault((f.key.id, f.facts.run_id, f.key.shards), set()).add(f.key.shard)
    whole = {id_ for (id_, _, shards), seen in there.items() if len(seen) == shards}
    return next((id_ for id_ in newest_first(lineages.items(), rollback) if id_ in whole), None)


C = TypeVar("C", bound=Found | FoundParity)


def _by_version(
    inventories: Sequence[Sequence[C]],
) -> dict[tuple[VersionId, str, int], list[tuple[C, list[int]]]]:
    """Return the copies by version, run and number of shards, each with the ranks that see it.

    Ranks with the same object, as those of a node usually have (see `distinct`), cost no
    more than one of them.
    """
    seers: dict[int, list[int]] = {}
    for rank, inventory in enumerate(inventories):
        seers.setdefault(id(inventory), []).append(rank)
    found: dict[tuple[VersionId, str, int], list[tuple[C, list[int]]]] = {}
    for inventory in distinct(inventories):
        ranks = seers[id(inventory)]
        for item in inventory:
            name = item.key.id, item.facts.run_id, item.key.shards
            found.setdefault(name, []).append((item, ranks))
    return found


def _places(
    copies: Iterable[tuple[C, list[int]]], bad: Bad
) -> dict[ShardKey, dict[Location, Sequence[int]]]:
    """Return the places of each shard or parity, and the ranks that see it there, in order."""
    seen: dict[ShardKey, dict[Location, Sequence[int]]] = {}
    for item, ranks in copies:
        if bad and (item.key, item.place) in bad:
            continue
        places = seen.setdefault(item.key, {})
        known: Sequence[int] = places.get(item.place, ())
        places[item.place] = sorted({*known, *ranks}) if known else ranks
    return seen


class _Sight:
    """The ranks that may read each copy.

    A rank that could not read one shard of a version on the persistent level reads no other shard
    of that version there: a rank without the mount would otherwise be tried shard after shard. It
    reads no other version there either, as long as some rank had no trouble. A rank that has a copy
    from an earlier attempt keeps it. On near levels each copy is judged on its own.
    """

    def __init__(self, ranks: int, had: Readers, unreachable: Unreachable) -> None:
        self._all_ranks: Sequence[int] = range(ranks)
        self._had, self._unreachable = had, unreachable
        far = [(key, place, rank) for key, place, rank in unreachable if place.is_far]
        self._without = {(key.id, place, rank) for key, place, rank in far}
        self._trouble = {(place, rank) for _, place, rank in far}
        self._of_all: dict[tuple[VersionId, Location], Sequence[int]] = {}

    def of(self, key: ShardKey, seen: Mapping[Location, Sequence[int]]) -> Places:
        """Return the usable places of a shard, each with the ranks that may read it there, in
        order."""
        if not (self._had or self._unreachable):  # the usual case
            everyone = self._all_ranks
            return {p: everyone if p.host == EVERYWHERE else seen[p] for p in seen}
        readers = {place: self._readers(key, place, ranks) for place, ranks in seen.items()}
        left = {place: ranks for place, ranks in readers.items() if ranks}
        held = {_cost(place) for place in left if self._holder(key, place) is not None}
        return {
            place: ranks
            for place, ranks in left.items()
            if _cost(place) not in held or self._holder(key, place) is not None
        }

    def _holder(self, key: ShardKey, place: Location) -> int | None:
        holder = self._had.get((key, place))
        return None if (key, place, holder) in self._unreachable else holder

    def _readers(self, key: ShardKey, place: Location, seers: Sequence[int]) -> Sequence[int]:
        if (holder := self._holder(key, place)) is not None:
            return [holder]
        if place.host != EVERYWHERE:
            return [rank for rank in seers if (key, place, rank) not in self._unreachable]
        if (key.id, place) not in self._of_all:
            self._of_all[key.id, place] = self._all_but_those_in_trouble(key.id, place)
        return self._of_all[key.id, place]

    def _all_but_those_in_trouble(self, version: VersionId, place: Location) -> Sequence[int]:
        if not self._trouble:
            return self._all_ranks
        left = [rank for rank in self._all_ranks if (version, place, rank) not in self._without]
        return [rank for rank in left if (place, rank) not in self._trouble] or left


def _cost(place: Location) -> tuple[int, bool, bool]:
    """Return the key that orders places by cost, cheapest first."""
    return RANK[place.level], not place.in_memory, place.encoded


Places = Mapping[Location, Sequence[int]]
"""The places of a shard, and the ranks that may read it at each."""


def _cheapest(places: Places) -> Places:
    """Return the places of least cost; several if nodes share a directory. The place that most
    ranks see comes first."""
    least = min(map(_cost, places))
    best = [place for place in places if _cost(place) == least]
    return {place: places[place] for place in sorted(best, key=lambda p: (-len(places[p]), p))}


def _readers_at(places: Places) -> Sequence[int]:
    """Return the ranks that may read at one of the places."""
    first, *others = places.values()
    return sorted({*first}.union(*others)) if others else first


def _place_of(reader: int, places: Places) -> Location:
    return next(place for place, ranks in places.items() if reader in ranks)


def _put_together(
    keys: Sequence[ShardKey],
    places_of: Mapping[ShardKey, Places],
    parities: Parities,
    nodes: Sequence[str],
) -> tuple[dict[ShardKey, Places], tuple[Rebuild, ...], set[int]]:
    """Return the places of shards to read, the rebuilds, and the shards that remain lost.

    A shard that parity on the job's nodes can rebuild is not fetched from far away, nor is a near
    one; only the rest is. Distant parity is used last.
    """
    near = _near(places_of)
    near_parities = {code: _near(found) for code, found in parities.items()}
    rebuilds, lost = plan_rebuilds(keys, near, near_parities, nodes)
    if lost:
        near |= {key: places_of[key] for key in keys if key.shard in lost and key in places_of}
        rebuilds, lost = plan_rebuilds(keys, near, near_parities, nodes)
    if lost:
        rebuilds, lost = plan_rebuilds(keys, near, parities, nodes)
    return near, rebuilds, lost


def _near(places_of: Mapping[Key, Places]) -> dict[Key, Places]:
    """Return the keys that are on a node of the job, with their places there."""
    return {
        key: there
        for key, places in places_of.items()
        if (there := {place: ranks for place, ranks in places.items() if not place.is_far})
    }


def plan_rebuilds(
    keys: Sequence[ShardKey], there: Container[ShardKey], parities: Parities, nodes: Sequence[str]
) -> tuple[tuple[Rebuild, ...], set[int]]:
    """Plan the rebuild of the `keys` that are not `there`; also return those that stay lost."""
    lost = {key.shard for key in keys if key not in there}
    rebuilds = []
    load = _Load(nodes)
    for (group, k, m), parity_keys in parities.items():
        gone = tuple(shard for shard in group if shard in lost)
        if not gone:
            continue
        from tierckpt.erasure.codes import Code, plan_rebuild

        members = {group.index(shard) for shard in gone}
        no_parity = set(range(len(group))) - {group.index(key.shard) for key in parity_keys}
        try:
            tasks = plan_rebuild(Code(len(group), k, m), members, no_parity, restore_parities=False)
        except RestoreError:
            continue
        needed = sorted(s for task in tasks for s in task.sources if s.parity)
        sources = tuple(
            _parity_source(key, places, load, [s for s in needed if group[s.member] == key.shard])
            for key, places in sorted(parity_keys.items())
            if any(group[s.member] == key.shard for s in needed)
        )
        rebuilds.append(Rebuild(group, gone, sources, frozenset(parity_keys)))
        lost -= set(gone)
    return tuple(rebuilds), lost


ParityPlaces = Mapping[ParityKey, Places]
"""The places of each parity, and the ranks that may read it there."""
Parities = Mapping[tuple[tuple[int, ...], int, int], ParityPlaces]
"""Parity by group and code."""


def _parities_of(
    copies: Iterable[tuple[FoundParity, list[int]]], bad: Bad, sight: _Sight
) -> Parities:
    """Return the usable parity of a version."""
    found: dict[tuple[tuple[int, ...], int, int], list[tuple[FoundParity, list[int]]]] = {}
    for parity, ranks in copies:
        found.setdefault((parity.group, parity.k, parity.m), []).append((parity, ranks))
    usable: dict[tuple[tuple[int, ...], int, int], ParityPlaces] = {}
    for code, items in sorted(found.items()):
        places = _places(items, bad)
        usable[code] = {
            p.key: left for p, _ in items if (left := sight.of(p.key, places.get(p.key, {})))
        }
    return usable


def _parity_source(
    key: ParityKey,
    places: Places,
    load: _Load,
    segments: Sequence[Segment],
) -> ParitySource:
    """Pick the rank with the least to read among those that see the parity."""
    there = _cheapest(places)
    reader = load.give(_readers_at(there), home=-1)
    member, indices = segments[0].member, tuple(s.index for s in segments)
    return ParitySource(member, key, _place_of(reader, there), reader, indices)


def _assign(
    keys: Sequence[ShardKey], places_of: Mapping[ShardKey, Places], nodes: Sequence[str]
) -> list[Source]:
    """Pick a place and a reader, or a rank to rebuild, for every shard. Ranks are loaded as evenly
    as places allow, and nodes as evenly as that allows (see `_Load`).

    Shards that few ranks can read, for example because one already has it, are assigned first. A
    shard goes to its own rank (see `repair`) if that rank can read it and has no other work. For a
    shard that all ranks see this holds only if there is one for each rank; otherwise a few readers
    might all be on one node.
    """
    load, making = _Load(nodes), _Load(nodes)
    readers: dict[ShardKey, int] = {}
    nearest = {key: _cheapest(places) for key, places in places_of.items()}
    able = {key: _readers_at(there) for key, there in nearest.items()}
    ranks = range(len(nodes))
    far = {key for key, there in nearest.items() if next(iter(there)).host == EVERYWHERE}
    far_homes = len(far) == len(nodes)
    for key in sorted(nearest, key=lambda key: (len(able[key]), key.shard)):
        home = key.shard if key not in far or far_homes else -1
        readers[key] = load.give(able[key], home)
    sources = []
    for key in keys:
        if key not in nearest:
            maker = making.give(ranks, key.shard if len(keys) <= len(nodes) else -1)
            sources.append(Source(key.shard, REBUILT, maker, direct=False))
            continue
        place = _place_of(readers[key], nearest[key])
        # A shard that has to be decoded is decoded once, not by every rank.
        seen_by_all = len(places_of[key][place]) == len(nodes) and place.host != EVERYWHERE
        direct = seen_by_all and not place.encoded
        sources.append(Source(key.shard, place, readers[key], direct=direct))
    return sources


class _Load:
    """The work of each rank, balanced to one piece. Where that leaves a choice, the node with the
    least work gets the piece."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._of_rank = [0] * len(nodes)
        self._of_node: Counter[str] = Counter()
        self._lightest_first: dict[int, tuple[Sequence[int], list[tuple[int, int, int]]]] = {}
        """Heaps of weights, one per sequence of ranks to choose from, by its identity. Weights only
        grow: an outdated entry is too light."""

    def give(self, ranks: Sequence[int], home: int) -> int:
        """Give one piece to one of `ranks`, which are in order: to `home`, if it is one of them and
        has none yet."""
        at = bisect_left(ranks, home)
        free = at < len(ranks) and ranks[at] == home and self._of_rank[home] == 0
        rank = home if free else self._lightest(ranks)
        self._of_rank[rank] += 1
        self._of_node[self._nodes[rank]] += 1
        return rank

    def _lightest(self, ranks: Sequence[int]) -> int:
        """Return the rank with the least work. A heap saves a scan of all ranks for each piece."""
        if id(ranks) not in self._lightest_first:
            self._lightest_first[id(ranks)] = ranks, sorted(map(self._weight, ranks))
        _, heap = self._lightest_first[id(ranks)]
        while (now := self._weight(heap[0][-1])) != heap[0]:
            heapq.heapreplace(heap, now)
        return heap[0][-1]

    def _weight(self, rank: int) -> tuple[int, int, int]:
        return self._of_rank[rank], self._of_node[self._nodes[rank]], rank
