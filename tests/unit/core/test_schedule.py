"""Schedule: ranks with the same votes decide the same, and never give up the last version."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.config import Config, load_config
from tierckpt.core import (
    BROKEN,
    DONE,
    LOCAL,
    MEMORY,
    PENDING,
    Decision,
    Level,
    LevelVote,
    Schedule,
    Vote,
)
from tierckpt.format import VersionId


def configured(**arguments: Any) -> Config:
    off = {"memory_every_steps": 0, "local_every_steps": 0, "local_every_seconds": 0.0}
    return load_config({**off, **arguments}, {})


def taken(
    schedule: Schedule, votes: dict[int, Vote], versions: range
) -> dict[int, tuple[str, ...]]:
    """Return the levels of several versions when all but the given votes are fine."""
    decided = {v: schedule.decide(v, votes.get(v, Vote())).take for v in versions}
    return {v: take for v, take in decided.items() if take}


def v(version: int) -> VersionId:
    return VersionId(1, version)


# --- votes ---------------------------------------------------------------------------------------


def about(no_request: int = 1, **levels: LevelVote) -> Vote:
    """A vote about some levels, by name."""
    cast = {Level(name): vote for name, vote in levels.items()}
    return Vote({**Vote().levels, **cast}, no_request=no_request)


SLOTS_BUSY, LOCAL_BUSY = about(memory=LevelVote(free=0)), about(local=LevelVote(free=0))
states, flags = st.sampled_from([PENDING, DONE, BROKEN]), st.integers(0, 1)
costs, none = st.integers(-(2**40), 0), st.just(0)
votes = st.builds(
    about,
    no_request=flags,
    memory=st.builds(LevelVote, states, flags, flags, costs, none),
    local=st.builds(LevelVote, states, flags, flags, costs, costs),
    peer=st.builds(LevelVote, states, st.just(1), st.just(1), none, none),
    persistent=st.builds(LevelVote, states, st.just(1), flags, costs, costs),
)


def reduced(cast: list[Vote]) -> Vote:
    return Vote.unpack([min(column) for column in zip(*(c.pack() for c in cast), strict=True)])


@given(votes)
def test_a_vote_survives_packing(vote: Vote) -> None:
    assert Vote.unpack(vote.pack()) == vote
    assert all(type(value) is int for value in vote.pack())


@given(st.lists(votes, min_size=1, max_size=5))
def test_the_minimum_holds_on_all_ranks(cast: list[Vote]) -> None:
    agreed = reduced(cast)
    for level, found in agreed.levels.items():
        each = [c.levels[level] for c in cast]
        states = {one.state for one in each}
        expected = BROKEN if BROKEN in states else PENDING if PENDING in states else DONE
        assert found.state == expected
        assert bool(found.free) == all(one.free for one in each)
        assert (found.time_left == 0) == any(not one.time_left for one in each)
        assert agreed.figures.of(level).us == max(-one.less_us for one in each)
    assert (agreed.no_request == 0) == any(not c.no_request for c in cast)


# --- the schedule --------------------------------------------------------------------------------


def test_every_so_many_steps() -> None:
    schedule = Schedule(configured(memory_every_steps=3, local_every_steps=6))
    both, memory = ("memory", "local"), ("memory",)
    assert taken(schedule, {}, range(1, 13)) == {3: memory, 6: both, 9: memory, 12: both}


def test_a_journal_starts_with_a_version_and_ends_with_the_next_one() -> None:
    schedule = Schedule(configured(local_journal_steps=4))
    found = taken(schedule, {}, range(1, 12))
    assert found == {v: (MEMORY, LOCAL) for v in (1, 5, 9)}
    schedule.start_at(20)
    assert [*taken(schedule, {}, range(21, 30))] == [24, 28]
    both = Schedule(configured(local_journal_steps=4, local_every_steps=3))
    assert [*taken(both, {}, range(1, 12))] == [1, 3, 6, 9], "whichever comes first"


def test_steps_that_are_jumped_over_still_count() -> None:
    """Several optimizer steps an iteration: the multiple may lie between two boundaries."""
    schedule = Schedule(configured(memory_every_steps=10))
    assert taken(schedule, {}, range(4, 40, 4)) == dict.fromkeys((12, 20, 32), ("memory",))


def test_when_some_clock_says_so() -> None:
    schedule = Schedule(configured(memory_every_seconds=1.0, local_every_seconds=9.0))
    over = LevelVote(time_left=0)
    due = {4: about(memory=over), 7: about(local=over)}
    assert taken(schedule, due, range(1, 9)) == {4: ("memory",), 7: ("memory", "local")}


def test_when_somebody_asks() -> None:
    schedule = Schedule(configured())
    assert taken(schedule, {3: Vote(no_request=0)}, range(1, 6)) == {3: ("memory", "local")}


def test_nothing_is_due_right_after_a_restore() -> None:
    schedule = Schedule(configured(memory_every_steps=10, local_every_steps=10))
    schedule.start_at(10)
    assert taken(schedule, {}, range(11, 21)) == {20: ("memory", "local")}


def test_a_skipped_version_stays_due_and_is_reported_once() -> None:
    schedule = Schedule(configured(memory_every_steps=5))
    busy = SLOTS_BUSY
    decided = [schedule.decide(version, busy) for version in (5, 6, 7)]
    assert [d.take for d in decided] == [()] * 3
    assert [[level for level, _ in d.skipped] for d in decided] == [["memory"], [], []]
    assert schedule.decide(8, Vote()).take == ("memory",)
    assert schedule.decide(9, Vote()) == Decision()
    assert [level for level, _ in schedule.decide(10, busy).skipped] == ["memory"]


@pytest.mark.parametrize(("every", "named"), [(1, [5, 6, 7, 8, 9, 10, 11]), (5, [5, 10])])
def test_every_missed_version_is_named(every: int, named: list[int]) -> None:
    schedule = Schedule(configured(memory_every_steps=every))
    schedule.start_at(4)
    busy = SLOTS_BUSY
    decided = {version: schedule.decide(version, busy) for version in range(5, 12)}
    assert [version for version, decision in decided.items() if decision.skipped] == named
    assert [version for version, decision in decided.items() if not decision.again] == [5]


def test_a_busy_local_level_does_not_keep_memory_from_its_version() -> None:
    schedule = Schedule(configured(memory_every_steps=1, local_every_steps=2))
    decision = schedule.decide(2, LOCAL_BUSY)
    assert decision.take == ("memory",)
    assert [level for level, _ in decision.skipped] == ["local"]
    assert schedule.decide(3, Vote()).take == ("memory", "local")


def test_a_persistent_version_passes_through_local_and_is_delayed_with_it() -> None:
    far = {"persistent_path": "/far", "persistent_every_steps": 2, "persistent_every_seconds": 0}
    schedule = Schedule(configured(**far))
    assert schedule.decide(2, Vote()).take == ("memory", "local", "persistent")
    decision = schedule.decide(4, LOCAL_BUSY)
    assert decision.take == ()
    assert [level for level, _ in decision.skipped] == ["local", "persistent"]
    assert schedule.decide(5, Vote()).take == ("memory", "local", "persistent")


def test_waiting_takes_due_versions_instead_of_skipping() -> None:
    schedule = Schedule(configured(local_every_steps=1, when_busy="wait"))
    for busy in (SLOTS_BUSY, LOCAL_BUSY):
        decision = schedule.decide(schedule.last[LOCAL] + 1, busy)
        assert decision == Decision(("memory", "local"), (), wait=True)
    assert not schedule.decide(schedule.last[LOCAL] + 1, Vote()).wait
    assert not schedule.decide(schedule.last[LOCAL], SLOTS_BUSY).wait, "nothing is due"


@given(
    st.lists(votes, max_size=40),
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from(["skip", "wait"]),
)
def test_ranks_that_see_the_same_votes_decide_the_same(
    agreed: list[Vote], memory: int, local: int, when_busy: str
) -> None:
    """The decisions depend on the votes alone: more versions than slots are never held."""
    config = configured(memory_every_steps=memory, local_every_steps=local, when_busy=when_busy)
    one, other = Schedule(config), Schedule(config)
    for version, vote in enumerate(agreed, start=1):
        decision = one.decide(version, vote)
        assert decision == other.decide(version, vote)
        if when_busy == "skip":
            assert not (decision.take and not vote.levels[MEMORY].free)
            assert not (LOCAL in decision.take and not vote.levels[LOCAL].free)
        assert decision.take in ((), ("memory",), ("memory", "local"))
