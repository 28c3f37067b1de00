"""The core's Group over Horovod's collectives, in CPU memory, with any controller (gloo or MPI)."""

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
"""Time between polls. Horovod's own wait spins and takes the interpreter's lock again and again."""
UNDER_WAY = 8
"""Number of votes that may be in progress at once. Their names are reused: for a known name Horovod
skips the negotiation."""


class _PendingReduce:
    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._outcome: list[int] | hvd.HorovodInternalError | None = None

    def wait(self) -> list[int]:
        """See Pending. Raises HorovodInternalError, at every call, if a rank was lost."""
        with self._lock:
            if self._outcome is None:
                try:
                    self._outcome = [int(v) for v in _finish(self._handle).tolist()]
                except hvd.HorovodInternalError as error:
                    # The training thread must raise it, too, if the copier thread was first.
                    self._outcome = error
            if isinstance(self._outcome, list):
                return self._outcome
            raise self._outcome

    def done(self) -> bool:
        """See Pending."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread is in wait()
        try:
            return self._outcome is not None or bool(hvd.poll(self._handle))
        finally:
            self._lock.release()


def _finish(handle: int, deadline_seconds: float | None = None) -> torch.Tensor:
    """Wait for an operation and return its result. Raises HorovodInternalError if a rank was lost,
    and TimeoutError after the deadline (`time.monotonic()`)."""
    while not hvd.poll(handle):
        if deadline_seconds is not None and time.monotonic() > deadline_seconds:
            raise TimeoutError("the other ranks did not come in time")
        time.sleep(POLL_SECONDS)
    result: torch.Tensor | None = hvd.synchronize(handle)
    if result is None:  # Horovod was shut down and started again in between
        raise hvd.HorovodInternalError("Horovod was shut down during an operation")
    return result


class HorovodGroup:
    """The ranks of a process set (default: all).

    Horovod matches operations by name, so ours never match gradients, a script's own operations, or
    those of another group on the same ranks, in any order. Creating one is collective.
    """

    _numbers = 0
    """The largest number of a group in this process."""

    def __init__(self, process_set: Any = hvd.global_process_set) -> None:
        self.rank: int = process_set.rank()
        self.size: int = process_set.size()
        self._set = process_set
        self._name = "tierckpt"  # only to agree on a number
        self._name = f"tierckpt.{self._new_number()}"
        self._ranks = list(process_set.ranks or range(self.size))
        self._votes: list[_PendingReduce | None] = [None] * UNDER_WAY
        self._launched = 0
        """Number of votes so far."""

    def _new_number(self) -> int:
        """Agree on a number that no rank has given to a group yet; ranks that joined an elastic
        job later have made fewer groups. Collective."""
        next_number = torch.tensor([HorovodGroup._numbers + 1], device="cpu")
        HorovodGroup._numbers = int(_finish(self._all_reduce(next_number, hvd.Max, "number")))
        return HorovodGroup._numbers

    def _all_reduce(self, values: torch.Tensor, op: Any, name: str) -> int:
        """Launch an allreduce; returns Horovod's handle."""
        handle: int = hvd.allreduce_async(
            values, op=op, name=f"{self._name}.{name}", process_set=self._set
        )
        return handle

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Group."""
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([packed.numel()], dtype=torch.int64, device="cpu")
        sizes = self._all_gather(size, "sizes").tolist()
        gathered = self._all_gather(packed, "objects")
        return [pickle.loads(part.numpy().tobytes()) for part in gathered.split(sizes)]

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
            before.wait()  # complete already; Horovod refuses two operations of one name at a time
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
    """A HorovodGroup of the set if it has several ranks, else a SingleGroup."""
    return HorovodGroup(process_set) if process_set.size() > 1 else SingleGroup()
