"""Votes through a page of memory give the same result as the group's reduction, with ranks that are
early, late or dead. The reduction is used wherever a page cannot be had."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from tests.support import limits
from tierckpt.config import load_config
from tierckpt.coordination import (
    OWN_WIDTH,
    Agreement,
    Ballots,
    GroupBallots,
    RankGoneError,
    SharedBallots,
    ballots_for,
)
from tierckpt.core import PLACES, VOTE_WIDTH
from tierckpt.format import VersionId
from tierckpt.group import Node, SingleGroup
from tierckpt.snapshot import find_engine
from tierckpt.testing import ThreadGroup, run_ranks

T = TypeVar("T")
WIDTH = 5


def one_node(size: int) -> Node:
    return Node(0, 1, tuple(range(size)))


def on_page(group: ThreadGroup, width: int = WIDTH, gone: Collection[int] = ()) -> SharedBallots:
    """Each rank appears to others as a process of its own; those of `gone` have ended."""
    box = ballots_for(group, one_node(group.size), width)
    assert isinstance(box, SharedBallots)
    for rank in set(gone) - {group.rank}:
        os.close(box._processes[rank])
        box._processes[rank] = _ended_process()
    return box


def on_pages(
    size: int, program: Callable[[ThreadGroup, SharedBallots], T], gone: Collection[int] = ()
) -> list[T]:
    """Return the results of `program` on each rank; all close their ballots when all are done."""

    def whole(group: ThreadGroup) -> T:
        box = on_page(group, gone=gone)
        found = program(group, box)
        group.barrier()
        box.close()
        return found

    return run_ranks(size, whole)


def _ended_process() -> int:
    """A descriptor of a process that has ended and was not waited for."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    fd = os.pidfd_open(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    _zombies.append(pid)
    return fd


_zombies: list[int] = []


def pages() -> int:
    """Pages mapped in this process."""
    return Path("/proc/self/maps").read_text().count("tierckpt-ballots")


@pytest.fixture(autouse=True)
def _no_page_stays() -> Iterator[None]:
    files = len(os.listdir("/proc/self/fd"))
    yield
    while _zombies:
        os.waitpid(_zombies.pop(), 0)
    assert pages() == 0
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_minimum_of_every_boundary(size: int) -> None:
    turns = 50

    def vote(turn: int, rank: int) -> list[int]:
        """Equal on all ranks in two of three turns."""
        source = random.Random(f"{turn}.{rank if turn % 3 == 0 else 'all'}")
        return [source.randrange(-(2**63), 2**63) for _ in range(WIDTH)]

    def program(group: ThreadGroup, box: SharedBallots) -> list[list[int]]:
        waits = random.Random(group.rank)
        found, before = [], None
        for turn in range(turns):
            time.sleep(waits.random() * 1e-3)
            if before is not None:
                found.append(before.wait())
            before = box.all_reduce_min(vote(turn, group.rank))
        assert before is not None
        found.append(before.wait())
        assert before.wait() == found[-1], "again"
        return found

    expected = [
        [min(column) for column in zip(*(vote(turn, rank) for rank in range(size)), strict=True)]
        for turn in range(turns)
    ]
    assert on_pages(size, program) == [expected] * size


@pytest.mark.skipif(find_engine() is None, reason="the C library is not built")
def test_a_repeated_vote_is_the_row_that_a_new_one_would_be() -> None:
    """Also if an interrupt came after the row was written."""
    width = VOTE_WIDTH + 3

    def program(group: ThreadGroup) -> list[Any]:
        box = on_page(group, width)
        values = [*range(-2, width - 2)]
        assert box.repeat(7) is None, "nothing was cast before"
        box.all_reduce_min(values).wait()
        found: list[Any] = []
        for turn in range(2, 3 * limits.BALLOT_TURNS.value):
            place = turn if turn % 3 else -turn - group.rank
            differed = turn > 2 and (turn - 1) % 3 == 0
            pending = box.repeat(place)
            assert (pending is None) == differed, "only if all ranks have cast the last one"
            if pending is None:
                pending = box.all_reduce_min(placed(values, place))
            group.barrier()
            found.append((pending.is_unanimous(), pending.wait(), pending.missing()))
            row = box._row.pack(turn, 0, *placed(values, place))
            at = box._place(turn, group.rank)
            assert box._page is not None
            assert box._page[at : at + len(row) + 4] == row + zlib.crc32(row).to_bytes(4, "little")
            box.turn -= 1
            assert (box.repeat(12345) is None) == differed
            box.turn = turn
            assert box._page[at : at + len(row)] == row
            group.barrier()
        box.close()
        with pytest.raises(RuntimeError, match="the job ended"):
            pending.is_unanimous() or pending.missing()
        with pytest.raises(RuntimeError, match="the job ended"):
            box.repeat(1)
        return found

    def placed(values: list[int], place: int, other: int | None = None) -> list[int]:
        other = place if other is None else other
        changed = [*values]
        changed[PLACES] = min(place, other), min(~place, ~other)
        return changed

    values = [*range(-2, width - 2)]
    expected = [
        (True, placed(values, turn), [])
        if turn % 3
        else (False, placed(values, -turn, -turn - 1), [])
        for turn in range(2, 3 * limits.BALLOT_TURNS.value)
    ]
    assert run_ranks(2, program) == [expected] * 2


