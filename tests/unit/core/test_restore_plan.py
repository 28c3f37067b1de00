"""Restore plan: the newest version that can be read or rebuilt, from the cheapest places."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.support.facts import found_at
from tierckpt.config import PersistentConfig
from tierckpt.core import (
    EVERYWHERE,
    RANK,
    Found,
    Level,
    Location,
    Problem,
    newest_whole,
    plan_restore,
)
from tierckpt.format import Lineage, ShardKey, VersionId, newest_first
from tierckpt.storage import look_at_persistent

HOSTS = ("a", "b")
T = TypeVar("T")


World = tuple[list[list[Found]], frozenset[tuple[ShardKey, Location]]]
"""Ranks on two hosts, the copies that each sees, and the copies known to be damaged."""


@functools.cache
def everything(lineages: tuple[Lineage, ...]) -> list[Found]:
    """All copies that there may be of four versions of each generation."""
    copies = [
        found_at(
            ShardKey(VersionId(lineage[-1][0], v), s, n),
            Location(level, host, f"/{level}/{copy}"),
            lineage,
        )
        for lineage in lineages
        for v in range(1, 5)
        for n in (1, 2)
        for s in range(n)
        for level in Level
        for host in HOSTS
        for copy in (0, 1)
    ]
    return sorted(copies, key=str)


def world_of(random: Random) -> World:
    lineages: list[Lineage] = [((1, 0),)]
    if random.random() < 0.5:
        lineages.append(((1, 0), (2, random.randint(0, 3))))
    if random.random() < 0.5:
        lineages.append(random.choice([((3, 0),), (*lineages[-1], (3, 4))]))
    there = some(random, everything(tuple(lineages)), 40)
    inventories = []
    for host in random.choices(HOSTS, k=random.randint(1, 4)):
        seen = [f for f in there if f.place.host == host]
        blind = some(random, range(len(seen)), 2)
        inventories.append([f for i, f in enumerate(seen) if i not in blind])
    known = sorted({(f.key, f.place) for i in inventories for f in i})
    return inventories, frozenset(some(random, known, 6))


def some(random: Random, them: Sequence[T], most: int) -> list[T]:
    """At most so many of them, in their order."""
    chosen = random.sample(range(len(them)), random.randint(0, min(most, len(them))))
    return [them[number] for number in sorted(chosen)]


def worlds() -> st.SearchStrategy[World]:
    """Hypothesis draws a seed alone: to draw the parts costs ten times as much as to use them."""
    return st.integers(0, 2**32).map(lambda seed: world_of(Random(seed)))


def possible(
    inventories: list[list[Found]], bad: frozenset[tuple[ShardKey, Location]]
) -> list[tuple[VersionId, int]]:
    """The reference: try all versions with all shards somewhere."""
    seen = {(f.key, f.place) for i in inventories for f in i}
    good = {key for key, place in seen - bad}
    return sorted(
        (id_, shards)
        for id_ in {key.id for key, _ in seen}
        for shards in (1, 2)
        if all(ShardKey(id_, s, shards) in good for s in range(shards))
    )


@given(worlds(), st.none() | st.integers(1, 5))
@settings(max_examples=100)
def test_against_trying_everything(world: World, version: int | None) -> None:
    inventories, bad = world
    plan = plan_restore(inventories, bad, version)
    line = newest_first((f.key.id, f.facts.lineage) for i in inventories for f in i)
    choice = [
        (id_, shards)
        for id_, shards in possible(inventories, bad)
        if id_ in line and version in (None, id_.version)
    ]
    if not choice:
        assert plan is None
        return
    assert plan is not None
    best = max(id_ for id_, _ in choice)
    assert plan.id == best
    assert (best, len(plan.sources)) in choice
    assert [s.shard for s in plan.sources] == list(range(len(plan.sources)))
    for source in plan.sources:
        key = ShardKey(best, source.shard, len(plan.sources))
        viewers = {
            place: [
                r
                for r, i in enumerate(inventories)
                if (key, place) in {(f.key, f.place) for f in i}
            ]
            for place in {f.place for i in inventories for f in i}
        }
        places = [p for p, ranks in viewers.items() if ranks and (key, p) not in bad]
        assert source.place in places
        assert RANK[source.place.level] == min(RANK[p.level] for p in places)
        assert source.reader in viewers[source.place]
        assert source.direct == (len(viewers[source.place]) == len(inventories))


@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_of_looking_does_not_matter(world: World, chance: object) -> None:
    inventories, bad = world
    shuffled = [list(i) for i in inventories]
    for inventory in shuffled:
        chance.shuffle(inventory)  # type: ignore[attr-defined]
    assert plan_restore(shuffled, bad) == plan_restore(inventories, bad)


@pytest.mark.parametrize(("folder", "seen"), [("run", True), ("scratch/run", False)])
def test_an_unmounted_place_is_not_an_empty_one(folder: str, seen: bool, tmp_path: Path) -> None:
    """No version was flushed yet, or all are on a file system not mounted here."""
    unseen: list[Problem] = []
    found: list[Found] = []
    look_at_persistent(
        PersistentConfig(path=str(tmp_path / folder)), found, [], unseen, [], [], 5.0
    )
    assert found == []
    assert [p.why for p in unseen] == (
        []
        if seen
        else [f"{tmp_path}/scratch does not exist; create it, unless it should have been mounted"]
    )


def test_a_store_with_a_failing_client_is_reported_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone takes the inventory, and the others wait for its result."""

    def fail(store: object) -> None:
        raise KeyError("ticket")

    monkeypatch.setattr("tierckpt.storage.persistent.PersistentStore.versions", fail)
    unseen: list[Problem] = []
    look_at_persistent(PersistentConfig(path=str(tmp_path)), [], [], unseen, [], [], 5.0)
    assert [p.why for p in unseen] == ["KeyError: 'ticket'"]


