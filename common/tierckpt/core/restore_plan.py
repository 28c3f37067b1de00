"""Which of what is left a restart uses, and who reads it: pure, from what `inventory` found.

All ranks share their inventories once and then plan alike, without talking again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tierckpt.erasure.codes import Code, Segment
from tierckpt.erasure.exchange_plan import plan_rebuild
from tierckpt.errors import RestoreError
from tierckpt.format.ids import Key, Lineage, ParityKey, ShardKey, VersionId, newest_first

from .copies import EVERYWHERE, Found, FoundParity, Location
from .levels import PEER, RANK, Level

REBUILT = Location(PEER, EVERYWHERE, "rebuilt")
"""Of what was lost and is made again."""


@dataclass(frozen=True)
class Source:
    """Where one shard comes from."""

    shard: int
    place: Location
    reader: int
    """The rank that reads and verifies it, or makes it."""
    direct: bool
    """Every rank sees the same copy: each maps it itself; otherwise the reader broadcasts it."""

    @property
    def rebuilt(self) -> bool:
        """It is nowhere: its reader makes it and holds it."""
        return self.place == REBUILT


@dataclass(frozen=True)
class ParitySource:
    """Where the parity beside one member's shard is, and the rank that reads and checks it."""

    member: int
    """On the ring."""
    key: ParityKey
    place: Location
    reader: int
    segments: tuple[int, ...]
    """Which of it are read; nothing is made of the others."""


@dataclass(frozen=True)
class Rebuild:
    """Lost shards of one redundancy group, and what they are made from."""

    group: tuple[int, ...]
    lost: tuple[int, ...]
    """Shard numbers."""
    parities: tuple[ParitySource, ...]
    """Those that it takes; members that are not lost have their shards elsewhere in the plan."""
    left: frozenset[ParityKey] = frozenset()
    """All that there are and that nobody found damaged."""


@dataclass(frozen=True)
class RestorePlan:
    """Which version to restore, and each shard's source, by shard number."""

    id: VersionId
    sources: tuple[Source, ...]
    run_id: str = ""
    rebuilds: tuple[Rebuild, ...] = ()

    @property
    def levels(self) -> dict[str, int]:
        """How many shards come from which level."""
        names = [s.place.level for s in self.sources]
        return {level.value: names.count(level) for level in Level if level in names}


Bad = frozenset[tuple[ShardKey, Location]]
Readers = Mapping[tuple[ShardKey, Location], int]
"""Who read a copy at an earlier try, and has it."""
Unreachable = frozenset[tuple[ShardKey, Location, int]]
"""Copies that a rank could not get at, and that rank; others may."""


def plan_restore(
    inventories: Sequence[Sequence[Found]],
    bad: Bad = frozenset(),
    version: int | None = None,
    parities: Sequence[Sequence[FoundParity]] = (),
    readers: Readers = MappingProxyType({}),
    unreachable: Unreachable = frozenset(),
    nodes: Sequence[str] = (),
    avoid: Container[VersionId] = (),
) -> RestorePlan | None:
    """The newest version whose every shard is somewhere, or can be rebuilt, each shard from its
    cheapest place.

    All shards of a version are of one run. `bad` are copies found damaged; `version` asks for that
    one only; `readers` read the same copies again; nobody is to read what is `unreachable` to it
    (see `_Sight`), and a copy is lost when nobody is left. `nodes` names every rank's; without it
    each rank is on one of its own. `avoid` are versions that are not to be taken. None when there
    is no such version. Same inputs, same plan:
    every rank calls this.
    """
    nodes = nodes or [str(rank) for rank in range(len(inventories))]
    sight = _Sight(len(inventories), readers, unreachable)
    seen: dict[tuple[str, ShardKey], dict[Location, list[int]]] = {}
    lineages: dict[VersionId, Lineage] = {}
    for rank, inventory in enumerate(inventories):
        for item in inventory:
            lineages[item.key.id] = item.facts.lineage
            if (item.key, item.place) not in bad:
                places = seen.setdefault((item.facts.run_id, item.key), {})
                places.setdefault(item.place, []).append(rank)
    lineages.update({p.key.id: p.facts.lineage for each in parities for p in each})
    runs = {(run_id, k.id, k.shards) for run_id, k in seen}
    runs |= {(p.facts.run_id, p.key.id, p.key.shards) for each in parities for p in each}
    for id_ in newest_first(lineages.items()):
        if (version is not None and id_.version != version) or id_ in avoid:
            continue
        for run_id, shards in sorted({(run_id, n) for run_id, i, n in runs if i == id_}):
            keys = [ShardKey(id_, s, shards) for s in range(shards)]
            places_of = {k: p for k in keys if (p := sight.of(k, seen.get((run_id, k), {})))}
            made_of = _parities_of(keys[0], parities, run_id, bad, sight)
            there, rebuilds, lost = _put_together(keys, places_of, made_of, nodes)
            if not lost:
                sources = tuple(_assign(keys, there, nodes))
                return RestorePlan(id_, sources, run_id, rebuilds)
    return None


class _Sight:
    """Which ranks are to read which copies.

    Who could not get at one shard of a version on the persistent level is asked for no other shard
    of it there, or one that lacks the mount would be tried shard after shard; and for no other
    version as long as there is a rank to which all went well. Who has a copy from an earlier try
    keeps it. Near levels are told copy by copy.
    """

    def __init__(self, ranks: int, had: Readers, unreachable: Unreachable) -> None:
        self._everyone: Sequence[int] = range(ranks)
        self._had, self._unreachable = had, unreachable
        far = [(key, place, rank) for key, place, rank in unreachable if place.is_far]
        self._without = {(key.id, place, rank) for key, place, rank in far}
        self._trouble = {(place, rank) for _, place, rank in far}
        self._of_all: dict[tuple[VersionId, Location], Sequence[int]] = {}

    def of(self, key: ShardKey, seen: Mapping[Location, Sequence[int]]) -> Places:
        """Of the places where ranks saw the shard, those that are left, with who may read there."""
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
            return self._everyone
        left = [rank for rank in self._everyone if (version, place, rank) not in self._without]
        return [rank for rank in left if (place, rank) not in self._trouble] or left


