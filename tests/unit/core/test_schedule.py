"""Schedule: ranks with the same votes decide the same, and never give up the last version."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierckpt.config import Config, load_config
from tierckpt.core import (
    BROKEN,
    DONE,
    LOCAL,
    MEMORY,
    PENDING,
    REMEMBERED,
    VOTE_WIDTH,
    Decision,
    Ledger,
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


def test_a_vote_has_only_the_numbers_that_a_level_needs() -> None:
    """Every rank's training thread packs a vote at every boundary."""
    assert VOTE_WIDTH == 22


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


def test_a_version_to_local_is_in_memory_too() -> None:
    schedule = Schedule(configured(local_every_steps=2))
    assert taken(schedule, {}, range(1, 5)) == dict.fromkeys((2, 4), ("memory", "local"))


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


# --- the ledger ----------------------------------------------------------------------------------


def test_a_version_is_safe_once_done_everywhere() -> None:
    ledger = Ledger(open=[v(1), v(2)])
    assert ledger.resolve(PENDING, v(1)) is None
    assert (ledger.safe, ledger.open) == (None, [v(1), v(2)])
    assert ledger.resolve(DONE, v(1)) is None
    assert (ledger.safe, ledger.open) == (v(1), [v(2)])
    assert ledger.protected() == {v(1), v(2)}


def test_a_version_that_broke_anywhere_is_given_up_and_the_one_before_stays_safe() -> None:
    ledger = Ledger(safe=v(1), open=[v(2), v(3)])
    assert ledger.resolve(BROKEN, v(2)) == v(2)
    assert (ledger.safe, ledger.open) == (v(1), [v(3)])
    assert ledger.protected() == {v(1), v(3)}


def test_a_broken_version_is_remembered_for_a_while_unless_it_is_taken_again() -> None:
    ledger = Ledger(open=[v(n) for n in range(1, REMEMBERED + 3)])
    for version in list(ledger.open):
        ledger.resolve(BROKEN, version)
    assert ledger.broken == [v(n) for n in range(3, REMEMBERED + 3)]
    ledger.open.append(v(7))
    ledger.resolve(DONE, v(7))
    assert v(7) not in ledger.broken


@pytest.mark.parametrize("candidate", [None, v(9)])
def test_votes_about_nothing_or_something_settled_change_nothing(
    candidate: VersionId | None,
) -> None:
    ledger = Ledger(safe=v(1), open=[v(2)])
    assert ledger.resolve(DONE, candidate) is None
    assert ledger == Ledger(safe=v(1), open=[v(2)])


def test_a_version_newly_known_to_be_safe_frees_its_predecessors() -> None:
    ledger = Ledger(safe=v(1), open=[v(2), v(3)])
    assert ledger.protected(also_safe=v(2)) == {v(2), v(3)}


# --- ranks together: the invariant ---------------------------------------------------------------
#
# N ranks with two slots each run in random order, as far as their collectives allow: rank A may be
# sealing v11 while B has not sealed v10, and each may be killed at any instant. At every instant,
# the newest version that all ranks had at some time must still exist on all of them.


@dataclass
class Rank:
    number: int
    ledger: Ledger = field(default_factory=Ledger)
    schedule: Schedule = field(default_factory=lambda: Schedule(configured(memory_every_steps=1)))
    slots: list[VersionId | None] = field(default_factory=lambda: [None, None])
    fates: dict[VersionId, int] = field(default_factory=dict)
    decisions: list[tuple[str, ...]] = field(default_factory=list)
    at: int = 0
    """The iteration of the rank."""