def test_a_vote_that_an_interrupt_left_on_the_page_is_read_number_by_number() -> None:
    """The next vote of the rank is of the same turn, and others may have read the one before."""

    def program(group: ThreadGroup) -> tuple[bool, list[int]]:
        box = on_page(group, VOTE_WIDTH)
        box.all_reduce_min([0] * VOTE_WIDTH)
        box.turn -= 1  # the interrupt came after the row was written
        group.barrier()
        again = box.all_reduce_min([1] * VOTE_WIDTH)
        group.barrier()
        found = again.is_unanimous(), again.wait()
        group.barrier()
        box.close()
        return found

    assert run_ranks(2, program) == [(False, [0] * VOTE_WIDTH)] * 2


def test_ballots_close_while_an_error_has_a_frame_of_the_page() -> None:
    def program(group: ThreadGroup) -> bool:
        box = on_page(group, VOTE_WIDTH)
        cast: Any = box.all_reduce_min([0] * VOTE_WIDTH)
        native = box._native
        box.close()
        assert native is box._native
        return bool(cast.is_unanimous())

    assert run_ranks(2, program) == [False] * 2


class LostTree:
    """A tree that is lost after some votes."""

    turn, lost = 0, False

    def all_reduce_min(self, values: list[int]) -> Any:
        self.turn += 1

        def wait() -> list[int]:
            if self.lost:
                raise RankGoneError("rank 3 was gone before it reached this boundary")
            return values

        return SimpleNamespace(done=lambda: True, wait=wait)


def test_a_vote_of_a_lost_tree_is_no_result_yet() -> None:
    """So the boundary that reads it recovers."""
    tree: Any = LostTree()
    cast = GroupBallots(SingleGroup(), VOTE_WIDTH, tree).all_reduce_min([3] * VOTE_WIDTH)
    assert cast.is_unanimous()
    tree.lost = True
    assert not cast.is_unanimous()


def test_equal_rows_are_a_result_only_if_every_byte_is_there() -> None:
    def program(group: ThreadGroup, box: SharedBallots) -> list[Any]:
        found: list[Any] = []
        for turn in range(1, 2 * limits.BALLOT_TURNS.value):
            if group.rank == 2:  # the others wait for it
                group.barrier()
            pending: Any = box.all_reduce_min([7] * WIDTH)
            if group.rank < 2:
                found.append(box.is_cast_by_all(turn, pending._row))
                group.barrier()
            group.barrier()
            found.append((box.is_cast_by_all(turn, pending._row), pending.done(), pending.wait()))
            group.barrier()
            if group.rank == 0 and box._page is not None:
                at = box._place(turn, 2)
                for damaged in range(at, at + len(pending._row)):
                    box._page[damaged] ^= 1
                    found.append(box.is_cast_by_all(turn, pending._row))
                    box._page[damaged] ^= 1
            group.barrier()
        return found

    first, second, third = on_pages(3, program)
    whole = (True, True, [7] * WIDTH)
    turns, nbytes = 2 * limits.BALLOT_TURNS.value - 1, 8 * (2 + WIDTH) + 4
    assert first == [False, whole, *[False] * nbytes] * turns
    assert second == [False, whole] * turns
    assert third == [whole] * turns


