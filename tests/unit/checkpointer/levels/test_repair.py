"""Parts that must be made again after a rebuild: shards on their nodes' disks, and parity."""

from __future__ import annotations

from msgspec.structs import replace

from tests.support.facts import found_at, parity_at
from tierckpt.checkpointer import parities_to_mend, shards_to_mend, was_lost
from tierckpt.core import AGENT, EVERYWHERE, Found, FoundParity, Location, RestorePlan, plan_restore
from tierckpt.erasure import Code, RedundancyGroup
from tierckpt.format import ParityKey, ShardKey, VersionId

ID = VersionId(1, 5)
RANKS = 4
GROUP = RedundancyGroup(tuple(range(RANKS)), Code(RANKS, 2, 2))
LINEAGE = ((1, 0),)


def place(node: int) -> Location:
    return Location("local", f"node{node}", "/disk")


def found(shard: int, node: int) -> Found:
    return found_at(ShardKey(ID, shard, RANKS), place(node), LINEAGE, "life")


def parity(shard: int, node: int, group: tuple[int, ...] = GROUP.ranks) -> FoundParity:
    key = ParityKey(ID, shard, RANKS)
    return parity_at(key, place(node), LINEAGE, "life", group, 2, 2)


def world(*lost: int) -> tuple[list[list[Found]], list[list[FoundParity]]]:
    """Each rank is on a node of its own; some nodes are new."""
    there = [rank not in lost for rank in range(RANKS)]
    shards = [[found(rank, rank)] if there[rank] else [] for rank in range(RANKS)]
    return shards, [[parity(rank, rank)] if there[rank] else [] for rank in range(RANKS)]


def plan_of(
    shards: list[list[Found]], parities: list[list[FoundParity]], bad: frozenset = frozenset()
) -> RestorePlan:
    plan = plan_restore(shards, bad, None, parities)
    assert plan is not None
    return plan


def test_nothing_was_lost() -> None:
    shards, parities = world()
    assert shards_to_mend(plan_of(shards, parities), shards) == frozenset()
    assert parities_to_mend(plan_of(shards, parities), [GROUP], parities) == frozenset()


def test_shards_are_all_there_and_parity_was_not_made_yet() -> None:
    shards, parities = world()
    parities[2] = []
    plan = plan_of(shards, parities)
    assert shards_to_mend(plan, shards) == frozenset()
    assert parities_to_mend(plan, [GROUP], parities) == {2}


def test_a_rebuilt_shard_is_kept_where_it_was_lost() -> None:
    shards, parities = world(1, 3)
    plan = plan_of(shards, parities)
    assert shards_to_mend(plan, shards) == {1, 3}
    assert parities_to_mend(plan, [GROUP], parities) == {1, 3}


def test_a_shard_that_other_nodes_can_rebuild_is_not_fetched_from_the_store() -> None:
    far = Location("persistent", EVERYWHERE, "s3://far")
    every = [found_at(ShardKey(ID, shard, RANKS), far, LINEAGE, "life") for shard in range(RANKS)]
    shards, parities = world(1, 3)
    assert plan_of([[*shards[0], *every], *shards[1:]], parities).levels == {"local": 2, "peer": 2}
    shards, parities = world(0, 1, 3)
    plan = plan_of([every, *shards[1:]], parities)
    assert plan.levels == {"local": 1, "persistent": 3}


def test_a_shard_alone_was_damaged() -> None:
    shards, parities = world()
    bad = frozenset([(shards[2][0].key, shards[2][0].place)])
    plan = plan_of(shards, parities, bad)
    assert shards_to_mend(plan, shards) == {2}
    assert parities_to_mend(plan, [GROUP], parities) == frozenset()


def test_damaged_parity_is_made_again() -> None:
    shards, parities = world(1)
    bad = frozenset([(parities[0][0].key, parities[0][0].place)])
    plan = plan_of(shards, parities, bad)
    assert parities_to_mend(plan, [GROUP], parities) == {0, 1}


def test_a_version_on_no_disk_is_not_lost_but_one_missing_or_damaged_on_some_disks_is() -> None:
    far = Location("persistent", EVERYWHERE, "s3://far")
    every = [found_at(ShardKey(ID, shard, RANKS), far, LINEAGE, "life") for shard in range(RANKS)]
    slots = [replace(f, place=Location("memory", f"node{n}", "/shm")) for n, f in enumerate(every)]
    shards, _ = world()
    assert not was_lost(plan_of([every, [], [], []], []), set()), "moved, or removed by retention"
    assert not was_lost(plan_of([[slot] for slot in slots], []), set()), "never was there"
    assert was_lost(plan_of([[slot] for slot in slots], []), {slots[2].key})
    assert was_lost(plan_of([[*shards[0], *every], *shards[1:3], []], []), set())


def test_ranks_that_moved_cannot_be_protected_as_they_are() -> None:
    """Ranks 0 and 1 have exchanged their nodes; rank 3 is lost."""
    shards, parities = world(3)
    shards[0], shards[1] = shards[1], shards[0]
    plan = plan_of(shards, parities)
    assert shards_to_mend(plan, shards) is None


def test_another_number_of_ranks() -> None:
    shards, parities = world(3)
    plan = plan_of(shards[:3], parities[:3])
    assert shards_to_mend(plan, shards[:3]) is None


def test_groups_that_are_others_now_have_no_parity() -> None:
    shards, parities = world(1)
    now = [RedundancyGroup((0, 2, 1, 3), Code(RANKS, 2, 2))]
    plan = plan_of(shards, parities)
    assert parities_to_mend(plan, now, parities) == set(range(RANKS))


def test_parity_that_a_node_without_a_rank_has_is_on_no_rank_of_the_jobs() -> None:
    """Rank 0's node was left out, a spare took its place, and the agent of the old node reported
    its parity."""
    shards, parities = world(0)
    agent = Location(AGENT, EVERYWHERE, "agent of node0")
    parities[0] = [replace(parity(0, 0), place=agent)]
    plan = plan_of(shards, parities)
    assert parities_to_mend(plan, [GROUP], parities) == {0}


def test_parity_of_another_run_does_not_count() -> None:
    shards, parities = world(1)
    plan = plan_of(shards, parities)
    stranger = [[], *parities[1:]]
    assert parities_to_mend(plan, [GROUP], stranger) == {0, 1}
