"""Ballots: how the votes of all ranks at a boundary become one result.

Across nodes, the group's asynchronous reduction combines the votes, or a tree of node leaders in
its place (`leader_tree`). Where all ranks share a node, a page of shared memory does: each rank
writes its vote into its own row, and a reader takes the minimum of all rows. That wakes no thread,
so it takes no time from the iteration, and a reader waits only for ranks that have not voted yet.

A `Ballot` is one round of votes under way, with the versions that this rank voted about. A rank
without a vote may itself wait for this rank's gradients: it skipped an optimizer step that others
made, so it reaches its boundaries one iteration later. The training thread therefore waits for a
vote only for a bounded time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import select
import struct
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tierckpt.core.decisions import PLACES, Vote
from tierckpt.core.levels import Level
from tierckpt.format.ids import VersionId
from tierckpt.group import Group, Node, Pending, SingleGroup
from tierckpt.snapshot import copy_engine

if TYPE_CHECKING:
    from tierckpt.core.version import Version

    from .leader_tree import LeaderTree

__all__ = ["GroupBallots"]


TURNS = 4
"""Number of ballots with kept rows. A rank reads the last ballot before it casts the next, so
no rank is two ballots ahead: two would do, but the copier thread may read late."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2e-5, 1e-3
PATIENCE_SECONDS = 1800.0
"""The time that torch's collectives wait for a rank that runs and does not come."""
TREE_RANKS = 16
"""Ranks of a job from which a tree of nodes takes the place of a ring, see `leader_tree`."""
OWN_WIDTH = 80
"""Number of integers that a rank may give along with its vote."""
TOKEN_BYTES = 64
_LINE_BYTES = 64
_NAME = "tierckpt-ballots"


Rows = list[tuple[int, ...]]
"""Integers that every rank gave along with its vote, in rank order."""
Votes = list[tuple[list[int], tuple[int, ...]] | None]
"""By rank a vote, and the integers given along with it; None before it has come."""
LARGEST = (1 << 63) - 1


class Cast(Pending, Protocol):
    """A vote that was cast."""

    def rows(self) -> Rows:
        """Return the integers that ranks gave along; waits as `wait`. Empty if this rank gave none;
        an empty row for a rank that gave none."""
        ...

    def is_unanimous(self) -> bool:
        """True when all ranks are known to have cast this rank's vote, and gave nothing along. Does
        not wait. Any thread."""
        ...

    def missing(self) -> list[int]:
        """Return the ranks that are known not to have voted yet. Does not wait."""
        ...

    def passed_over(self) -> bool:
        """True when a rank is known to be ahead of this one without having voted: it waits for this
        rank, or soon will. Does not wait."""
        ...


class Ballots(Protocol):
    """The means by which `Agreement` votes."""

    problem: str
    """The reason why votes take longer than they could, with the remedy; empty: none. The same on
    all ranks."""

    def all_reduce_min(self, values: list[int], own: Sequence[int] = ()) -> Cast:
        """Cast this rank's vote; see `Group.all_reduce_min`. Training thread.

        `own`: OWN_WIDTH integers from 0 to 2^62 of this rank, which all ranks can read. In one turn
        either all ranks give some or none does.
        """
        ...

    def repeat(self, place: int) -> Cast | None:
        """Cast this rank's last vote again, with other `decisions.PLACES`, and report `place` as
        `passed` does, if all ranks are known to have cast it and gave nothing along. Else None, and
        nothing is done. Training thread."""
        ...

    def even_out(self) -> None:
        """Make all ranks' numbers of votes equal. Collective. A rank with an interrupted iteration
        may be a vote behind: it casts empty votes, so that none waits for it, and the next votes
        are about the same boundary."""
        ...

    def recover(self) -> bool:
        """After a RankGoneError of the vote cast last: True if all ranks have come here, and that
        vote has a result now, as no rank is gone but the way that votes took. Collective."""
        ...

    def passed(self, iterations: int) -> None:
        """Report that this rank has completed `iterations`, with a vote or not. Not collective. Any
        thread."""
        ...

    def close(self) -> None:
        """End voting and reading on this rank. Not collective."""
        ...


class RankGoneError(RuntimeError):
    """A rank has not voted and will not: it closed its ballots, or its process ended."""


