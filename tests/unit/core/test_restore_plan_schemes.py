"""Restore plan: lost shards, and redundancy schemes that rebuild some of them."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from types import FrameType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.facts import found_at, parity_at
from tierckpt.core import AGENT, EVERYWHERE, Found, FoundParity, Location, RestorePlan, plan_restore
from tierckpt.erasure import Code
from tierckpt.format import ParityKey, ShardKey, VersionId

LINEAGE = ((1, 0),)
VERSIONS = (1, 2)
FAR = Location("persistent", EVERYWHERE, "/far")


@dataclass
class World:
    """Ranks on nodes of an earlier run, and the data of two versions left there.

    Shard s was written by rank s, on node `node_of[s]`. Every version has its own groups, each with
    its own code: a restart may change both. Shards in no group are not protected.
    """

    node_of: list[int]
    ranks: list[int]
    """The node of each present rank."""
    codes: dict[int, dict[tuple[int, ...], Code]]
    """Groups by version, each in the order of its ring."""
    disks: dict[int, set[tuple[int, bool, int]]]
    """(version, is parity, shard) by node."""
    persistent: set[int]
    bad_near: set[tuple[int, bool, int]]
    """Copies on disks that an earlier attempt found damaged."""
    bad_far: set[tuple[int, int]]
    """The same of the persistent level, by version and shard."""
    sharing: frozenset[int] = frozenset()
    """Nodes that share one directory, with the files of all of them."""

    @property
    def shards(self) -> int:
        return len(self.node_of)

    def group_of(self, version: int, shard: int) -> tuple[int, ...]:
        return next(group for group in self.codes[version] if shard in group)

    def place(self, node: int) -> Location:
        return Location("local", f"node{node}", "/disk")

    def seen_on(self, node: int) -> set[int]:
        """Nodes with ranks that see the files of this node."""
        return set(self.sharing) if node in self.sharing else {node}

    def on_disk(self, node: int) -> set[tuple[int, bool, int]]:
        """The files that its ranks see."""
        return set().union(*(self.disks[other] for other in self.seen_on(node)))

    def left(self) -> set[tuple[int, bool, int]]:
        """True for an undamaged file on a node with a present rank."""
        return set().union(*(self.on_disk(node) for node in set(self.ranks))) - self.bad_near

    def far(self, version: int) -> set[int]:
        """Shards that are undamaged on the persistent level."""
        if version not in self.persistent:
            return set()
        return {s for s in range(self.shards) if (version, s) not in self.bad_far}

    def bad(self) -> frozenset[tuple[ShardKey, Location]]:
        """The inventory as the planner gets it."""
        near = [
            ((ParityKey if p else ShardKey)(VersionId(1, v), s, self.shards), node)
            for v, p, s in self.bad_near
            for node in self.seen_on(self.node_of[s])
        ]
        far = [(ShardKey(VersionId(1, v), s, self.shards), FAR) for v, s in self.bad_far]
        return frozenset([(key, self.place(node)) for key, node in near] + far)

    def seen_by(self, node: int) -> tuple[list[Found], list[FoundParity]]:
        found, parities = [], []
        for version, is_parity, shard in sorted(self.on_disk(node)):
            name = (VersionId(1, version), shard, self.shards)
            if is_parity:
                group = self.group_of(version, shard)
                code = self.codes[version][group]
                made = (LINEAGE, "life", group, code.k, code.m)
                parities.append(parity_at(ParityKey(*name), self.place(node), *made))
            else:
                found.append(found_at(ShardKey(*name), self.place(node), LINEAGE, "life"))
        return found, parities

    def out_of_reach(self, version: int, there: set[tuple[int, bool, int]]) -> set[int]:
        """Return the shards that are neither `there` nor can be rebuilt, by counting the known
        members of every row of their group."""
        lost = {s for s in range(self.shards) if (version, False, s) not in there}
        for group, code in self.codes[version].items():
            if all(self._row_is_known(version, group, code, row, there) for row in range(code.n)):
                lost -= set(group)
        return lost

    def _row_is_known(
        self,
        version: int,
        group: tuple[int, ...],
        code: Code,
        row: int,
        there: set[tuple[int, bool, int]],
    ) -> bool:
        word = [(s.parity, group[s.member]) for s in code.row(row)]
        known = [w for w in word if (version, *w) in there]
        return len(known) >= code.k or all(p or (p, s) in known for p, s in word)


CODES = [(k, m) for k in range(1, 5) for m in range(1, 4)]


def schemes(random: Random, shards: int) -> dict[tuple[int, ...], Code]:
    """Divide shards into groups of any sizes; a shard left over is in none."""
    rest = random.sample(range(shards), shards)
    codes = {}
    while len(rest) > 1:
        size = random.randint(2, min(len(rest), 6))
        k, m = random.choice([(k, m) for k, m in CODES if k + m <= size])
        codes[tuple(rest[:size])] = Code(size, k, m)
        rest = rest[size:]
    return codes


def some(random: Random, them: Iterable[Any], most: int) -> set[Any]:
    """At most so many of them, often none."""
    them = sorted(them)
    return set(random.sample(them, random.randint(0, min(most, len(them)))))


def world_of(random: Random) -> World:
    nodes = random.randint(2, 5)
    per_node = [random.randint(1, 3) for _ in range(nodes)]
    node_of = [node for node, count in enumerate(per_node) for _ in range(count)]
    codes = {version: schemes(random, len(node_of)) for version in VERSIONS}
    disks: dict[int, set[tuple[int, bool, int]]] = {node: set() for node in range(nodes)}
    for node in range(nodes):
        if random.randrange(5) == 0:
            continue  # lost
        own = [shard for shard, there in enumerate(node_of) if there == node]
        disks[node] = {(v, False, s) for v in VERSIONS for s in own}
        disks[node] |= {(v, True, s) for v in VERSIONS for g in codes[v] for s in g if s in own}
        disks[node] -= some(random, disks[node], 2)
    ranks = sorted(random.choices(range(nodes), k=random.randint(1, len(node_of))))
    persistent = some(random, VERSIONS, 2)
    bad_near = some(random, set().union(*disks.values()), 3)
    bad_far = some(random, itertools.product(VERSIONS, range(len(node_of))), 2)
    sharing = frozenset(some(random, range(nodes), nodes))
    return World(node_of, ranks, codes, disks, persistent, bad_near, bad_far, sharing)


def worlds() -> st.SearchStrategy[World]:
    """Hypothesis draws a seed alone: to draw the parts costs ten times as much as to use them."""
    return st.integers(0, 2**32).map(lambda seed: world_of(Random(seed)))


def inventories_of(world: World) -> tuple[list[list[Found]], list[list[FoundParity]]]:
    found, parities = [], []
    for number, node in enumerate(world.ranks):
        seen, made = world.seen_by(node)
        if number == 0:
            seen += [
                found_at(ShardKey(VersionId(1, v), s, world.shards), FAR, LINEAGE, "life")
                for v in sorted(world.persistent)
                for s in range(world.shards)
            ]
        found.append(seen)
        parities.append(made)
    return found, parities


def planned(world: World) -> RestorePlan | None:
    found, parities = inventories_of(world)
    nodes = [f"node{node}" for node in world.ranks]
    return plan_restore(found, world.bad(), parities=parities, nodes=nodes)


@given(worlds())
@settings(max_examples=300)
def test_a_plan_keeps_its_promises(world: World) -> None:
    plan = planned(world)
    check_what_is_found(world, plan)
    if plan is not None:
        check_parities(world, plan)
        check_reading(world, plan)
        check_rebuilding(world, plan)


def check_what_is_found(world: World, plan: RestorePlan | None) -> None:
    """Only shards that the nodes neither have nor can rebuild come from far away, although others
    are lost, too."""
    there = world.left()
    wanted = {v: world.out_of_reach(v, there) & world.far(v) for v in VERSIONS}
    possible = [
        v for v in VERSIONS if not world.out_of_reach(v, there | {(v, False, s) for s in wanted[v]})
    ]
    if not possible:
        assert plan is None
        return
    assert plan is not None
    version = max(possible)
    assert plan.id == VersionId(1, version)
    rebuilt = {shard for rebuild in plan.rebuilds for shard in rebuild.lost}
    for source in plan.sources:
        here = (version, False, source.shard) in there
        if source.shard in rebuilt:
            assert not here
            assert source.rebuilt
            assert not source.direct
        elif here:
            node = world.ranks[source.reader]
            assert source.place == world.place(node)
            assert node in world.seen_on(world.node_of[source.shard])
        else:
            assert source.place == FAR
            assert source.shard in wanted[version], "what is near can do it"
    for rebuild in plan.rebuilds:
        for parity in rebuild.parities:
            assert rebuild.group[parity.member] == parity.key.shard
            node = world.ranks[parity.reader]
            assert parity.place == world.place(node)
            assert node in world.seen_on(world.node_of[parity.key.shard])


def agent_of(node: int) -> Location:
    return Location(AGENT, EVERYWHERE, f"agent of node{node}")


@given(worlds(), st.integers(0, 99))
@settings(max_examples=150)
def test_nodes_without_a_rank_are_the_last_but_one_way_out(world: World, number: int) -> None:
    """After near copies and before the persistent level; their parity after all shards."""
    found, parities = inventories_of(world)
    former_nodes = {node for node in world.disks if node not in world.ranks}
    asker = number % len(world.ranks)
    for node in sorted(former_nodes):
        seen, made = world.seen_by(node)
        found[asker] += [replace(f, place=agent_of(node)) for f in seen]
        parities[asker] += [replace(p, place=agent_of(node)) for p in made]
    nodes = [f"node{node}" for node in world.ranks]
    plan = plan_restore(found, world.bad(), parities=parities, nodes=nodes)

    there = world.left()
    shown: set[tuple[int, bool, int]] = set().union(*(world.on_disk(node) for node in former_nodes))
    far_shards = {
        v: {s for p_v, parity, s in shown if p_v == v and not parity} | world.far(v)
        for v in VERSIONS
    }
    fetched = {v: world.out_of_reach(v, there) & far_shards[v] for v in VERSIONS}
    known = {v: there | {(v, False, s) for s in fetched[v]} for v in VERSIONS}
    far_parities = {each for each in shown if each[1]}
    possible = [v for v in VERSIONS if not world.out_of_reach(v, known[v] | far_parities)]
    if not possible:
        assert plan is None
        return
    assert plan is not None
    version = plan.id.version
    assert version == max(possible)
    for source in plan.sources:
        if source.place.level == AGENT:
            assert source.place in map(agent_of, world.seen_on(world.node_of[source.shard]))
            assert source.shard in world.out_of_reach(version, there), "what is near can do it"
            assert not source.direct
        elif source.place == FAR:
            assert (version, False, source.shard) not in shown
    if not world.out_of_reach(version, known[version]):
        used = [p for rebuild in plan.rebuilds for p in rebuild.parities]
        assert all(p.place.level != AGENT for p in used)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(2, 9), st.integers(0, 99))
def test_parity_held_by_agents_is_read_by_all_ranks_equally(
    nodes: int, per_node: int, groups: int, number: int
) -> None:
    """Any rank may have asked the agent: mirrored pairs with their first shard lost, on nodes
    without a rank."""
    names = [f"node{rank // per_node}" for rank in range(nodes * per_node)]
    found: list[list[Found]] = [[] for _ in names]
    parities: list[list[FoundParity]] = [[] for _ in names]
    for first in range(0, 2 * groups, 2):
        key = (VersionId(1, 1), first + 1, 2 * groups)
        asker, place = number % len(names), agent_of(first)
        found[asker].append(found_at(ShardKey(*key), place, LINEAGE, "life"))
        made = (LINEAGE, "life", (first, first + 1), 1, 1)
        parities[asker].append(parity_at(ParityKey(*key), place, *made))
    plan = plan_restore(found, parities=parities, nodes=names)
    assert plan is not None
    readers = [p.reader for rebuild in plan.rebuilds for p in rebuild.parities]
    assert len(readers) == groups
    assert is_even(Counter(readers), range(len(names)))
    on_nodes = Counter(names[reader] for reader in readers)
    assert max(on_nodes.values()) - min(on_nodes[name] for name in names) <= 1


def check_parities(world: World, plan: RestorePlan) -> None:
    """Every row that lacks data uses as many parities as it lacks shards, the first ones first; no
    other parity is read."""
    for rebuild in plan.rebuilds:
        left = {key.shard for key in rebuild.left}
        taken = set()
        code = world.codes[plan.id.version][rebuild.group]
        for row in range(code.n):
            word = [(s.parity, rebuild.group[s.member]) for s in code.row(row)]
            lacking = sum(not is_parity and shard in rebuild.lost for is_parity, shard in word)
            parity = enumerate(shard for is_parity, shard in word if is_parity)
            taken |= set([(shard, p) for p, shard in parity if shard in left][:lacking])
        assert {(p.key.shard, index) for p in rebuild.parities for index in p.segments} == taken


def check_reading(world: World, plan: RestorePlan) -> None:
    """Reads of a node's files are spread over its ranks; those of a shared directory over the ranks
    of its nodes; those of files that all see over all ranks."""
    far = any(s.place.level == "persistent" for s in plan.sources)
    for node in set(world.ranks):
        together = world.seen_on(node)
        own = [rank for rank, there in enumerate(world.ranks) if there in together]
        places = [world.place(each) for each in together]
        shards = Counter(s.reader for s in plan.sources if s.place in places)
        made = [p for r in plan.rebuilds for p in r.parities if p.place in places]
        assert is_even(Counter(p.reader for p in made), own)
        assert far or is_even(shards, own)
    if set(world.ranks) <= world.seen_on(world.ranks[0]):  # all ranks see all files
        loads = Counter(s.reader for s in plan.sources if not s.rebuilt)
        assert is_even(loads, range(len(world.ranks)))


@given(worlds(), st.integers(0, 99))
@settings(max_examples=150)
def test_a_fetched_shard_is_not_fetched_again_when_a_copy_turns_out_bad(
    world: World, number: int
) -> None:
    found, parities = inventories_of(world)
    plan = planned(world)
    if plan is None or plan.rebuilds or number >= len(plan.sources):
        return
    keys = [ShardKey(plan.id, s.shard, world.shards) for s in plan.sources]
    had = {(key, s.place): s.reader for key, s in zip(keys, plan.sources, strict=True)}
    bad = world.bad() | {(keys[number], plan.sources[number].place)}
    again = plan_restore(found, bad, None, parities, had)
    for before, now in zip(plan.sources, again.sources if again else (), strict=False):
        if again is not None and again.id == plan.id and now.place == before.place:
            assert now.reader == before.reader


def check_rebuilding(world: World, plan: RestorePlan) -> None:
    """A lost shard is rebuilt by its own rank, or else they are spread evenly: compared with all
    assignments, none even over ranks gives less work to the busiest node."""
    made = {s.shard: s.reader for s in plan.sources if s.rebuilt}
    makers = Counter(made.values())
    assert is_even(makers, range(len(world.ranks)))
    if len(plan.sources) <= len(world.ranks):
        assert all(rank == shard for shard, rank in made.items())
        return
    most = max(Counter(world.ranks[r] for r in makers.elements()).values(), default=0)
    assert most == least_most(world.ranks, makers.total())


def least_most(nodes: list[int], pieces: int) -> int:
    """Return the least work of the busiest node, if all ranks do the same amount."""
    each, more = divmod(pieces, len(nodes))
    return min(
        max(Counter([*nodes * each, *chosen]).values(), default=0)
        for chosen in itertools.combinations(nodes, more)
    )


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.booleans())
def test_shards_visible_to_all_are_read_on_all_nodes_equally(
    nodes: int, per_node: int, shards: int, dealt: bool
) -> None:
    """Nodes with the same number of ranks each, numbered node by node or in turns."""
    ranks = nodes * per_node
    names = [f"node{r % nodes if dealt else r // per_node}" for r in range(ranks)]
    seen = [found_at(ShardKey(VersionId(1, 1), s, shards), FAR, LINEAGE) for s in range(shards)]
    plan = plan_restore([seen, *([] for _ in range(ranks - 1))], nodes=names)
    assert plan is not None
    loads = Counter(s.reader for s in plan.sources)
    assert is_even(loads, range(ranks))
    each = Counter({node: 0 for node in names}) + Counter(names[s.reader] for s in plan.sources)
    assert max(each.values()) - min(each[node] for node in set(names)) <= 1


def mirror(shard: int, node: int, run_id: str = "life", version: int = 1) -> FoundParity:
    """Parity of a mirrored pair, 0 and 1: the copy of the other shard, stored beside `shard`."""
    key = ParityKey(VersionId(1, version), shard, 2)
    return parity_at(key, Location("local", f"node{node}", "/disk"), LINEAGE, run_id, (0, 1), 1, 1)


def test_a_version_of_which_parity_alone_is_left_is_made_of_that() -> None:
    """Every shard of v2 is lost, and v1 is complete."""
    found = [found_at(ShardKey(VersionId(1, 1), s, 2), FAR, LINEAGE, "life") for s in range(2)]
    plan = plan_restore(
        [found, []], parities=[[mirror(0, 0, version=2)], [mirror(1, 1, version=2)]]
    )
    assert plan is not None
    assert plan.id.version == 2
    assert [s.place.level for s in plan.sources] == ["peer", "peer"]


def test_shards_and_parity_of_two_runs_are_no_version() -> None:
    """Runs that did not see each other's nodes may have taken the same generation."""
    found = [
        found_at(ShardKey(VersionId(1, 1), 1, 2), Location("local", "node1", "/disk"), LINEAGE, "a")
    ]
    assert plan_restore([[], found], parities=[[], [mirror(1, 1, "another")]]) is None
    assert plan_restore([[], found], parities=[[], [mirror(1, 1, "a")]]) is not None


