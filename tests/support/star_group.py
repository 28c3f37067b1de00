"""Ranks as forked processes, which meet at their parent: hundreds on one machine, without gloo.

gloo connects every rank to every other and passes messages around a ring; both take a machine with
few cores too long. The children inherit all modules, so each takes a few megabytes.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pickle
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_HEAD = struct.Struct("<q")
_RESULT = "result"
PATIENCE_SECONDS = 120.0


class RanksGoneError(RuntimeError):
    """A rank has ended, so a collective cannot complete."""


class _Reduction:
    """A minimum under way; its answer comes in the order of the rank's calls."""

    def __init__(self, group: StarGroup, number: int) -> None:
        self._group, self._number = group, number

    def wait(self) -> list[int]:
        return [*map(min, *map(tuple, theirs))] if (theirs := self._theirs())[1:] else theirs[0]

    def _theirs(self) -> list[list[int]]:
        found: list[list[int]] = self._group._answer(self._number)
        return found

    def done(self) -> bool:
        return self._group._has_answer(self._number)


class StarGroup:
    """The Group of one rank. Any thread may wait for a reduction."""

    def __init__(self, rank: int, size: int, end: socket.socket) -> None:
        self.rank, self.size, self._end = rank, size, end
        self._calls = self._heard = 0
        self._answers: dict[int, Any] = {}
        self._lock = threading.Lock()

    def _call(self, kind: str, value: Any) -> int:
        _send(self._end, (kind, value))
        self._calls += 1
        return self._calls

    def _answer(self, number: int) -> Any:
        with self._lock:
            while self._heard < number:
                self._receive()
            found = self._answers[number]
        if isinstance(found, RanksGoneError):
            raise found
        return found

    def _receive(self) -> None:
        kind, answer = _receive(self._end)
        self._heard += 1
        for old in [n for n in self._answers if n < self._heard - 16]:
            del self._answers[old]
        lost = kind == "gone"
        self._answers[self._heard] = RanksGoneError(answer) if lost else answer

    def _has_answer(self, number: int) -> bool:
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while self._heard < number and multiprocessing.connection.wait([self._end], 0):
                self._receive()
            return self._heard >= number
        finally:
            self._lock.release()

    def all_gather_object(self, value: Any) -> list[Any]:
        packed = self._answer(self._call("gather", pickle.dumps(value)))
        return [pickle.loads(each) for each in packed]

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        sent = buffer.numpy().tobytes() if source == self.rank else b""
        theirs = self._answer(self._call("broadcast", sent))[source]
        if source != self.rank:
            buffer.copy_(torch.frombuffer(bytearray(theirs), dtype=torch.uint8))

    def all_reduce_min(self, values: list[int]) -> _Reduction:
        return _Reduction(self, self._call("min", values))

    def barrier(self) -> None:
        self._answer(self._call("barrier", None))

    def meet(self, timeout_seconds: float) -> bool:
        try:
            self.barrier()
        except RanksGoneError:
            return False
        return True

    def close(self) -> None:
        """Do nothing: the socket lasts as long as the process."""


@dataclass
class Ended:
    """The end of a rank's process."""

    value: Any
    """The program's result."""
    signal: int = 0
    """The signal that killed it."""


def run_star(
    size: int,
    program: Callable[..., Any],
    *args: Any,
) -> list[Ended]:
    """Return the results of `program(group, *args)` on each rank. Raises RuntimeError with the
    traceback of a rank that failed, and TimeoutError; no process is left."""
    ends = [socket.socketpair() for _ in range(size)]
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            _become_rank(rank, ends, program, args)
        pids.append(pid)
    for _, theirs in ends:
        theirs.close()
    try:
        return _serve([ours for ours, _ in ends], pids, time.monotonic() + PATIENCE_SECONDS)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # not waited for yet: the number is still its own
            os.waitpid(pid, 0)
        for ours, _ in ends:
            ours.close()


def _become_rank(
    rank: int,
    ends: Sequence[tuple[socket.socket, socket.socket]],
    program: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    try:
        for other, (ours, theirs) in enumerate(ends):
            ours.close()
            if other != rank:
                theirs.close()
        torch.set_num_threads(1)
        end = ends[rank][1]
        result = program(StarGroup(rank, len(ends), end), *args)
        _send(end, (_RESULT, result))
    except BaseException:
        _send(ends[rank][1], ("failed", f"rank {rank}: {traceback.format_exc()}"))
    finally:
        signal.pause()  # until the parent ends it: agents take the end of a process for a failure


def _serve(ends: Sequence[socket.socket], pids: Sequence[int], deadline: float) -> list[Ended]:
    """Answer calls until every rank has a result or is dead."""
    found: dict[int, Ended] = {}
    calls: list[list[tuple[str, Any]]] = [[] for _ in ends]
    rank_of = {end: rank for rank, end in enumerate(ends)}
    alive = set(ends)
    while len(found) < len(ends):
        if time.monotonic() > deadline:
            missing = [rank for rank in range(len(ends)) if rank not in found]
            raise TimeoutError(f"ranks {missing} have not ended; calls {calls[missing[0]]}")
        for end in multiprocessing.connection.wait(list(alive), 1.0):
            assert isinstance(end, socket.socket)
            rank = rank_of[end]
            try:
                kind, value = _receive(end)
            except EOFError:
                alive.discard(end)
                status = os.waitid(os.P_PID, pids[rank], os.WEXITED | os.WNOWAIT)
                found.setdefault(rank, Ended(None, status.si_status if status else 0))
                continue
            if kind == "failed":
                raise RuntimeError(value)
            if kind == _RESULT:
                found[rank] = Ended(value)
            else:
                calls[rank].append((kind, value))
        _answer_all(ends, calls, alive, found)
    return [found[rank] for rank in range(len(ends))]


def _answer_all(
    ends: Sequence[socket.socket],
    calls: Sequence[list[tuple[str, Any]]],
    alive: set[socket.socket],
    found: dict[int, Ended],
) -> None:
    while all(calls):
        kinds = {theirs[0][0] for theirs in calls}
        assert len(kinds) == 1, f"ranks call {kinds} at once"
        values = [theirs.pop(0)[1] for theirs in calls]
        for end in ends:
            if end in alive:
                _send(end, ("answer", values))
    if found and any(calls):  # a rank that has ended calls nothing more
        gone = [rank for rank in found if not calls[rank]]
        for rank, theirs in enumerate(calls):
            while theirs and gone and ends[rank] in alive:
                theirs.pop(0)
                _send(ends[rank], ("gone", f"rank {gone[0]} has ended"))


def _send(end: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    with contextlib.suppress(BrokenPipeError):  # its end is seen when it is read
        end.sendall(_HEAD.pack(len(data)) + data)


def _receive(end: socket.socket) -> Any:
    (size,) = _HEAD.unpack(_exactly(end, _HEAD.size))
    return pickle.loads(_exactly(end, size))


def _exactly(end: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            more = end.recv(size - len(data))
        except ConnectionResetError:
            more = b""
        if not more:
            raise EOFError
        data += more
    return bytes(data)