class _Box(ctypes.Structure):
    """The page for `ballots.c`, in the order of its structure."""

    _fields_ = (
        ("page", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("ranks", "rank", "first", "turns")),
        *((name, ctypes.c_uint64) for name in ("row_bytes", "written", "place", "iterations")),
    )


class NativePage:
    """The C functions that compare and repeat rows of a page, for as long as it is open."""

    INTERFACE = 4
    """Number in the C file."""

    def __init__(self, path: str, page: mmap.mmap, box: _Box) -> None:
        """`path`: of the library. Raises OSError, AttributeError or ValueError if it has other
        functions."""
        library = ctypes.PyDLL(path)  # it is quicker than to give the interpreter away
        if library.tierckpt_ballots_interface() != self.INTERFACE:
            raise ValueError(f"{path} is of another version of Tierckpt")
        self._box = box
        # The address alone: a page with a buffer that somebody holds cannot be closed.
        box.page = ctypes.addressof(ctypes.c_char.from_buffer(page))
        at = ctypes.addressof(box)
        unanimous = library.tierckpt_ballots_unanimous
        unanimous.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        self.unanimous: Callable[[int], int] = partial(unanimous, at)
        """(turn) -> 1 if all ranks' rows of that turn are this rank's."""
        repeat = library.tierckpt_ballots_repeat
        repeat.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64]
        self.repeat: Callable[[int, int], int] = partial(repeat, at)
        """(turn, place) -> -1 if not all ranks' rows of that turn are this rank's. Else whether it
        wrote that row again, as the next turn's and with another place, and the place as this
        rank's iterations: 0 if that row was there already."""

    @classmethod
    def of(cls, page: mmap.mmap, box: _Box) -> NativePage | None:
        """The functions; None without the library, and where integers have another order of
        bytes."""
        library = copy_engine.find()
        if library is None or sys.byteorder != "little":
            return None
        try:
            return cls(library.path, page, box)
        except (OSError, AttributeError, ValueError):
            return None