def rows_of(group: ThreadGroup, box: Ballots) -> tuple[Any, ...]:
    """Three turns; in the second all ranks give integers along."""
    own = [group.rank * 1000 + i for i in range(OWN_WIDTH)]
    cast = [
        box.all_reduce_min([group.rank] * WIDTH),
        box.all_reduce_min([5 - group.rank] * WIDTH, own),
        box.all_reduce_min([7] * WIDTH),
    ]
    return [each.wait()[0] for each in cast], [each.rows() for each in cast]


@pytest.mark.parametrize("kind", [on_page, partial(GroupBallots, width=WIDTH)])
def test_attachments_of_votes_are_read_by_all(kind: Callable[[ThreadGroup], Ballots]) -> None:
    size = 3
    expected = [tuple(rank * 1000 + i for i in range(OWN_WIDTH)) for rank in range(size)]

    def program(group: ThreadGroup) -> tuple[Any, ...]:
        box = kind(group)
        found = rows_of(group, box)
        group.barrier()
        box.close()
        return found

    for least, rows in run_ranks(size, program):
        assert least == [0, 3, 7]
        assert rows == [[], expected, []]


def test_a_rank_that_gives_nothing_along_keeps_nobody() -> None:
    """An interrupt came between its boundaries."""

    def program(group: ThreadGroup, box: SharedBallots) -> tuple[Any, ...]:
        cast = box.all_reduce_min([1] * WIDTH, [1] * OWN_WIDTH if group.rank else ())
        return cast.wait(), cast.rows()

    first, second = on_pages(2, program)
    assert first == ([1] * WIDTH, [])
    assert second == ([1] * WIDTH, [(), (1,) * OWN_WIDTH])


@pytest.mark.parametrize("damaged", range(0, 8 * (OWN_WIDTH + 1) + 4, 61))
def test_half_of_an_attachment_is_no_vote(damaged: int) -> None:
    def program(group: ThreadGroup, box: SharedBallots) -> Any:
        box.all_reduce_min([1] * WIDTH, [2] * OWN_WIDTH)
        group.barrier()
        page, torn = box._page, None
        assert page is not None
        if group.rank == 0:
            page[box._own_place(1, 1) + damaged] ^= 0x40
            torn = box._vote(page, 1, 1)
            page[box._own_place(1, 1) + damaged] ^= 0x40
        group.barrier()
        return torn, box._vote(page, 1, 1)

    assert on_pages(2, program)[0] == (None, ([1] * WIDTH, (2,) * OWN_WIDTH))


def test_a_rank_that_dies_unheard_is_named() -> None:
    def program(group: ThreadGroup, box: SharedBallots) -> str:
        said = ""
        if group.rank != 2:
            pending = box.all_reduce_min([1] * WIDTH)
            with pytest.raises(RankGoneError) as error:
                pending.wait()
            said = str(error.value)
        return said

    said = "rank 2 was gone before it reached this boundary"
    assert on_pages(3, program, gone=[2]) == [said, said, ""]


def test_the_vote_of_a_rank_that_ended_after_it_counts() -> None:
    def program(group: ThreadGroup, box: SharedBallots) -> list[int]:
        pending = box.all_reduce_min([group.rank] * WIDTH)
        group.barrier()
        return pending.wait()

    assert on_pages(2, program, gone=[0, 1]) == [[0] * WIDTH] * 2


def test_a_rank_that_runs_and_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.BALLOT_PATIENCE.set(monkeypatch, 0.02)

    def program(group: ThreadGroup, box: SharedBallots) -> str:
        said = ""
        if group.rank == 0:
            with pytest.raises(TimeoutError) as error:
                box.all_reduce_min([1] * WIDTH).wait()
            said = str(error.value)
        return said

    assert on_pages(2, program)[0] == "rank 1 has not reached this boundary in 0.02 s"


def test_a_rank_that_comes_too_late_gets_no_other_vote() -> None:
    def program(group: ThreadGroup, box: SharedBallots) -> bool:
        first = box.all_reduce_min([1] * WIDTH)
        for _ in range(limits.BALLOT_TURNS.value):
            box.all_reduce_min([2] * WIDTH)
        group.barrier()
        with pytest.raises(RuntimeError, match="vote 1 was asked for after its vote 5"):
            first.wait()
        return True

    assert all(on_pages(2, program))