# --- copies that a rank cannot read --------------------------------------------------------------


@given(worlds(), st.data())
@settings(max_examples=100)
def test_a_copy_that_a_rank_cannot_read_is_as_if_it_had_never_seen_it(
    world: World, data: st.DataObject
) -> None:
    inventories, bad = world
    sights = [(f.key, f.place, rank) for rank, i in enumerate(inventories) for f in i]
    blind = data.draw(st.sets(st.sampled_from(sights), max_size=12)) if sights else set()
    plan = plan_restore(inventories, bad, unreachable=frozenset(blind))
    left = [
        [f for f in i if (f.key, f.place, rank) not in blind] for rank, i in enumerate(inventories)
    ]
    line = newest_first((f.key.id, f.facts.lineage) for i in inventories for f in i)
    choice = [(id_, n) for id_, n in possible(left, bad) if id_ in line]
    if not choice:
        assert plan is None
        return
    assert plan is not None
    assert plan.id == max(id_ for id_, _ in choice)
    for source in plan.sources:
        key = ShardKey(plan.id, source.shard, len(plan.sources))
        seers = {r for r, i in enumerate(left) if (key, source.place) in names(i)}
        assert source.reader in seers
        assert source.direct == (len(seers) == len(inventories))


def names(inventory: list[Found]) -> list[tuple[ShardKey, Location]]:
    return [(f.key, f.place) for f in inventory]


FAR = Location("persistent", EVERYWHERE, "/far")


