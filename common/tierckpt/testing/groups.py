"""Groups: ranks as threads of one process, and a suite for every Group, over any library.

With threads, a test has a job of N ranks without a launcher.
"""

from __future__ import annotations

import faulthandler
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from tierckpt._text import error_text
from tierckpt.group import Group

T = TypeVar("T")


class GroupAbortedError(RuntimeError):
    """Another rank of the job failed or took too long, so the result of a wait will never come."""


class _Round:
    """One collective, with each rank's contribution."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind = kind
        self.brought: dict[int, Any] = {}
        self.complete = False
        self._size = size

    def bring(self, rank: int, value: Any) -> None:
        self.brought[rank] = value
        self.complete = len(self.brought) == self._size


class _Meeting:
    """Matches the ranks' n-th calls with each other."""

    def __init__(self, size: int, patience_seconds: float) -> None:
        self.size = size
        self.patience_seconds = patience_seconds
        self.aborted = ""
        self._rounds: dict[int, _Round] = {}
        self._changed = threading.Condition()

    def enter(self, number: int, kind: str, rank: int, value: Any) -> _Round:
        """Contribute `value` to call `number`; returns at once."""
        with self._changed:
            self._refuse_if_aborted()
            round_ = self._rounds.setdefault(number, _Round(kind, self.size))
            if round_.kind != kind:
                raise RuntimeError(f"rank {rank} calls {kind} where another calls {round_.kind}")
            round_.bring(rank, value)
            if round_.complete:
                del self._rounds[number]
            self._changed.notify_all()
            return round_

    def wait(self, ready: Callable[[], bool], patience_seconds: float = 0.0) -> None:
        """Wait until `ready`; raises GroupAbortedError when that can never happen any more."""
        patience_seconds = patience_seconds or self.patience_seconds
        with self._changed:
            came = self._changed.wait_for(lambda: ready() or self.aborted, patience_seconds)
            if not ready():
                self._refuse_if_aborted()
            if not came:
                raise GroupAbortedError(f"a rank did not come within {patience_seconds} s")

    def abort(self, reason: str) -> None:
        """Wake all waiting ranks with an error."""
        with self._changed:
            self.aborted = self.aborted or reason
            self._changed.notify_all()

    def _refuse_if_aborted(self) -> None:
        if self.aborted:
            raise GroupAbortedError(self.aborted)


class _Reduction:
    """A `tierckpt.group.Pending` of a ThreadGroup."""

    def __init__(self, meeting: _Meeting, round_: _Round) -> None:
        self._meeting = meeting
        self._round = round_

    def wait(self) -> list[int]:
        """The result. Any thread; may be called again."""
        self._meeting.wait(lambda: self._round.complete)
        return [min(column) for column in zip(*self._round.brought.values(), strict=True)]

    def done(self) -> bool:
        """True if `wait` returns, or raises, at once."""
        return self._round.complete or bool(self._meeting.aborted)


class ThreadGroup:
    """A `tierckpt.Group` with threads as ranks; `run_ranks` makes one for each.

    As strict as the real ones: objects are pickled, so ranks share none; ranks that call different
    collectives, or fewer, get an error instead of a wrong answer. When a rank fails, the calls of
    the others raise GroupAbortedError.
    """

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting
        self._calls = 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather an object from every rank, see `tierckpt.Group`."""
        round_ = self._enter("all_gather_object", pickle.dumps(value))
        self._meeting.wait(lambda: round_.complete)
        return [pickle.loads(round_.brought[rank]) for rank in range(self.size)]

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """Send a buffer to all ranks, see `tierckpt.Group`."""
        sent = buffer.clone() if self.rank == source else None
        round_ = self._enter(f"broadcast from {source}", sent)
        if self.rank != source:
            self._meeting.wait(lambda: source in round_.brought)
            buffer.copy_(round_.brought[source])

    def all_reduce_min(self, values: list[int]) -> _Reduction:
        """Launch a reduction, see `tierckpt.Group`."""
        return _Reduction(self._meeting, self._enter("all_reduce_min", list(values)))

    def barrier(self) -> None:
        """Wait for all ranks, see `tierckpt.Group`."""
        round_ = self._enter("barrier", None)
        self._meeting.wait(lambda: round_.complete)

    def meet(self, timeout_seconds: float) -> bool:
        """Wait for all ranks with a time-out, see `tierckpt.Group`."""
        round_ = self._enter("meet", None)
        try:
            self._meeting.wait(lambda: round_.complete, timeout_seconds)
        except GroupAbortedError:
            return False
        return True

    def close(self) -> None:
        """Do nothing, see `tierckpt.Group`."""

    def _enter(self, kind: str, value: Any) -> _Round:
        self._calls += 1
        return self._meeting.enter(self._calls, kind, self.rank, value)


def run_ranks(
    size: int, program: Callable[[ThreadGroup], T], timeout_seconds: float = 120.0
) -> list[T]:
    """Run `program(group)` on `size` threads; returns the results in rank order.

    Raises the error of the first failing rank; TimeoutError, with the stacks of the stuck ranks,
    when they do not end in time. Never waits much longer than `timeout_seconds`.
    """
    meeting = _Meeting(size, timeout_seconds)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = program(ThreadGroup(rank, meeting))
        except BaseException as error:
            failures.append(error)
            meeting.abort(f"rank {rank} failed: {error_text(error)}")

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(size)
    ]
    deadline = time.monotonic() + timeout_seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [t for t in threads if t.is_alive()]
    stacks = _stacks() if stuck else ""
    if stuck:
        meeting.abort("the ranks' time is over")
        for thread in stuck:
            thread.join(min(5.0, timeout_seconds))
    if failures and not (stuck and isinstance(failures[0], GroupAbortedError)):
        raise failures[0]
    if stuck:
        names = ", ".join(thread.name for thread in stuck)
        raise TimeoutError(f"{names}: not done after {timeout_seconds} s:\n{stacks}")
    return [results[rank] for rank in range(size)]


def _stacks() -> str:
    """Stacks of all threads, in one call: Python code must not walk a running thread's frames."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