def _cost(place: Location) -> tuple[int, bool, bool]:
    """The cheapest is the least."""
    return RANK[place.level], not place.in_memory, place.encoded


Places = Mapping[Location, Sequence[int]]
"""Where a shard is, and which ranks may read it there."""


def _cheapest(places: Places) -> Places:
    """Where it is at the least cost: on several nodes, as where they share a directory. What most
    ranks see comes first."""
    least = min(map(_cost, places))
    best = [place for place in places if _cost(place) == least]
    return {place: places[place] for place in sorted(best, key=lambda p: (-len(places[p]), p))}


def _readers_at(places: Places) -> Sequence[int]:
    """Who may read it at any of them."""
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
    """Where to take shards from, what to make, and which of them there is no way to.

    What other nodes' can make is not fetched from far away, nor what is near: the rest alone. Last
    come what can be made only of parity that is far away itself.
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
    """What is on a node of the job's, with its places there."""
    return {
        key: there
        for key, places in places_of.items()
        if (there := {place: ranks for place, ranks in places.items() if not place.is_far})
    }


def plan_rebuilds(
    keys: Sequence[ShardKey], there: Container[ShardKey], parities: Parities, nodes: Sequence[str]
) -> tuple[tuple[Rebuild, ...], set[int]]:
    """How to make the shards of `keys` that are not `there`; and which of them cannot be made."""
    lost = {key.shard for key in keys if key not in there}
    rebuilds = []
    load = _Load(nodes)
    for (group, k, m), parity_keys in parities.items():
        gone = tuple(shard for shard in group if shard in lost)
        if not gone:
            continue
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
"""Where each is, and which ranks may read it there."""
Parities = Mapping[tuple[tuple[int, ...], int, int], ParityPlaces]
"""By group and code."""


def _parities_of(
    key: ShardKey,
    parities: Sequence[Sequence[FoundParity]],
    run_id: str,
    bad: Bad,
    sight: _Sight,
) -> Parities:
    """What there is of the version that `key` is of."""
    found: dict[tuple[tuple[int, ...], int, int], dict[ParityKey, dict[Location, list[int]]]] = {}
    for rank, inventory in enumerate(parities):
        for p in inventory:
            same = (p.facts.run_id, p.key.id, p.key.shards) == (run_id, key.id, key.shards)
            if same and (p.key, p.place) not in bad:
                places = found.setdefault((p.group, p.k, p.m), {}).setdefault(p.key, {})
                places.setdefault(p.place, []).append(rank)
    return {
        code: {key: left for key, places in seen.items() if (left := sight.of(key, places))}
        for code, seen in sorted(found.items())
    }


def _parity_source(
    key: ParityKey,
    places: Places,
    load: _Load,
    segments: Sequence[Segment],
) -> ParitySource:
    """Read by the rank that has least to read of those that see it."""
    there = _cheapest(places)
    reader = load.give(_readers_at(there), home=-1)
    member, indices = segments[0].member, tuple(s.index for s in segments)
    return ParitySource(member, key, _place_of(reader, there), reader, indices)


def _assign(
    keys: Sequence[ShardKey], places_of: Mapping[ShardKey, Places], nodes: Sequence[str]
) -> list[Source]:
    """Pick a place and a reader, or a maker, for every shard; ranks as evenly loaded as places
    allow, and nodes as evenly as that allows (see `_Load`).

    What few ranks are to read, one that may have it already say, counts first. A shard is its
    own rank's (see `repair`), where it has one that can and has nothing else to do; of what all
    see only where there is one for each rank, as few might all be of one node.
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
        # What has to be decoded is decoded once, and not by every rank.
        seen_by_all = len(places_of[key][place]) == len(nodes) and place.host != EVERYWHERE
        direct = seen_by_all and not place.encoded
        sources.append(Source(key.shard, place, readers[key], direct=direct))
    return sources


class _Load:
    """What ranks have to do: each as much as any other, to one piece; and where that leaves a
    choice, what is done on the node that has least to do."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._of_rank = [0] * len(nodes)
        self._of_node: Counter[str] = Counter()
        self._lightest_first: dict[Sequence[int], list[tuple[int, int, int]]] = {}
        """Heaps of the weights of those among whom was chosen. Weights only grow: an entry that is
        out of date is too light."""

    def give(self, ranks: Sequence[int], home: int) -> int:
        """One piece, to one of `ranks`: to `home`, if that is one and has nothing to do yet."""
        free = home in ranks and self._of_rank[home] == 0
        rank = home if free else self._lightest(ranks)
        self._of_rank[rank] += 1
        self._of_node[self._nodes[rank]] += 1
        return rank

    def _lightest(self, ranks: Sequence[int]) -> int:
        """Not by looking at all: of what every rank may read there are as many pieces as ranks."""
        who = ranks if isinstance(ranks, range) else tuple(ranks)
        if who not in self._lightest_first:
            self._lightest_first[who] = sorted(map(self._weight, who))
        heap = self._lightest_first[who]
        while (now := self._weight(heap[0][-1])) != heap[0]:
            heapq.heapreplace(heap, now)
        return heap[0][-1]

    def _weight(self, rank: int) -> tuple[int, int, int]:
        return self._of_rank[rank], self._of_node[self._nodes[rank]], rank