@given(st.integers(1, 6), st.integers(1, 5), st.data())
@settings(max_examples=100)
def test_a_rank_without_the_mount_is_not_asked_shard_after_shard(
    ranks: int, shards: int, data: st.DataObject
) -> None:
    """Two versions that rank 0 saw. A version is lost when every rank failed at one of its shards.
    A rank that failed reads no other shard of it, and no other version while another rank never
    failed."""
    keys = [ShardKey(VersionId(1, v), s, shards) for v in (1, 2) for s in range(shards)]
    seen = [found_at(key, FAR, ((1, 0),)) for key in keys]
    tries = [(key, FAR, rank) for key in keys for rank in range(ranks)]
    failed = data.draw(st.sets(st.sampled_from(tries), max_size=2 * ranks))
    holders = data.draw(st.dictionaries(st.sampled_from(keys), st.integers(0, ranks - 1)))
    had = {(k, FAR): rank for k, rank in holders.items() if (k, FAR, rank) not in failed}
    plan = plan_restore(
        [seen, *([] for _ in range(ranks - 1))], readers=had, unreachable=frozenset(failed)
    )
    blind = {v: {r for k, _, r in failed if k.id.version == v} for v in (1, 2)}
    left = {
        v: [k for k in keys if k.id.version == v and (len(blind[v]) < ranks or (k, FAR) in had)]
        for v in (1, 2)
    }
    whole = [v for v in (1, 2) if len(left[v]) == shards]
    assert (plan.id.version if plan else None) == max(whole, default=None)
    if plan is None:
        return
    version = plan.id.version
    fresh = set(range(ranks)) - blind[1] - blind[2]
    for source in plan.sources:
        key = ShardKey(plan.id, source.shard, shards)
        if (key, FAR) in had:
            assert source.reader == had[key, FAR], "it has it"
        else:
            assert source.reader not in blind[version]
            assert not fresh or source.reader in fresh
        assert not source.direct


def found(
    version: int,
    shard: int,
    shards: int,
    level: str = "memory",
    where: str = "x",
    run_id: str = "",
) -> Found:
    key = ShardKey(VersionId(1, version), shard, shards)
    return found_at(key, Location(level, "a", f"{where}{shard}"), run_id=run_id)


def test_each_rank_reads_its_own_shard_when_it_can() -> None:
    inventory = [found(3, shard, 4) for shard in range(4)]
    for nodes in ("abcd", "aabb", "abab"):
        plan = plan_restore([inventory] * 4, nodes=nodes)
        assert plan is not None
        assert [s.reader for s in plan.sources] == [0, 1, 2, 3]
        assert plan.levels == {"memory": 4}


def test_on_one_level_the_copy_nearest_to_its_plain_bytes_comes_first() -> None:
    """An agent's memory comes before its disk, and plain copies before encoded ones, which one rank
    decodes and sends."""
    disk = found(3, 0, 1, "agent", "disk")
    slot = structs.replace(disk, place=structs.replace(disk.place, in_memory=True))
    plain, other = found(3, 0, 1, "local", "plain"), found(3, 0, 1, "local", "other")
    encoded = structs.replace(other, place=structs.replace(other.place, encoded=True))
    for worse, better in ((disk, slot), (encoded, plain)):
        plan = plan_restore([[worse, better]])
        assert plan is not None
        assert plan.sources[0].place == better.place
    plan = plan_restore([[encoded], [encoded]])
    assert plan is not None
    assert not plan.sources[0].direct


def test_of_two_copies_that_cost_the_same_the_one_that_all_can_map() -> None:
    own, shared = found(3, 0, 1, "local", "a"), found(3, 0, 1, "local", "b")
    plan = plan_restore([[own, shared], [shared]])
    assert plan is not None
    assert (plan.sources[0].place, plan.sources[0].direct) == (shared.place, True)


def test_shards_of_two_runs_never_make_a_version() -> None:
    """Runs that did not see each other's nodes may have taken the same generation number."""
    mine, theirs = found(11, 0, 2), found(11, 1, 2, run_id="another")
    assert plan_restore([[mine], [theirs]]) is None
    plan = plan_restore([[mine], [theirs], [found(11, 1, 2)]])
    assert plan is not None
    assert [s.reader for s in plan.sources] == [0, 2]


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_the_newest_whole_version_is_the_planned_one(
    world: World,
) -> None:
    inventories, _ = world
    plan = plan_restore(inventories)
    assert newest_whole(f for each in inventories for f in each) == (plan.id if plan else None)


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_ranks_that_share_an_inventory_have_the_same_plan(
    world: World,
) -> None:
    inventories, bad = world
    shared = [each for each in inventories for _ in range(2)]
    apart = [[*each] for each in shared]
    assert plan_restore(shared, bad) == plan_restore(apart, bad)