class SharedBallots:
    """Ballots by a page of memory that all ranks have mapped.

    A row is a turn, a vote, and a checksum of both: a row written in part, or seen in part by this
    processor, is not a vote yet. Beside the rows, each rank has a byte, set when it has closed its
    ballots, and the number of its completed iterations. The integers that a rank gives along have a
    row of their own, and the vote says whether there is one.
    """

    def __init__(
        self, page: mmap.mmap, group: Group, width: int, processes: Mapping[int, int]
    ) -> None:
        """Own `page`, and `processes`: a pidfd of every other rank's process."""
        self._group, self._width = group, width
        self.rank, self.problem = group.rank, ""
        self._page: mmap.mmap | None = page
        self._processes = dict(processes)
        self._close_processes = weakref.finalize(self, _close_all, self._processes)
        self._pid = os.getpid()
        self._open = threading.Lock()
        """Held while a thread uses the page or the descriptors, or closes them."""
        self._row = struct.Struct(f"<qq{width}q")
        """Turn, number of integers given along, vote."""
        self._own_row = struct.Struct(f"<q{OWN_WIDTH}q")
        head, self._row_bytes = _head_bytes(group.size), row_bytes(width)
        self._rows_at = [head + turn * group.size * self._row_bytes for turn in range(TURNS)]
        """Offset of the first rank's row by the remainder of the turn."""
        self._own_iterations = self._iterations_at(group.rank)
        places = 8 * (2 + PLACES.start)
        sizes = self._row_bytes, self._row.size, places, self._own_iterations.start
        box = _Box(0, group.size, group.rank, head, TURNS, *sizes)
        self._native = NativePage.of(page, box)
        self.turn = 0
        """Turn of this rank's last vote."""

    def all_reduce_min(self, values: list[int], own: Sequence[int] = ()) -> Cast:
        """Cast as Ballots says."""
        turn, rank = self.turn + 1, self._group.rank
        at = self._place(turn, rank)
        votes: Votes = [None] * self._group.size
        whole = None
        with self._open:
            page = self._opened()
            # An interrupt right after the write leaves it there: others may have read it.
            if int.from_bytes(page[at : at + 8], "little") != turn:
                if own:
                    write_row(page, self._own_place(turn, rank), self._own_row.pack(turn, *own))
                row = self._row.pack(turn, len(own), *values)
                whole = row + _checksum(row)
                page[at : at + len(whole)] = whole
                votes[rank] = values, tuple(own)
        self.turn = turn  # last: a vote that an interrupt kept from being written is not cast
        return _Pending(self, turn, votes, bool(own), None if own else whole)

    def repeat(self, place: int) -> Cast | None:
        """Cast as Ballots says."""
        turn, native = self.turn, self._native
        if native is None or not turn:
            return None
        with self._open:
            if self._page is None:
                self._opened()
            written = native.repeat(turn, place)
        if written < 0:
            return None
        self.turn = turn = turn + 1
        return _Pending(self, turn, [None] * self._group.size, False, b"" if written else None)

    def even_out(self) -> None:
        """Cast empty votes until this rank has cast as many as any other."""
        for _ in range(self.turn, max(self._group.all_gather_object(self.turn))):
            self.all_reduce_min([0] * self._width)

    def recover(self) -> bool:
        """False: a rank without a vote is gone."""
        return False

    def leave(self) -> None:
        """Let the others know that this rank casts no more votes. Not collective."""
        with self._open:
            if self._page is not None and os.getpid() == self._pid:
                # A forked child does not act for this rank.
                self._page[TOKEN_BYTES + self._group.rank] = 1

    def close(self) -> None:
        """Close as Ballots says."""
        self.leave()
        with self._open:
            if self._page is not None:
                self._page.close()
            self._page = None
            self._close_processes()

    def _opened(self) -> mmap.mmap:
        """Return the page, with `_open` held. Raises RuntimeError if the ballots are closed."""
        if self._page is None:
            raise RuntimeError("the job ended before all ranks had voted")
        return self._page

    @contextlib.contextmanager
    def opened(self) -> Iterator[mmap.mmap]:
        """Context with the page, which stays open in it. Raises RuntimeError if the ballots are
        closed."""
        with self._open:
            yield self._opened()

    def is_gone(self, rank: int) -> bool:
        """True for a rank that closed its ballots, or has ended. Any thread."""
        with self._open:
            return self._page is None or self._is_gone(self._page, rank)

    def has_ended(self, rank: int) -> bool:
        """True if that rank's process has ended. Any thread."""
        with self._open:
            return self._page is not None and self._has_ended(rank)

    def own_vote(self, turn: int) -> tuple[list[int], tuple[int, ...]] | None:
        """Return this rank's vote of that turn. Any thread."""
        with self._open:
            return self._vote(self._opened(), turn, self.rank)

    def process_fds(self) -> list[int]:
        """Return the descriptors of the other ranks' processes."""
        return [*self._processes.values()]

    def result(self, turn: int, votes: Votes) -> tuple[list[int], Rows]:
        """Return the minimum of all ranks' votes of that turn, and the integers given along. Waits
        for votes that `votes` lacks. Any thread.

        Raises RankGoneError, TimeoutError when a running rank does not vote, and RuntimeError when
        the ballots are closed.
        """
        if None in votes and self.missing(turn, votes):
            self._wait(turn, votes)
        cast, own = zip(*filter(None, votes), strict=True)
        return list(map(min, *cast)), list(own)

    def _wait(self, turn: int, votes: Votes) -> None:
        gone: set[int] = set()
        deadline = time.monotonic() + PATIENCE_SECONDS
        pause = FIRST_PAUSE_SECONDS
        while missing := self.missing(turn, votes):
            gone.intersection_update(missing)  # a rank may have voted before it was gone
            if gone:
                raise RankGoneError(f"rank {min(gone)} was gone before it reached this boundary")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {missing[0]} has not reached this boundary in {PATIENCE_SECONDS:g} s"
                )
            time.sleep(pause)
            with self._open:
                page = self._opened()
                gone = {rank for rank in missing if self._is_gone(page, rank)}
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def is_cast_by_all(self, turn: int, row: bytes) -> bool:
        """True if the rows of all ranks for that turn are equal to this rank's, `row`. Any thread.

        Then they are complete, since a row contains its turn and a checksum, and this rank's vote
        is the minimum."""
        if (native := self._native) is not None:
            with self._open:
                return self._page is not None and native.unanimous(turn) == 1
        first = self._rows_at[turn % TURNS]
        rows = row.ljust(self._row_bytes, b"\0") * self._group.size
        with self._open:
            page = self._page
            return page is not None and page[first : first + len(rows)] == rows

    def done(self, turn: int, votes: Votes) -> bool:
        """True when `result` will not wait for a running rank. Any thread."""
        with self._open:
            page = self._page
            missing = () if page is None else self._collect(page, turn, votes)
            return page is None or not missing or all(self._is_gone(page, r) for r in missing)

    def missing(self, turn: int, votes: Votes) -> list[int]:
        """Add the votes of that turn that have come to `votes`; return the ranks without a vote.
        Any thread."""
        with self._open:
            return self._collect(self._opened(), turn, votes)

    def passed(self, iterations: int) -> None:
        """Write this rank's iterations to the page."""
        with self._open:
            if self._page is not None:
                self._page[self._own_iterations] = iterations.to_bytes(8, "little")

    def passed_over(self, turn: int, votes: Votes) -> bool:
        """True when a rank that has not cast that turn's vote has completed more iterations than
        this one. Any thread."""
        missing = self.missing(turn, votes)
        with self._open:
            page = self._opened()
            passed = {r: page[self._iterations_at(r)] for r in (*missing, self._group.rank)}
            missing = self._collect(page, turn, votes)
        own = int.from_bytes(passed[self._group.rank], "little")
        return any(int.from_bytes(passed[rank], "little") > own for rank in missing)

    def _iterations_at(self, rank: int) -> slice:
        at = _head_bytes(self._group.size) - (rank + 1) * _LINE_BYTES
        return slice(at, at + 8)

    def _collect(self, page: mmap.mmap, turn: int, votes: Votes) -> list[int]:
        """As `missing`, with `_open` held."""
        missing = []
        for rank, known in enumerate(votes):
            if known is None:
                votes[rank] = vote = self._vote(page, turn, rank)
                if vote is None:
                    missing.append(rank)
        return missing

    def _is_gone(self, page: mmap.mmap, rank: int) -> bool:
        """True for a rank that closed its ballots, or has ended, reaped or not."""
        return bool(page[TOKEN_BYTES + rank]) or self._has_ended(rank)

    def _has_ended(self, rank: int) -> bool:
        if rank not in self._processes:  # this one
            return False
        ends = select.poll()
        ends.register(self._processes[rank], select.POLLIN)
        return bool(ends.poll(0))

    def _vote(
        self, page: mmap.mmap, turn: int, rank: int
    ) -> tuple[list[int], tuple[int, ...]] | None:
        """Return a vote and the integers given along; None before both are written."""
        found = read_row(page, self._place(turn, rank), self._row, turn)
        if found is None:
            return None
        cast, width, *values = found
        if cast > turn:
            raise RuntimeError(f"rank {rank}'s vote {turn} was asked for after its vote {cast}")
        if not width:
            return values, ()
        own = read_row(page, self._own_place(turn, rank), self._own_row, turn)
        return (values, own[1:]) if own is not None and own[0] == turn else None

    def _place(self, turn: int, rank: int) -> int:
        return self._rows_at[turn % TURNS] + rank * self._row_bytes

    def _own_place(self, turn: int, rank: int) -> int:
        size = self._group.size
        first = self._rows_at[0] + TURNS * size * self._row_bytes
        return first + (turn % TURNS * size + rank) * row_bytes(OWN_WIDTH)


