"""The plan of a restart, where shards are lost and redundancy schemes make up for some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tierckpt.inventory import (
    EVERYWHERE,
    Found,
    FoundParity,
    Place,
    plan_restore,
)
from tierckpt.naming import ParityKey, ShardKey, VersionId
from tierckpt.redundancy.codes import Code

LINEAGE = ((1, 0),)
VERSIONS = (1, 2)


@dataclass
class World:
    """Ranks of now on nodes of then, and what is left there of two versions.

    Shard s was written by rank s, on node s // per_node; redundancy groups have a shard of each
    node.
    """

    nodes: int
    per_node: int
    ranks: list[int]
    """The node of each rank of now."""
    code: Code
    disks: dict[int, set[tuple[int, bool, int]]]
    """By node: (version, is parity, shard)."""
    persistent: set[int]

    @property
    def shards(self) -> int:
        return self.nodes * self.per_node

    def groups(self) -> list[tuple[int, ...]]:
        return [
            tuple(node * self.per_node + part for node in range(self.nodes))
            for part in range(self.per_node)
        ]

    def place(self, node: int) -> Place:
        return Place("local", f"node{node}", "/disk")

    def seen_by(self, node: int) -> tuple[list[Found], list[FoundParity]]:
        found, parities = [], []
        for version, is_parity, shard in sorted(self.disks[node]):
            name = (VersionId(1, version), shard, self.shards)
            if is_parity:
                group = self.groups()[shard % self.per_node]
                made = (LINEAGE, "life", group, self.code.k, self.code.m)
                parities.append(FoundParity(ParityKey(*name), self.place(node), *made))
            else:
                found.append(Found(ShardKey(*name), self.place(node), LINEAGE, "life"))
        return found, parities

    def can_be_made(self, version: int) -> bool:
        """By counting what is known of every row of every group."""
        there = set().union(*(self.disks[node] for node in set(self.ranks)))
        for group in self.groups():
            for row in range(self.code.n):
                word = [(s.parity, group[s.member]) for s in self.code.row(row)]
                known = [w for w in word if (version, *w) in there]
                if any(not p and (p, s) not in known for p, s in word) and len(known) < self.code.k:
                    return False
        return True


@st.composite
def worlds(draw: st.DrawFn) -> World:
    nodes, per_node = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    k, m = draw(st.sampled_from([(k, m) for k in range(1, 4) for m in (1, 2) if k + m <= nodes]))
    disks: dict[int, set[tuple[int, bool, int]]] = {node: set() for node in range(nodes)}
    for node in range(nodes):
        if draw(st.integers(0, 4)) == 0:
            continue  # lost
        own = range(node * per_node, (node + 1) * per_node)
        disks[node] = {(v, parity, s) for v in VERSIONS for parity in (False, True) for s in own}
        damaged = draw(st.lists(st.sampled_from(sorted(disks[node])), max_size=2))
        disks[node] -= set(damaged)
    ranks = draw(st.lists(st.integers(0, nodes - 1), min_size=1, max_size=nodes * per_node))
    persistent = draw(st.sets(st.sampled_from(VERSIONS)))
    return World(nodes, per_node, sorted(ranks), Code(nodes, k, m), disks, persistent)


def inventories_of(world: World) -> tuple[list[list[Found]], list[list[FoundParity]]]:
    found, parities = [], []
    for number, node in enumerate(world.ranks):
        seen, made = world.seen_by(node)
        if number == 0:
            far = Place("persistent", EVERYWHERE, "/far")
            seen += [
                Found(ShardKey(VersionId(1, v), s, world.shards), far, LINEAGE, "life")
                for v in sorted(world.persistent)
                for s in range(world.shards)
            ]
        found.append(seen)
        parities.append(made)
    return found, parities


@given(worlds())
@settings(max_examples=300)
def test_what_can_be_made_is_found_and_nothing_else(world: World) -> None:
    found, parities = inventories_of(world)
    plan = plan_restore(found, parities=parities)
    near = {v for v in VERSIONS if world.can_be_made(v)}
    possible = near | world.persistent
    if not possible:
        assert plan is None
        return
    assert plan is not None
    version = max(possible)
    assert plan.id == VersionId(1, version)
    there = set().union(*(world.disks[node] for node in set(world.ranks)))
    rebuilt = {shard for rebuild in plan.rebuilds for shard in rebuild.lost}
    for source in plan.sources:
        here = (version, False, source.shard) in there
        if source.shard in rebuilt:
            assert not here
            assert source.rebuilt
            assert not source.direct
        elif here:
            node = source.shard // world.per_node
            assert source.place == world.place(node)
            assert world.ranks[source.reader] == node
        else:
            assert source.place.level == "persistent"
            assert version not in near, "what is near can do it"
    for rebuild in plan.rebuilds:
        for parity in rebuild.parities:
            assert rebuild.group[parity.member] == parity.key.shard
            assert world.ranks[parity.reader] == parity.key.shard // world.per_node


@given(worlds())
@settings(max_examples=300)
def test_no_parity_is_read_that_nothing_is_made_of(world: World) -> None:
    """Every row that lacks data takes as many parities as data, and those that come first."""
    found, parities = inventories_of(world)
    plan = plan_restore(found, parities=parities)
    for rebuild in plan.rebuilds if plan else ():
        left = {key.shard for key in rebuild.left}
        taken = set()
        for row in range(world.code.n):
            word = [(s.parity, rebuild.group[s.member]) for s in world.code.row(row)]
            lacking = sum(not is_parity and shard in rebuild.lost for is_parity, shard in word)
            parity = enumerate(shard for is_parity, shard in word if is_parity)
            taken |= set([(shard, p) for p, shard in parity if shard in left][:lacking])
        assert {(p.key.shard, index) for p in rebuild.parities for index in p.segments} == taken


@given(worlds())
@settings(max_examples=300)
def test_reading_is_spread_evenly(world: World) -> None:
    """Over the ranks of a node, what lies there; over all, what all see."""
    found, parities = inventories_of(world)
    plan = plan_restore(found, parities=parities)
    if plan is None:
        return
    far = any(s.place.level == "persistent" for s in plan.sources)
    for node in set(world.ranks):
        own = [rank for rank, there in enumerate(world.ranks) if there == node]
        place = world.place(node)
        shards = Counter(s.reader for s in plan.sources if s.place == place)
        made = [p for r in plan.rebuilds for p in r.parities if p.place == place]
        assert is_even(Counter(p.reader for p in made), own)
        assert far or is_even(shards, own)
    if len(set(world.ranks)) == 1:  # all see all that there is
        loads = Counter(s.reader for s in plan.sources if not s.rebuilt)
        assert is_even(loads, range(len(world.ranks)))


@given(worlds())
@settings(max_examples=300)
def test_what_is_lost_is_made_by_its_own_rank_or_else_spread_evenly(world: World) -> None:
    found, parities = inventories_of(world)
    plan = plan_restore(found, parities=parities)
    if plan is None:
        return
    made = {s.shard: s.reader for s in plan.sources if s.rebuilt}
    assert is_even(Counter(made.values()), range(len(world.ranks)))
    if len(plan.sources) <= len(world.ranks):
        assert all(rank == shard for shard, rank in made.items())


def is_even(load: Counter[int], ranks: Iterable[int]) -> bool:
    each = [load[rank] for rank in ranks]
    return max(each) - min(each) <= 1


def test_few_files_for_many_ranks_are_read_on_all_nodes() -> None:
    """16 shards of a small job, for 64 ranks on 8 nodes: two on each node."""
    far = Place("persistent", EVERYWHERE, "/far")
    shards = [Found(ShardKey(VersionId(1, 1), s, 16), far, LINEAGE) for s in range(16)]
    plan = plan_restore([shards, *([] for _ in range(63))])
    assert plan is not None
    assert Counter(s.reader // 8 for s in plan.sources) == dict.fromkeys(range(8), 2)