PATIENCE_SECONDS = 60.0

Program = Callable[[Group], Any]


class GroupConformance:
    """Subclass it, define `run`, and name the job sizes to try.

    The programs are functions of this module (or partials of them), so `run` may send them to other
    processes by pickle.
    """

    sizes: tuple[int, ...] = (1, 2, 3)
    """Numbers of ranks; each test runs one job of each size."""

    def run(self, size: int, program: Program) -> list[Any]:
        """Run `program(group)` on `size` ranks; return the results in rank order.

        An exception on a rank must become an exception here, and a hang must end.
        """
        raise NotImplementedError

    def test_every_rank_has_its_number(self) -> None:
        """Ranks count from zero, and all know the size."""
        for size in self.sizes:
            assert self.run(size, _identity) == [(rank, size) for rank in range(size)]

    def test_gathered_objects_come_in_rank_order(self) -> None:
        """Objects of any type and of different lengths."""
        for size in self.sizes:
            expected = [_object_of(rank) for rank in range(size)]
            assert self.run(size, _gather_own_object) == [expected] * size

    def test_a_gathered_object_is_the_receivers_own(self) -> None:
        """A change of a received object changes nothing elsewhere."""
        for size in self.sizes:
            assert self.run(size, _gather_and_spoil) == [[[0]] * size] * size

    def test_a_broadcast_reaches_every_rank_from_any_source(self) -> None:
        """Also of a single byte, and of a part of a larger buffer."""
        for size in self.sizes:
            for received in self.run(size, _broadcast_from_all):
                expected = [_bytes_of(source, n) for source in range(size) for n in (1, 70_001)]
                assert received == expected

    def test_the_minimum_is_taken_element_by_element(self) -> None:
        """For signed numbers, as in votes, and for large ones."""
        for size in self.sizes:
            columns = zip(*(_vote_of(rank, size) for rank in range(size)), strict=True)
            assert self.run(size, _reduce) == [[min(column) for column in columns]] * size

    def test_a_reduction_is_launched_without_waiting_for_the_others(self, tmp_path: Path) -> None:
        """The training thread must not stop where it votes."""
        for size in self.sizes:
            folder = tmp_path / str(size)
            folder.mkdir()
            assert self.run(size, partial(_reduce_late, str(folder))) == [[0]] * size

    def test_a_reduction_may_be_waited_for_twice_and_by_another_thread(self) -> None:
        """The copier thread asks first, the training thread later."""
        for size in self.sizes:
            assert self.run(size, _reduce_and_wait_twice) == [([1 - size], [1 - size])] * size

    def test_whether_a_reduction_is_done_is_known_without_waiting(self, tmp_path: Path) -> None:
        """Also while another thread waits for it."""
        for size in self.sizes:
            folder = tmp_path / str(size)
            folder.mkdir()
            found = self.run(size, partial(_reduce_and_look, str(folder)))
            assert all(after for _, after in found)
            assert size == 1 or found[0][0] is False

    def test_other_collectives_may_pass_while_reductions_are_under_way(self) -> None:
        """Several reductions may be in progress, each with its own result."""
        for size in self.sizes:
            expected = ([list(range(size))] * 2, [[10], [20], [30]])
            assert self.run(size, _interleave) == [expected] * size

    def test_the_values_may_be_changed_once_the_reduction_is_launched(self) -> None:
        """The caller's list is not kept."""
        for size in self.sizes:
            assert self.run(size, _reduce_and_change) == [[7, 8]] * size

    def test_nobody_leaves_a_barrier_before_all_have_come(self, tmp_path: Path) -> None:
        """After the barrier, all ranks see everything done before it."""
        for size in self.sizes:
            folder = tmp_path / str(size)
            folder.mkdir()
            assert self.run(size, partial(_meet, str(folder))) == [size * 3] * size

    def test_ranks_meet_at_the_end_when_all_come(self) -> None:
        """More than once."""
        for size in self.sizes:
            assert self.run(size, _meet_at_the_end) == [[True, True]] * size

    def test_a_rank_alone_at_the_end_is_reported(self, tmp_path: Path) -> None:
        """A rank that waits for one that never comes continues after its time-out."""
        for size in self.sizes[1:]:
            folder = tmp_path / str(size)
            folder.mkdir()
            alone = self.run(size, partial(_meet_without_the_last, str(folder)))
            assert alone[:-1] == [False] * (size - 1)