class _Pending:
    """The vote of SharedBallots: any thread may wait, more than once."""

    def __init__(
        self,
        ballots: SharedBallots,
        turn: int,
        votes: Votes,
        with_own: bool,
        row: bytes | None,
    ) -> None:
        """`votes`: those known already, by rank. `row`: this rank's as it was written now; empty if
        it was repeated; None if it gave integers along, or is one that an interrupt left there."""
        self._ballots, self._turn, self._with_own = ballots, turn, with_own
        self._votes, self._row = votes, row
        self._lock = threading.Lock()
        self._result: tuple[list[int], Rows] | None = None

    def wait(self) -> list[int]:
        return self._wait()[0]

    def done(self) -> bool:
        # Without the lock, which another thread may hold while it waits.
        return (
            self._result is not None
            or self.is_unanimous()
            or self._ballots.done(self._turn, self._votes)
        )

    def rows(self) -> Rows:
        return self._wait()[1] if self._with_own else []

    def missing(self) -> list[int]:
        return self._ballots.missing(self._turn, self._votes)

    def passed_over(self) -> bool:
        return self._ballots.passed_over(self._turn, self._votes)

    def is_unanimous(self) -> bool:
        # The usual case, without a look at single numbers.
        return self._row is not None and self._ballots.is_cast_by_all(self._turn, self._row)

    def _wait(self) -> tuple[list[int], Rows]:
        if self._result is None and self.is_unanimous():
            own = self._votes[self._ballots.rank] or self._ballots.own_vote(self._turn)
            if own is not None:
                self._result = own[0], []
        if self._result is not None:
            return self._result
        with self._lock:
            if self._result is None:
                self._result = self._ballots.result(self._turn, self._votes)
            return self._result


