"""Versions in flight, and the ledgers: one by one, and in a small world of two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tierckpt.core import (
    BROKEN,
    DONE,
    LEDGERS,
    LOCAL,
    MEMORY,
    PEER,
    PENDING,
    PERSISTENT,
    REMEMBERED,
    Level,
    Versions,
    superseded_by,
)
from tierckpt.format import VersionId


def v(version: int) -> VersionId:
    return VersionId(1, version)


def flying(*versions: int, level: Level = MEMORY) -> Versions:
    """Versions with these numbers open on a level."""
    made = Versions()
    for version in versions:
        made.open(v(version), [level])
    return made


def resolve(versions: Versions, state: int, version: int) -> bool:
    found = versions.find(v(version))
    assert found is not None
    return versions.ledgers[MEMORY].resolve(state, found)


def test_a_version_is_safe_once_done_everywhere() -> None:
    versions = flying(1, 2)
    ledger = versions.ledgers[MEMORY]
    assert not resolve(versions, PENDING, 1)
    assert (ledger.safe, ledger.open) == (None, [v(1), v(2)])
    assert resolve(versions, DONE, 1)
    assert (ledger.safe, ledger.open) == (v(1), [v(2)])
    assert ledger.protected() == {v(1), v(2)}


def test_a_version_that_broke_anywhere_is_given_up_and_the_one_before_stays_safe() -> None:
    versions = flying(1, 2, 3)
    ledger = versions.ledgers[MEMORY]
    resolve(versions, DONE, 1)
    assert resolve(versions, BROKEN, 2)
    assert (ledger.safe, ledger.open) == (v(1), [v(3)])
    assert ledger.protected() == {v(1), v(3)}


def test_a_broken_version_is_remembered_for_a_while_unless_it_is_taken_again() -> None:
    versions = flying(*range(1, REMEMBERED + 3))
    ledger = versions.ledgers[MEMORY]
    for id_ in ledger.open:
        resolve(versions, BROKEN, id_.version)
    assert ledger.broken == [v(n) for n in range(3, REMEMBERED + 3)]
    versions.open(v(7), [MEMORY])
    resolve(versions, DONE, 7)
    assert v(7) not in ledger.broken


def test_votes_about_something_settled_change_nothing() -> None:
    versions = flying(1, 2)
    ledger = versions.ledgers[MEMORY]
    resolve(versions, DONE, 1)
    assert not resolve(versions, BROKEN, 1)
    assert (ledger.safe, ledger.open, ledger.broken) == (v(1), [v(2)], [])


def test_a_version_newly_known_to_be_safe_frees_its_predecessors() -> None:
    assert superseded_by(v(2), {v(1), v(2), v(3)}) == {v(2), v(3)}


def test_an_older_version_that_comes_later_has_its_place_in_the_order() -> None:
    """Ranks may forget versions at different moments; they vote about the oldest one."""
    versions = flying(5, 6)
    versions.open(v(3), [LOCAL])
    versions.open(v(7), [LOCAL])
    versions.open(v(5), [LOCAL])
    assert [each.id for each in versions.flying] == [v(3), v(5), v(6), v(7)]
    assert versions.ledgers[LOCAL].open == [v(3), v(5), v(7)]


def test_what_was_told_of_a_version_does_not_count_when_it_is_taken_again() -> None:
    versions = flying(5)
    (version,) = versions.flying
    version.tell(MEMORY, BROKEN)
    versions.forget(v(5))
    assert versions.ledgers[MEMORY].open == []
    again = versions.open(v(5), [MEMORY])
    assert (again.here(MEMORY), again.undecided()) == (PENDING, {MEMORY})


def test_a_version_taken_again_is_still_on_its_way_to_the_levels_that_have_the_one_before() -> None:
    versions = flying(5, level=PERSISTENT)
    versions.open(v(5), [MEMORY, LOCAL])
    versions.forget(v(5))
    found = {level: ledger.open for level, ledger in versions.ledgers.items()}
    assert found == {MEMORY: [], LOCAL: [], PEER: [], PERSISTENT: [v(5)]}


def test_a_version_is_in_flight_as_long_as_something_is_to_become_of_it() -> None:
    versions = flying(1, 2, 3)
    first, second, _ = versions.flying
    for version in (1, 2):
        resolve(versions, DONE, version)
    second.snapshot = object()
    versions.land()
    assert versions.find(v(1)) is None
    first.tell(MEMORY, BROKEN)  # a thread that was late
    second.snapshot = None
    versions.land()
    assert versions.ledgers[MEMORY].open == [v(3)]
    assert [each.id for each in versions.flying] == [v(3)]


# --- a small world: all that two ranks with two versions can meet ---------------------------------

World = tuple[Versions, Versions]
NEWEST = 2


def copy_of(world: World) -> World:
    one, other = (Versions(), Versions())
    for old, new in zip(world, (one, other), strict=True):
        for level, ledger in old.ledgers.items():
            new.ledgers[level].safe, new.ledgers[level].broken = ledger.safe, ledger.broken
        for version in old.flying:
            made = new.open(version.id, version.open)
            for level in version.open.difference(version.undecided()):
                made.tell(level, version.here(level))
    return one, other


def key(world: World) -> tuple[object, ...]:
    """All that matters of a state of the world."""
    return tuple(
        (
            *(
                (each.id, level, each.here(level))
                for each in one.flying
                for level in sorted(each.open)
            ),
            *((ledger.safe, *ledger.broken) for ledger in one.ledgers.values()),
        )
        for one in world
    )


def begun(world: World) -> int:
    """The number of the newest version that was taken."""
    known = [each for ledger in world[0].ledgers.values() for each in (ledger.safe, *ledger.broken)]
    known += [version.id for version in world[0].flying]
    return max((id_.version for id_ in known if id_ is not None), default=0)


def vote(world: World, then: dict[Level, Level]) -> None:
    """Both ranks vote about the oldest version on each level, and read the result. A version that
    is complete on a level goes to the next one."""
    for level in reversed(LEDGERS):
        one, other = (versions.on(level)[:1] for versions in world)
        assert [each.id for each in one] == [each.id for each in other], "they vote about the same"
        for versions, found in zip(world, (one, other), strict=True) if one else ():
            state = min(one[0].here(level), other[0].here(level))
            before = versions.ledgers[level].safe
            decided = versions.ledgers[level].resolve(state, found[0])
            assert decided == (state != PENDING)
            after = found[0].id if state == DONE else before
            assert versions.ledgers[level].safe == after
            if state == DONE and level in then:
                found[0].start(then[level])
    for versions in world:
        versions.land()


def moves(world: World, first: set[Level], then: dict[Level, Level]) -> Iterator[World]:
    """The states that may follow: one more version, one rank's news, or votes."""
    if (number := begun(world) + 1) <= NEWEST:
        after = copy_of(world)
        for versions in after:
            versions.open(v(number), first)
        yield after
    for rank in range(2):
        for version in world[rank].flying:
            for level in version.undecided():
                for state in (DONE, BROKEN):
                    after = copy_of(world)
                    told = after[rank].find(version.id)
                    assert told is not None
                    told.tell(level, state)
                    yield after
    after = copy_of(world)
    vote(after, then)
    yield after


