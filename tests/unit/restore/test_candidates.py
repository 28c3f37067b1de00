"""Rejected copies are not in the next plan: on all ranks, on one rank, or all copies of one
agent."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.facts import found_at
from tierckpt.core import AGENT, EVERYWHERE, LOCAL, PERSISTENT, Found, Location, RestorePlan
from tierckpt.errors import RestoreError
from tierckpt.format import ShardKey, VersionId
from tierckpt.restore import Candidates, Failure, FaultScope

RANKS = 3
SHARED = Location(PERSISTENT, EVERYWHERE, "/shared")
THEIR_AGENT = Location(AGENT, EVERYWHERE, "node9:1")


def key(version: int, shard: int) -> ShardKey:
    return ShardKey(VersionId(1, version), shard, RANKS)


def found(version: int, shard: int, place: Location | None = None) -> Found:
    here = Location(LOCAL, f"node{shard}", f"/disk{shard}")
    return found_at(key(version, shard), place or here, ((1, 0),))


def candidates(*more: Found) -> Candidates:
    """v1 and v2 on all ranks' disks, and other copies that rank 0 sees."""
    inventories = [[found(v, rank) for v in (1, 2)] for rank in range(RANKS)]
    inventories[0] += more
    return Candidates(inventories)


def failure(copy: Found, **how: Any) -> Failure:
    return Failure(copy.key, copy.place, "why not", node="node9", **how)


def planned(each: Candidates, version: int | None = None) -> RestorePlan:
    plan = each.plan(version)
    assert plan is not None
    return plan


def test_a_damaged_copy_is_out_on_all_ranks_and_the_next_place_is_in() -> None:
    each = candidates(found(2, 1, SHARED))
    assert planned(each).levels == {"local": 3}
    each.reject([(1, failure(found(2, 1)))])
    assert planned(each).levels == {"local": 2, "persistent": 1}
    each.reject([(0, failure(found(2, 1, SHARED)))])
    assert planned(each).id == VersionId(1, 1)
    assert each.bad == {(key(2, 1), place) for place in (found(2, 1).place, SHARED)}
    assert [text.partition(" on level ")[0] for text in each.rejected] == [str(key(2, 1))] * 2
    assert "(as rank 1 found, on node node9)" in each.rejected[0]


def test_a_shard_out_of_sight_of_one_rank_is_read_by_another_until_none_is_left() -> None:
    only = [[found(2, rank, SHARED) for rank in range(RANKS)]]
    each = Candidates([*only, [], []])
    readers = set()
    for _ in range(RANKS):
        reader = planned(each).sources[0].reader
        readers.add(reader)
        each.reject([(reader, failure(only[0][0], blame=FaultScope.SIGHT))])
    assert readers == {0, 1, 2}
    assert each.plan() is None
    assert not each.bad


def test_an_agent_that_was_silent_to_two_ranks_has_nothing_any_more() -> None:
    each = candidates(*(found(3, shard, THEIR_AGENT) for shard in range(RANKS)))
    silent = failure(found(3, 0, THEIR_AGENT), blame=FaultScope.SIGHT, silent=True)
    each.reject([(0, silent)])
    assert not each.left_out
    assert planned(each).id.version == 3
    each.reject([(1, silent)])
    assert each.left_out == {THEIR_AGENT.where}
    assert planned(each).id.version == 2
    assert each.rejected == ["why not (as rank 0 found, on node node9)"], "once"


def test_nothing_older_is_planned_where_a_version_lacks_a_key() -> None:
    each = candidates()
    each.reject([(0, failure(found(2, 0), undecodable=True))])
    with pytest.raises(RestoreError, match="v2 exists and cannot be decoded"):
        each.plan()
    with pytest.raises(RestoreError, match="v2 exists and cannot be decoded"):
        each.plan(1)


def test_a_missing_copy_is_a_failure_only_if_the_next_scan_still_lists_it() -> None:
    each = candidates()
    failures = [(rank, failure(found(2, rank), gone=rank > 0)) for rank in range(RANKS)]
    each.look([[found(2, 1)], [], []], [])
    assert each.still_there(failures) == failures[:2]


def test_a_fetched_shard_stays_with_its_reader() -> None:
    each = Candidates([[found(2, rank, SHARED) for rank in range(RANKS)], [], []])
    first = planned(each)
    each.keep_readers(first)
    each.reject([(2, failure(found(2, 2, SHARED), blame=FaultScope.SIGHT))])
    again = planned(each)
    assert again.sources[:2] == first.sources[:2]
    assert again.sources[2].reader != 2