def ballots_for(group: Group, node: Node, width: int, interface: str = "") -> Ballots:
    """Return the ballots for these ranks, `width` integers a vote. The same kind on all ranks.
    Collective. `interface`: as the setting `peer_interface`."""

    if node.count > 1 and group.size >= TREE_RANKS and getattr(group, "is_ring", False):
        from .leader_tree import leader_tree

        tree = leader_tree(group, node, width + 2, interface)
        box = GroupBallots(group, width, tree)
        if tree is None:
            box.problem = (
                f"votes go around all {group.size} ranks, as the first ranks of the nodes cannot "
                "connect to each other: set peer_interface to an interface that other nodes reach"
            )
        return box
    if node.count > 1 or group.size == 1:
        return GroupBallots(group, width)
    return _on_shared_page(group, width) or GroupBallots(group, width)


def page_bytes(size: int, width: int) -> int:
    """Return the size of the page of that many ranks."""
    return _head_bytes(size) + TURNS * size * (row_bytes(width) + row_bytes(OWN_WIDTH))


def _head_bytes(size: int) -> int:
    """Return the size of the token, a byte per rank, and a line of iterations per rank."""
    return TOKEN_BYTES + _whole_lines(size) + size * _LINE_BYTES


def row_bytes(width: int) -> int:
    """Return the size of a row of `width` integers."""
    return _whole_lines(8 * (2 + width) + 4)


def read_row(page: mmap.mmap, at: int, shape: struct.Struct, turn: int) -> tuple[int, ...] | None:
    """Return the values of a row; None before that turn's is written."""
    end = at + shape.size
    row = page[at:end]
    if int.from_bytes(row[:8], "little") < turn:  # the usual case of a late rank
        return None
    return shape.unpack(row) if page[end : end + 4] == _checksum(row) else None


def write_row(page: mmap.mmap, at: int, row: bytes) -> None:
    """Write a row and its checksum."""
    page[at : at + len(row) + 4] = row + _checksum(row)