def test_a_rank_with_an_interrupted_iteration_catches_up() -> None:
    def program(group: ThreadGroup, box: SharedBallots) -> list[list[int]]:
        cut_short = group.rank == 1
        found = [box.all_reduce_min([10 + group.rank] * WIDTH).wait()]
        late = None if cut_short else box.all_reduce_min([20] * WIDTH)
        box.even_out()
        if late is not None:
            found.append(late.wait())  # a copier that waits for it continues
        found.append(box.all_reduce_min([30 + group.rank] * WIDTH).wait())
        return found

    first, last = [10] * WIDTH, [30] * WIDTH
    void = [0] * WIDTH
    assert on_pages(3, program) == [[first, void, last], [first, last], [first, void, last]]


def test_nobody_waits_once_it_is_over() -> None:
    """As the copier does when elastic Horovod starts again after the loss of a rank."""

    def program(group: ThreadGroup, box: SharedBallots) -> str:
        said = ""
        if group.rank == 0:
            pending = box.all_reduce_min([1] * WIDTH)

            waits = threading.Event()
            look = box._is_gone

            def watched(*args: Any) -> bool:  # it has looked for votes, and slept
                waits.set()
                return look(*args)

            box._is_gone = watched  # type: ignore[method-assign]

            def copy() -> None:
                with contextlib.suppress(RuntimeError):
                    pending.wait()

            copier = threading.Thread(target=copy)
            copier.start()
            assert waits.wait(60)
            box.close()
            copier.join(60)
            assert not copier.is_alive()
            with pytest.raises(RuntimeError) as error:
                box.all_reduce_min([2] * WIDTH)
            said = str(error.value)
        return said

    assert on_pages(2, program)[0] == "the job ended before all ranks had voted"


def test_a_rank_that_released_is_not_waited_for_and_its_votes_count() -> None:
    """Its process runs: elastic Horovod starts again in it, as soon as the others join."""

    def program(group: ThreadGroup, box: SharedBallots) -> list[Any]:
        found: list[Any] = [box.all_reduce_min([group.rank] * WIDTH)]
        group.barrier()
        if group.rank == 1:
            said = [found[0].wait()]
            box.close()
        else:
            with pytest.raises(RankGoneError, match="rank 1 was gone"):
                box.all_reduce_min([5] * WIDTH).wait()
            said = [found[0].wait()]
        return said

    assert on_pages(3, program)[0] == [[0] * WIDTH]


@pytest.mark.parametrize("behind", [0, 1, 2, 3])
def test_ranks_of_several_nodes_even_out_by_votes_alone(behind: int) -> None:
    """Several votes had integers given along, of which a late rank does not know. A group's
    other collectives match by order."""
    own = [1] * OWN_WIDTH

    def program(group: ThreadGroup) -> tuple[list[int], list[Any], list[int]]:
        box = GroupBallots(group, WIDTH)
        cast = [
            box.all_reduce_min([turn] * WIDTH, own if turn % 2 else ())
            for turn in range(4 - (behind if group.rank == 1 else 0))
        ]
        box.even_out()
        gathered = group.all_gather_object(group.rank)
        return cast[0].wait(), gathered, box.all_reduce_min([9] * WIDTH).wait()

    assert run_ranks(3, program) == [([0] * WIDTH, [0, 1, 2], [9] * WIDTH)] * 3


def test_a_rank_that_continued_without_its_vote_is_seen() -> None:
    def program(group: ThreadGroup, box: SharedBallots) -> list[Any]:
        box.passed(7)
        box.all_reduce_min([1] * WIDTH).wait()
        group.barrier()
        late = None
        if group.rank != 1:
            late = box.all_reduce_min([2] * WIDTH)
        group.barrier()
        if group.rank == 0:
            found = [late.done(), late.passed_over(), late.missing()]  # type: ignore[union-attr]
        group.barrier()
        if group.rank == 1:
            box.passed(8)
        group.barrier()
        if group.rank != 0 or late is None:
            group.barrier()
            if group.rank == 1:
                box.all_reduce_min([3] * WIDTH)
            group.barrier()
            return []
        found += [late.done(), late.passed_over()]
        group.barrier()
        group.barrier()
        return [*found, late.done(), late.passed_over(), late.missing(), late.wait()]

    before, after = [False, False, [1]], [False, True]
    voted = [True, False, [], [2] * WIDTH]
    assert on_pages(3, program) == [[*before, *after, *voted], [], []]


def test_a_vote_that_an_interrupt_prevented_is_made_up_for() -> None:
    def program(group: ThreadGroup, box: SharedBallots) -> list[int]:
        late = None
        if group.rank == 1:
            with pytest.raises(struct.error):
                box.all_reduce_min([0.5] * WIDTH)  # type: ignore[list-item]
        else:
            late = box.all_reduce_min([3] * WIDTH)
        box.even_out()
        return [0] * WIDTH if late is None else late.wait()

    assert on_pages(2, program) == [[0] * WIDTH] * 2


