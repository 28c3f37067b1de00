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

    Shard s was written by rank s, on node `node_of[s]`. Every version has groups of its own, each
    with a code of its own: a restart may change both. What is in no group is not protected.
    """

    node_of: list[int]
    ranks: list[int]
    """The node of each rank of now."""
    codes: dict[int, dict[tuple[int, ...], Code]]
    """By version: its groups, each in the order of its ring."""
    disks: dict[int, set[tuple[int, bool, int]]]
    """By node: (version, is parity, shard)."""
    persistent: set[int]

    @property
    def shards(self) -> int:
        return len(self.node_of)

    def group_of(self, version: int, shard: int) -> tuple[int, ...]:
        return next(group for group in self.codes[version] if shard in group)

    def place(self, node: int) -> Place:
        return Place("local", f"node{node}", "/disk")

    def left(self) -> set[tuple[int, bool, int]]:
        """On the nodes that a rank of now is on."""
        return set().union(*(self.disks[node] for node in set(self.ranks)))

    def seen_by(self, node: int) -> tuple[list[Found], list[FoundParity]]:
        found, parities = [], []
        for version, is_parity, shard in sorted(self.disks[node]):
            name = (VersionId(1, version), shard, self.shards)
            if is_parity:
                group = self.group_of(version, shard)
                code = self.codes[version][group]
                made = (LINEAGE, "life", group, code.k, code.m)
                parities.append(FoundParity(ParityKey(*name), self.place(node), *made))
            else:
                found.append(Found(ShardKey(*name), self.place(node), LINEAGE, "life"))
        return found, parities

    def can_be_made(self, version: int) -> bool:
        """By counting what is known of every row of every group."""
        there = self.left()
        grouped = {shard for group in self.codes[version] for shard in group}
        if any((version, False, s) not in there for s in set(range(self.shards)) - grouped):
            return False
        for group, code in self.codes[version].items():
            for row in range(code.n):
                word = [(s.parity, group[s.member]) for s in code.row(row)]
                known = [w for w in word if (version, *w) in there]
                if any(not p and (p, s) not in known for p, s in word) and len(known) < code.k:
                    return False
        return True


CODES = [(k, m) for k in range(1, 5) for m in range(1, 4)]


@st.composite
def schemes(draw: st.DrawFn, shards: int) -> dict[tuple[int, ...], Code]:
    """Shards dealt out to groups of any sizes; one that is left over is in none."""
    rest = draw(st.permutations(range(shards)))
    codes = {}
    while len(rest) > 1:
        size = draw(st.integers(2, min(len(rest), 6)))
        k, m = draw(st.sampled_from([(k, m) for k, m in CODES if k + m <= size]))
        codes[tuple(rest[:size])] = Code(size, k, m)
        rest = rest[size:]
    return codes


@st.composite
def worlds(draw: st.DrawFn) -> World:
    nodes = draw(st.integers(2, 5))
    per_node = [draw(st.integers(1, 3)) for _ in range(nodes)]
    node_of = [node for node, count in enumerate(per_node) for _ in range(count)]
    codes = {version: draw(schemes(len(node_of))) for version in VERSIONS}
    disks: dict[int, set[tuple[int, bool, int]]] = {node: set() for node in range(nodes)}
    for node in range(nodes):
        if draw(st.integers(0, 4)) == 0:
            continue  # lost
        own = [shard for shard, there in enumerate(node_of) if there == node]
        disks[node] = {(v, False, s) for v in VERSIONS for s in own}
        disks[node] |= {(v, True, s) for v in VERSIONS for g in codes[v] for s in g if s in own}
        damaged = draw(st.lists(st.sampled_from(sorted(disks[node])), max_size=2))
        disks[node] -= set(damaged)
    ranks = draw(st.lists(st.integers(0, nodes - 1), min_size=1, max_size=len(node_of)))
    persistent = draw(st.sets(st.sampled_from(VERSIONS)))
    return World(node_of, sorted(ranks), codes, disks, persistent)


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
    there = world.left()
    rebuilt = {shard for rebuild in plan.rebuilds for shard in rebuild.lost}
    for source in plan.sources:
        here = (version, False, source.shard) in there
        if source.shard in rebuilt:
            assert not here
            assert source.rebuilt
            assert not source.direct
        elif here:
            node = world.node_of[source.shard]
            assert source.place == world.place(node)
            assert world.ranks[source.reader] == node
        else:
            assert source.place.level == "persistent"
            assert version not in near, "what is near can do it"
    for rebuild in plan.rebuilds:
        for parity in rebuild.parities:
            assert rebuild.group[parity.member] == parity.key.shard
            assert world.ranks[parity.reader] == world.node_of[parity.key.shard]


@given(worlds())
@settings(max_examples=300)
def test_no_parity_is_read_that_nothing_is_made_of(world: World) -> None:
    """Every row that lacks data takes as many parities as data, and those that come first."""
    found, parities = inventories_of(world)
    plan = plan_restore(found, parities=parities)
    for rebuild in plan.rebuilds if plan else ():
        left = {key.shard for key in rebuild.left}
        taken = set()
        assert plan is not None
        code = world.codes[plan.id.version][rebuild.group]
        for row in range(code.n):
            word = [(s.parity, rebuild.group[s.member]) for s in code.row(row)]
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


@given(worlds(), st.integers(0, 99))
@settings(max_examples=300)
def test_what_was_fetched_is_not_fetched_again_when_a_copy_turns_out_bad(
    world: World, number: int
) -> None:
    found, parities = inventories_of(world)
    plan = plan_restore(found, parities=parities)
    if plan is None or plan.rebuilds or number >= len(plan.sources):
        return
    keys = [ShardKey(plan.id, s.shard, world.shards) for s in plan.sources]
    had = {(key, s.place): s.reader for key, s in zip(keys, plan.sources, strict=True)}
    bad = frozenset([(keys[number], plan.sources[number].place)])
    again = plan_restore(found, bad, None, parities, had)
    for before, now in zip(plan.sources, again.sources if again else (), strict=False):
        if again is not None and again.id == plan.id and now.place == before.place:
            assert now.reader == before.reader


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