def check(world: World) -> None:
    """What is true in every state."""
    one, other = world
    for level in LEDGERS:
        ledger, theirs = one.ledgers[level], other.ledgers[level]
        known = (ledger.safe, ledger.broken, ledger.open)
        assert known == (theirs.safe, theirs.broken, theirs.open), "equal on both ranks"
        assert ledger.open == sorted(ledger.open)
        assert not {ledger.safe, *ledger.open} & set(ledger.broken)
        assert all(ledger.safe is None or ledger.safe < id_ for id_ in ledger.open)
    for versions in world:
        assert set(versions.needed()) <= versions.ledgers[MEMORY].protected()


@pytest.mark.parametrize(
    ("first", "then"), [({MEMORY, LOCAL}, {}), ({LOCAL}, {LOCAL: PEER})], ids=["beside", "after"]
)
def test_in_a_small_world_all_ranks_know_the_same_of_every_version_at_every_moment(
    first: set[Level], then: dict[Level, Level]
) -> None:
    start: World = (Versions(), Versions())
    seen, todo, ends = {key(start)}, [start], set[tuple[VersionId | None, ...]]()
    while todo:
        world = todo.pop()
        check(world)
        if begun(world) == NEWEST and not world[0].flying:
            ends.add(tuple(world[0].ledgers[level].safe for level in (MEMORY, LOCAL, PEER)))
        for after in moves(world, first, then):
            if (name := key(after)) not in seen:
                seen.add(name)
                todo.append(after)
    at = [None, v(1), v(2)]
    if then:
        expected = {(None, None, None), (None, v(1), None), (None, v(1), v(1))}
        expected |= {(None, v(2), peer) for peer in at}
    else:
        expected = {(memory, local, None) for memory in at for local in at}
    assert ends == expected, "every combination of outcomes is met, and no other"