def test_a_vote_that_others_may_have_read_is_not_cast_again() -> None:
    """An interrupt came between the write of the vote and its count."""

    def program(group: ThreadGroup, box: SharedBallots) -> list[int]:
        box.all_reduce_min([group.rank] * WIDTH)
        box.turn = 0
        return box.all_reduce_min([-5] * WIDTH).wait()

    assert on_pages(2, program) == [[0] * WIDTH] * 2


def test_a_forked_child_does_not_release_for_its_parent() -> None:
    def program(group: ThreadGroup, box: SharedBallots) -> list[int]:
        box._pid = -1 if group.rank == 1 else box._pid  # as in the child
        if group.rank == 1:
            box.close()
            group.barrier()
            found = [0]
        else:
            group.barrier()
            page = box._page
            assert page is not None
            found = [int(box._is_gone(page, 1))]
        return found

    assert on_pages(2, program) == [[0], [0]]


def test_descriptors_go_with_ballots_that_were_never_closed() -> None:
    """The process that was to use them failed; the fixture counts."""

    def program(group: ThreadGroup) -> None:
        on_page(group)

    run_ranks(2, program)


def test_a_rank_lost_while_the_page_is_made_costs_no_descriptor() -> None:
    """The fixture counts them."""

    class Lost(ThreadGroup):
        gathered = 0

        def all_gather_object(self, value: Any) -> list[Any]:
            self.gathered += 1
            if self.gathered == self.lost_at:
                raise _Broken("connection closed")
            return [value] * 2

    for at in (1, 2):
        group = Lost.__new__(Lost)
        group.rank, group.size, group.lost_at = 0, 2, at
        with pytest.raises(_Broken):
            ballots_for(group, one_node(2), WIDTH)


@pytest.mark.parametrize(
    "what",
    ["none can be made", "not in this Python", "one cannot open it", "another file", "pidfd"],
)
def test_where_a_page_cannot_be_had_all_vote_by_the_group(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with ranks in containers of their own, which see other processes under the same number."""
    opened, made = os.open, os.memfd_create
    other = tmp_path / "other"
    other.write_bytes(bytes(1 << 16))
    fired = threading.Event()

    def make(*args: Any) -> int:
        if what == "none can be made":
            fired.set()
            raise OSError("no memory")
        return made(*args)

    def open_(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if str(path).startswith("/proc/") and threading.current_thread().name == "rank2":
            fired.set()
            if what == "one cannot open it":
                raise PermissionError(path)
            if what == "another file":
                path = other
        return opened(path, flags, *args, **more)

    def watch(*_: Any) -> int:
        fired.set()
        raise PermissionError("an old filter of system calls")

    monkeypatch.setattr(os, "memfd_create", make)
    monkeypatch.setattr(os, "open", open_)
    if what == "pidfd":
        monkeypatch.setattr(os, "pidfd_open", watch)
    if what == "not in this Python":
        fired.set()
        monkeypatch.delattr(os, "memfd_create")

    def program(group: ThreadGroup) -> tuple[Ballots, list[int]]:
        box = ballots_for(group, one_node(3), WIDTH)
        return box, box.all_reduce_min([group.rank] * WIDTH).wait()

    for box, found in run_ranks(3, program):
        assert isinstance(box, GroupBallots)
        assert found == [0] * WIDTH
    assert fired.is_set()


class _Broken(Exception):
    """The error that a group raises when a rank is gone, as its library words it."""


def test_the_training_learns_of_a_dead_rank_in_its_librarys_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elastic Horovod starts again on HorovodInternalError alone."""

    def program(group: ThreadGroup) -> str:
        box = on_page(group, VOTE_WIDTH, gone=[1])
        agreement = Agreement(group, box, load_config({}, {}), lambda *_: None, lambda: None)
        said = ""
        if group.rank == 0:
            agreement.launch(VersionId(1, 1))

            def barrier() -> None:
                raise _Broken("connection closed")

            monkeypatch.setattr(group, "barrier", barrier)
            with pytest.raises(_Broken) as error:
                agreement.read()
            said = str(error.value)
        agreement.close()
        return said

    assert run_ranks(2, program) == ["connection closed", ""]
