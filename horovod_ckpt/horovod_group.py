"""The core's Group over Horovod's own collectives, on CPU memory, by whatever it runs on."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import horovod.torch as hvd
import torch

from tierckpt import SingleGroup
from tierckpt.group import Group

POLL_SECONDS = 2e-4
"""Horovod's own wait spins and keeps taking the interpreter's lock; ours sleeps in between."""
UNDER_WAY = 8
"""So many votes may be under way at once. Few names, used again and again: Horovod then knows the
reduction and skips its negotiation."""


class _PendingReduce:
    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._outcome: list[int] | hvd.HorovodInternalError | None = None

    def wait(self) -> list[int]:
        """See Pending. Raises HorovodInternalError, every time, when a rank is gone."""
        with self._lock:
            if self._outcome is None:
                try:
                    self._outcome = [int(v) for v in _finish(self._handle).tolist()]
                except hvd.HorovodInternalError as error:
                    # Elastic Horovod must get to see it, also when the copier thread asked first.
                    self._outcome = error
            if isinstance(self._outcome, list):
                return self._outcome
            raise self._outcome

    def done(self) -> bool:
        """See Pending."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            return self._outcome is not None or bool(hvd.poll(self._handle))
        finally:
            self._lock.release()


def _finish(handle: int, deadline_seconds: float | None = None) -> torch.Tensor:
    """The result of an operation, waiting for it; HorovodInternalError when a rank is gone."""
    while not hvd.poll(handle):
        if deadline_seconds is not None and time.monotonic() > deadline_seconds:
            raise TimeoutError("the other ranks did not come in time")
        time.sleep(POLL_SECONDS)
    result: torch.Tensor | None = hvd.synchronize(handle)
    if result is None:  # Horovod was shut down and started again since
        raise hvd.HorovodInternalError("an operation of a Horovod that was shut down")
    return result


class HorovodGroup:
    """The ranks of a process set (default: all).

    Horovod matches operations by name, so ours cannot be taken for gradients, for a script's own,
    or for those of another group on the same ranks, whatever the order. Creating one is collective.
    """

    _numbers = 0
    """The largest that a group on this process has had."""

    def __init__(self, process_set: Any = hvd.global_process_set) -> None:
        self.rank: int = process_set.rank()
        self.size: int = process_set.size()
        self._set = process_set
        self._name = "tierckpt"  # to agree on a number; from then on with it
        self._name = f"tierckpt.{self._new_number()}"
        self._ranks = list(process_set.ranks or range(self.size))
        self._votes: list[_PendingReduce | None] = [None] * UNDER_WAY
        self._launched = 0
        """Votes so far."""

    def _new_number(self) -> int:
        """One that no rank has given to a group yet, the same on all: ranks that joined an elastic
        job later have counted fewer. Collective."""
        mine = torch.tensor([HorovodGroup._numbers + 1], device="cpu")
        HorovodGroup._numbers = int(_finish(self._all_reduce(mine, hvd.Max, "number")))
        return HorovodGroup._numbers

    def _all_reduce(self, values: torch.Tensor, op: Any, name: str) -> int:
        """Launch it; returns Horovod's handle."""
        handle: int = hvd.allreduce_async(
            values, op=op, name=f"{self._name}.{name}", process_set=self._set
        )
        return handle

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Group."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([mine.numel()], dtype=torch.int64, device="cpu")
        sizes = self._all_gather(size, "sizes").tolist()
        everyone = self._all_gather(mine, "objects")
        return [pickle.loads(part.numpy().tobytes()) for part in everyone.split(sizes)]

    def _all_gather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        name = f"{self._name}.{name}"
        return _finish(hvd.allgather_async(tensor, name=name, process_set=self._set))

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """See Group."""
        root = self._ranks[source]
        name = f"{self._name}.broadcast.{root}"
        _finish(hvd.broadcast_async_(buffer, root, name=name, process_set=self._set))

    def all_reduce_min(self, values: list[int]) -> _PendingReduce:
        """See Group."""
        turn = self._launched % UNDER_WAY
        self._launched += 1
        before = self._votes[turn]
        if before is not None:
            before.wait()  # long done; Horovod refuses two of one name at a time
        vote = torch.tensor(values, dtype=torch.int64, device="cpu")
        handle = self._all_reduce(vote, hvd.Min, f"vote.{turn}")
        pending = self._votes[turn] = _PendingReduce(handle)
        return pending

    def barrier(self) -> None:
        """See Group."""
        hvd.barrier(self._set)

    def meet(self, timeout_seconds: float) -> bool:
        """See Group."""
        if not hvd.is_initialized():
            return False
        here = torch.zeros(1, dtype=torch.int64, device="cpu")
        try:
            handle = self._all_reduce(here, hvd.Min, "meet")
            _finish(handle, time.monotonic() + timeout_seconds)
        except (TimeoutError, ValueError, hvd.HorovodInternalError):
            return False
        return True

    def close(self) -> None:
        """See Group."""


def current_group(process_set: Any = hvd.global_process_set) -> Group:
    """A HorovodGroup of the set if its ranks are several, else a SingleGroup."""
    return HorovodGroup(process_set) if process_set.size() > 1 else SingleGroup()