def _whole_lines(nbytes: int) -> int:
    """Round up to cache lines, so that no two ranks write to one line."""
    return -(-nbytes // _LINE_BYTES) * _LINE_BYTES


def _on_shared_page(group: Group, width: int) -> SharedBallots | None:
    """Return ballots on a page of zeros after a token, mapped by all ranks; None on all if one
    cannot map it. Collective.

    The page has no name, so a killed job leaves none. Ranks that do not see each other's
    processes (each in its own container) cannot map it, or find another process's file under that
    number; the file's name and the token show this.
    """
    nbytes = page_bytes(group.size, width)
    token = secrets.token_bytes(TOKEN_BYTES)
    with contextlib.ExitStack() as only_now, contextlib.ExitStack() as unless_whole:
        page, where = None, ""
        if group.rank == 0:
            with contextlib.suppress(OSError, AttributeError):  # the latter: an old C library
                page, where = make_page(nbytes, token, only_now)
        gathered = group.all_gather_object((os.getpid(), where, token))
        _, where, token = gathered[0]
        page = page or map_page(where, token, nbytes)
        if page is not None:
            unless_whole.callback(page.close)
        pids = {rank: pid for rank, (pid, *_) in enumerate(gathered) if rank != group.rank}
        # Now, while all ranks run: later a number may belong to another process.
        processes = watch_processes(pids, unless_whole) if page is not None else None
        if not all(group.all_gather_object(processes is not None)):
            return None
        assert page is not None
        assert processes is not None
        unless_whole.pop_all()
        return SharedBallots(page, group, width, processes)


def make_page(nbytes: int, token: bytes, until: contextlib.ExitStack) -> tuple[mmap.mmap, str]:
    """Return a page, and the path where others find it until the end of `until`."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    until.callback(os.close, fd)
    os.ftruncate(fd, nbytes)
    page = mmap.mmap(fd, nbytes)
    page[: len(token)] = token
    return page, f"/proc/{os.getpid()}/fd/{fd}"


def map_page(where: str, token: bytes, nbytes: int) -> mmap.mmap | None:
    """Map the page at that path; None if it is not the page with that token."""
    try:
        if not where or not os.readlink(where).startswith(f"/memfd:{_NAME}"):
            return None
        fd = os.open(where, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        page = mmap.mmap(fd, nbytes)
    except (OSError, ValueError):  # the latter: another file, and shorter
        return None
    finally:
        os.close(fd)
    if page[: len(token)] == token:
        return page
    page.close()
    return None


def watch_processes(pids: Mapping[int, int], until: contextlib.ExitStack) -> dict[int, int] | None:
    """Return, by rank, descriptors that become readable when the process ends; None if not all."""
    found = {}
    for rank, pid in pids.items():
        try:
            found[rank] = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return None
        until.callback(os.close, found[rank])
    return found


def _close_all(fds: dict[int, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


def _checksum(row: bytes) -> bytes:
    return zlib.crc32(row).to_bytes(4, "little")


MEETING_SECONDS = 30.0
"""Time for all ranks to come to the boundary where they find that the tree is lost."""


class GroupBallots:
    """Ballots by the group's reduction.

    The integers that ranks give along have a reduction of their own, after the vote's. Ranks' n-th
    reductions match each other, and a group may also match its other collectives by their order,
    so ranks must have launched equally many before any other collective: see `even_out`.
    """

    _END, _OWN = -1, -2
    """Positions in a vote: 1 if its rank is in `even_out`, and -1 if it launched a reduction of
    integers given along."""

    def __init__(self, group: Group, width: int, tree: LeaderTree | None = None) -> None:
        """Own `tree`, which takes the place of the group's reduction for votes."""
        self._group, self._width, self.tree = group, width, tree
        self.problem = ""
        self._last: _Reduced | None = None
        """The vote cast last."""
        self._before: list[int] = []
        """The numbers of the vote before it."""

    def all_reduce_min(self, values: list[int], own: Sequence[int] = ()) -> Cast:
        """Cast as Ballots says. The columns of other ranks have the largest number, so the minimum
        has every rank's own."""
        cast = self._cast([*values, -1 if own else 0, 0])
        if own:
            columns = [LARGEST] * (len(own) * self._group.size)
            columns[len(own) * self._group.rank : len(own) * (self._group.rank + 1)] = own
            cast.give_along(self._group.all_reduce_min(columns), len(own))
        return cast

    def even_out(self) -> None:
        """Cast votes until one at which all ranks are in `even_out`; it is the same for all."""
        at_end = False
        while not at_end:
            cast = self._cast([*[0] * self._width, 0, 1])
            try:
                agreed = cast.vote.wait()
            except RankGoneError:
                if not self.recover():
                    raise
                agreed = cast.vote.wait()
            at_end = agreed[self._END] == 1
            if agreed[self._OWN]:
                self._group.all_reduce_min([LARGEST] * (OWN_WIDTH * self._group.size))

    def recover(self) -> bool:
        """Vote by the group from now on, see Ballots. False without a tree, and if a rank does not
        come: then the group may be unusable.

        All ranks that come wait for a vote of the same turn, or some are one turn ahead. So each
        shows its last two votes: their minimum is the result of the earlier turn.
        """
        last, tree = self._last, self.tree
        if last is None or tree is None or not self._group.meet(MEETING_SECONDS):
            return False
        turn = tree.turn
        offers = self._group.all_gather_object((turn, last.values, self._before, tree.why_lost()))
        tree.close()
        self.tree = None
        behind = min(theirs for theirs, *_ in offers)
        if turn > behind:
            last.vote = self._group.all_reduce_min(last.values)  # the others cast theirs next
        else:
            votes = [cast if theirs == turn else before for theirs, cast, before, _ in offers]
            last.vote = SingleGroup().all_reduce_min([*map(min, *votes)])  # is complete at once
        why = next(filter(None, (why for *_, why in offers)), "a connection between nodes ended")
        self.problem = (
            f"votes go around all {self._group.size} ranks from now on, which takes longer: the "
            f"tree of the first ranks of the nodes is lost ({why}), and no rank is. The next start "
            "of the job makes a new tree"
        )
        return True

    def repeat(self, place: int) -> Cast | None:
        """Cast as Ballots says."""
        last = self._last
        if last is None or last.values[self._END] or not last.is_unanimous():
            return None
        values = last.values[: self._width]
        values[PLACES] = place, ~place
        return self.all_reduce_min(values)

    def passed(self, iterations: int) -> None:
        """Do nothing: other ranks cannot see it."""

    def close(self) -> None:
        """Close the tree, if there is one."""
        if self.tree is not None:
            self.tree.close()

    def _cast(self, values: list[int]) -> _Reduced:
        vote = (self.tree or self._group).all_reduce_min(values)
        self._before = self._last.values if self._last is not None else []
        self._last = _Reduced(vote, values, self._width)
        return self._last


class _Reduced:
    """The vote of GroupBallots."""

    def __init__(self, vote: Pending, values: list[int], width: int) -> None:
        self.vote, self.values, self._width = vote, values, width
        self._own: Pending | None = None
        self._own_width = 0

    def give_along(self, own: Pending, width: int) -> None:
        """Add the reduction of integers that ranks give along, `width` each."""
        self._own, self._own_width = own, width

    def done(self) -> bool:
        return self.vote.done() and (self._own is None or self._own.done())

    def wait(self) -> list[int]:
        return self.vote.wait()[: self._width]

    def rows(self) -> Rows:
        if self._own is None:
            return []
        columns, size = self._own.wait(), self._own_width
        return [tuple(columns[at : at + size]) for at in range(0, len(columns), size)]

    def is_unanimous(self) -> bool:
        try:
            return self._own is None and self.vote.done() and self.vote.wait() == self.values
        except RuntimeError:  # a way of the votes is lost: `read` finds out what is left
            return False

    def missing(self) -> list[int]:
        return []  # a reduction does not report the missing ranks

    def passed_over(self) -> bool:
        return False


VOTE_PATIENCE_SECONDS = 30.0
"""Time that the training thread waits for a vote. Where ranks make the same steps, all votes were
cast before the last gradients came, so only the network may delay one."""
VOTE_PATIENCE_APART_SECONDS = 5.0
"""The same time where the votes read last came from different iterations."""


class Ballot:
    """One rank's view of a round of votes. Made by `Agreement`."""

    def __init__(
        self,
        pending: Cast,
        newest: VersionId,
        about: dict[Level, Version],
        is_plain: bool = False,
    ) -> None:
        """`newest`: the version of the vote's boundary; `about`: by level, the version that the
        state in the vote is about; `is_plain`: this rank voted DONE about all of them."""
        self.pending, self.newest = pending, newest
        self.about, self.is_plain = about, is_plain
        self._result: Vote | None = None

    def is_here(self) -> bool:
        """True when `result` will not block. Any thread."""
        return self.pending.done()

    def came(self, patience_seconds: float) -> bool:
        """Wait for the votes. True when `result` will not block; False after the time is over, or
        when the votes cannot come before this rank continues. Training thread, with the gradients
        of this iteration complete."""
        if self._result is not None:
            return True
        deadline, pause = time.monotonic() + patience_seconds, FIRST_PAUSE_SECONDS
        while not self.pending.done():
            if time.monotonic() >= deadline or self.pending.passed_over():
                return self.pending.done()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return True

    def result(self) -> Vote:
        """Return the minimum of all ranks' votes; waits for it. Any thread."""
        if self._result is None:
            self._result = Vote.unpack(self.pending.wait())
        return self._result

    def rows(self) -> Rows:
        """Return the integers that ranks gave along with their votes; waits, too."""
        return self.pending.rows()

    def missing(self) -> list[int]:
        """Return the ranks that are known not to have voted yet."""
        return self.pending.missing()

    def passed_over(self) -> bool:
        """True when a rank is known to be ahead of this one without its vote. Thread: as `came`."""
        return self.pending.passed_over()