def test_parity_that_a_rank_cannot_get_at_is_read_by_one_that_can() -> None:
    parity = mirror(1, 1)
    found = [found_at(ShardKey(VersionId(1, 1), 1, 2), parity.place, LINEAGE, "life")]
    for blind, reader in (((), 0), ((0,), 1), ((0, 1), None)):
        lost = frozenset((parity.key, parity.place, rank) for rank in blind)
        plan = plan_restore([found] * 2, parities=[[parity]] * 2, unreachable=lost)
        readers = [p.reader for r in plan.rebuilds for p in r.parities] if plan else [None]
        assert readers == [reader]


def is_even(load: Counter[int], ranks: Iterable[int]) -> bool:
    each = [load[rank] for rank in ranks]
    return max(each) - min(each) <= 1


def test_a_plan_for_many_ranks_does_not_look_at_all_of_them_for_each_shard() -> None:
    """A node is lost, and all shards come from the persistent level: at 10,000 ranks a plan once
    took 10^8 steps on every rank."""
    per_node, shards = 4, 400
    ranks = shards - per_node
    seen = [found_at(ShardKey(VersionId(1, 1), s, shards), FAR, LINEAGE) for s in range(shards)]
    nodes = [f"node{rank // per_node}" for rank in range(ranks)]
    looks = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal looks
        looks += event == "call" and frame.f_code.co_name == "_weight"

    sys.setprofile(count)
    try:
        plan = plan_restore([seen, *([] for _ in range(ranks - 1))], nodes=nodes)
    finally:
        sys.setprofile(None)
    assert plan is not None
    assert is_even(Counter(s.reader for s in plan.sources), range(ranks))
    assert 0 < looks <= (per_node + 2) * (shards + ranks)