def _identity(group: Group) -> tuple[int, int]:
    assert isinstance(group, Group)
    return group.rank, group.size


def _object_of(rank: int) -> Any:
    return {"rank": rank, "text": "x" * (rank * 1000), "none": None, "nested": [(rank, b"\0")]}


def _gather_own_object(group: Group) -> list[Any]:
    return group.all_gather_object(_object_of(group.rank))


def _gather_and_spoil(group: Group) -> list[Any]:
    mine = [0]
    theirs = group.all_gather_object(mine)
    for other, received in enumerate(theirs):
        if other != group.rank:
            received.append(group.rank)
    group.barrier()
    return group.all_gather_object(mine)


def _bytes_of(source: int, count: int) -> bytes:
    return bytes((source + i) % 251 for i in range(count))


def _broadcast_from_all(group: Group) -> list[bytes]:
    received = []
    for source in range(group.size):
        for count in (1, 70_001):
            whole = torch.zeros(count + 8, dtype=torch.uint8)
            buffer = whole[4:-4]
            if group.rank == source:
                buffer.copy_(
                    torch.frombuffer(bytearray(_bytes_of(source, count)), dtype=torch.uint8)
                )
            group.broadcast(buffer, source)
            assert whole[:4].tolist() == whole[-4:].tolist() == [0] * 4
            received.append(bytes(buffer.tolist()))
    return received


def _vote_of(rank: int, size: int) -> list[int]:
    return [rank, -rank, (rank + 1) % size - 1, 2**40 + rank, -(2**40), rank % 2]


def _reduce(group: Group) -> list[int]:
    return list(group.all_reduce_min(_vote_of(group.rank, group.size)).wait())


def _reduce_late(folder: str, group: Group) -> list[int]:
    """Rank 0 launches before any other rank; the others launch after it."""
    mark = Path(folder) / "launched"
    if group.rank != 0:
        _wait_for(mark)
    pending = group.all_reduce_min([group.rank])
    if group.rank == 0:
        mark.touch()
    return list(pending.wait())


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name}: rank 0 waits where it must not"
        time.sleep(0.001)


def _reduce_and_look(folder: str, group: Group) -> tuple[bool | None, bool]:
    """Rank 0 looks before the others launch, while one of its threads waits; all look later."""
    mark, before = Path(folder) / "looked", None
    if group.rank != 0:
        _wait_for(mark)
    pending = group.all_reduce_min([group.rank])
    thread = threading.Thread(target=pending.wait)
    if group.rank == 0:
        thread.start()
        before = pending.done()
        mark.touch()
        thread.join(PATIENCE_SECONDS)
    pending.wait()
    return before, pending.done()


def _reduce_and_wait_twice(group: Group) -> tuple[list[int], list[int]]:
    pending = group.all_reduce_min([-group.rank])
    results: list[list[int]] = []
    thread = threading.Thread(target=lambda: results.append(list(pending.wait())))
    thread.start()
    thread.join(PATIENCE_SECONDS)
    return results[0], list(pending.wait())


def _interleave(group: Group) -> tuple[list[Any], list[list[int]]]:
    first = group.all_reduce_min([10 + group.rank])
    ranks = group.all_gather_object(group.rank)
    second = group.all_reduce_min([20 + group.rank])
    group.barrier()
    third = group.all_reduce_min([30 + group.rank])
    buffer = torch.tensor(ranks, dtype=torch.uint8)
    group.broadcast(buffer, group.size - 1)
    return [ranks, buffer.tolist()], [list(p.wait()) for p in (first, second, third)]


def _reduce_and_change(group: Group) -> list[int]:
    values = [7 + group.rank, 8 + group.rank]
    pending = group.all_reduce_min(values)
    values[:] = [-1, -1]
    return list(pending.wait())


def _meet(folder: str, group: Group) -> int:
    seen = 0
    for turn in range(3):
        time.sleep(0.005 * ((group.rank + turn) % group.size))
        (Path(folder) / f"{turn}-{group.rank}").touch()
        group.barrier()
        seen += len(list(Path(folder).glob(f"{turn}-*")))
    return seen


def _meet_at_the_end(group: Group) -> list[bool]:
    return [group.meet(PATIENCE_SECONDS), group.meet(PATIENCE_SECONDS)]


def _meet_without_the_last(folder: str, group: Group) -> bool | None:
    """The last rank runs, but does not come while the others wait."""
    done = [Path(folder) / str(rank) for rank in range(group.size - 1)]
    if group.rank == group.size - 1:
        for mark in done:
            _wait_for(mark)
        return None
    met = group.meet(0.2)
    done[group.rank].touch()
    return met