@dataclass
class Job:
    """The protocol in its smallest form; `chance` decides the order of ranks and their failures."""

    ranks: list[Rank]
    chance: random.Random
    break_rate: float
    careless: bool = False
    """Overwrite without the proof, to check that the test notices."""
    ballots: dict[int, dict[int, tuple[list[int], VersionId | None]]] = field(default_factory=dict)
    complete: VersionId | None = None
    """The newest version that all ranks had at the same instant."""

    def check(self) -> None:
        common = set.intersection(*({s for s in r.slots if s} for r in self.ranks))
        if self.complete is not None:
            assert common, f"{self.complete} was complete and nothing is left"
            assert max(common) >= self.complete, f"{self.complete} was given up for {common}"
        self.complete = max(common, default=self.complete)

    def agreed(self, iteration: int) -> tuple[Vote, VersionId | None]:
        cast = self.ballots[iteration]
        asked = {voted for _, voted in cast.values()}
        assert len(asked) == 1, f"ranks voted about different versions: {asked}"
        columns = zip(*(values for values, _ in cast.values()), strict=True)
        return Vote.unpack([min(column) for column in columns]), asked.pop()

    def boundary(self, rank: Rank) -> VersionId | None:
        """Read the last vote, decide, launch the next one; return the version to take."""
        agreed = Vote()
        if rank.at:
            agreed, voted = self.agreed(rank.at)
            rank.ledger.resolve(agreed.levels[MEMORY].state, voted)
        rank.at += 1
        decision = rank.schedule.decide(rank.at, agreed)
        rank.decisions.append(decision.take)
        newest = v(rank.at) if decision.take else None
        if newest:
            rank.ledger.open.append(newest)
        oldest = next((o for o in rank.ledger.open if o != v(rank.at)), None)
        state = rank.fates.get(oldest, PENDING) if oldest else DONE
        vote = about(memory=LevelVote(state, free=int(self.chance.random() > 0.1)))
        self.ballots.setdefault(rank.at, {})[rank.number] = (vote.pack(), oldest)
        return newest

    def overwrite(self, rank: Rank, newest: VersionId) -> int | None:
        """Return the slot that may be filled with `newest`, as known without any proof."""
        protected = rank.ledger.protected() - {newest}
        if self.careless:
            protected = set(rank.ledger.open) - {newest}
        free = [i for i, held in enumerate(rank.slots) if held not in protected or held is None]
        return min(free, key=lambda i: rank.slots[i] or v(-1), default=None)

    def run(self, iterations: int) -> None:
        programs = {r.number: self.program(r, iterations) for r in self.ranks}
        while programs:
            number = self.chance.choice(sorted(programs))
            if next(programs[number], "ended") == "ended":
                del programs[number]
            self.check()

    def all_voted(self, iteration: int) -> bool:
        return len(self.ballots.get(iteration, {})) == len(self.ranks)

    def program(self, rank: Rank, iterations: int) -> Any:
        """The program of a rank, with a yield wherever another rank may run."""
        for _ in range(iterations):
            newest = self.boundary(rank)
            yield
            if newest:
                index = self.overwrite(rank, newest)
                if index is None:  # both slots hold needed versions: wait for the proof
                    while not self.all_voted(rank.at):
                        yield
                    agreed, voted = self.agreed(rank.at)
                    protected = rank.ledger.protected() - {newest}
                    if voted and agreed.levels[MEMORY].state == DONE:
                        protected = rank.ledger.protected(also_safe=voted) - {newest}
                    elif voted and agreed.levels[MEMORY].state == BROKEN:
                        protected -= {voted}
                    free = [i for i, held in enumerate(rank.slots) if held not in protected]
                    index = min(free, key=lambda i: rank.slots[i] or v(-1), default=None)
                broken = index is None or self.chance.random() < self.break_rate
                if index is not None:
                    rank.slots[index] = None
                    yield
                    rank.slots[index] = None if broken else newest
                rank.fates[newest] = BROKEN if broken else DONE
                yield
            while not self.all_voted(rank.at):  # the gradients' reduction: all ranks entered it
                yield


@given(st.integers(2, 5), st.sampled_from([0.0, 0.2, 0.6]), st.integers(0, 2**32))
@settings(max_examples=80)
def test_the_last_complete_version_is_never_overwritten(
    ranks: int, break_rate: float, seed: int
) -> None:
    job = Job([Rank(n) for n in range(ranks)], random.Random(seed), break_rate)
    job.run(iterations=30)
    assert all(r.decisions == job.ranks[0].decisions for r in job.ranks)
    assert all(r.ledger == job.ranks[0].ledger for r in job.ranks)
    assert break_rate or job.complete == v(
        max(i for i, d in enumerate(job.ranks[0].decisions, 1) if d)
    )


def test_ranks_that_overwrite_without_the_proof_are_caught() -> None:
    """The simulation can fail."""

    def run_careless() -> None:
        for seed in range(200):
            ranks = [Rank(n) for n in range(3)]
            Job(ranks, random.Random(seed), 0.2, careless=True).run(iterations=30)

    with pytest.raises(AssertionError, match=r"was complete and nothing is left|was given up"):
        run_careless()
