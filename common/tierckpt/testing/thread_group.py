"""Ranks as threads of one process: a job of N ranks for tests, without a launcher."""

from __future__ import annotations

import faulthandler
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tierckpt._text import in_words

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
            meeting.abort(f"rank {rank} failed: {in_words(error)}")

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
