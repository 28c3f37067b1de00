"""The core's Group over mpi4py, for jobs started by mpirun, with or without Horovod."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ConfigError

if TYPE_CHECKING:
    import torch

try:
    from mpi4py import MPI
except ImportError as error:
    raise ImportError(
        f"tierckpt.mpi needs mpi4py, and importing it failed: {error}. "
        "Install an MPI library, then `pip install tierckpt[mpi]`"
    ) from error

POLL_SECONDS = 2e-4
"""Pause between two tests of a request; MPI's own wait spins."""


class _PendingReduce:
    def __init__(self, request: Any, sent: Any, received: Any) -> None:
        self._request = request
        self._buffers = (sent, received)  # MPI uses them until the request is complete
        self._lock = threading.Lock()

    def wait(self) -> list[int]:
        """As in Pending."""
        with self._lock:
            _finish(self._request)
            return [int(v) for v in self._buffers[1]]

    def done(self) -> bool:
        """As in Pending."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            return bool(self._request.Test())
        finally:
            self._lock.release()


def _finish(request: Any, deadline_seconds: float | None = None) -> bool:
    """Wait for a request; returns False if the deadline has passed."""
    while not request.Test():
        if deadline_seconds is not None and time.monotonic() > deadline_seconds:
            return False
        time.sleep(POLL_SECONDS)
    return True


class MPIGroup:
    """The ranks of a communicator (default: COMM_WORLD), on a duplicate of it.

    The constructor is collective. It raises ConfigError if MPI was started without support for
    threads, and on a rank in no communicator (COMM_NULL).
    """

    def __init__(self, communicator: Any = None) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ConfigError(
                "MPI was initialised without MPI_THREAD_MULTIPLE, which the copier thread needs; "
                "let mpi4py initialise it (import mpi4py.MPI first)"
            )
        if communicator is None:
            communicator = MPI.COMM_WORLD
        if communicator == MPI.COMM_NULL:
            raise ConfigError(
                "the communicator is MPI.COMM_NULL: it was made without this rank (for example by "
                "Split with MPI.UNDEFINED). Make the MPIGroup only on its ranks"
            )
        self._comm = communicator.Dup()
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    def all_gather_object(self, value: Any) -> list[Any]:
        """As in Group."""
        return list(self._comm.allgather(value))

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """As in Group."""
        self._comm.Bcast([np.asarray(buffer), MPI.BYTE], root=source)

    def all_reduce_min(self, values: list[int]) -> _PendingReduce:
        """As in Group."""
        sent = np.array(values, dtype=np.int64)
        received = np.empty_like(sent)
        request = self._comm.Iallreduce(sent, received, op=MPI.MIN)
        return _PendingReduce(request, sent, received)

    def barrier(self) -> None:
        """As in Group."""
        self._comm.Barrier()

    def meet(self, timeout_seconds: float) -> bool:
        """As in Group."""
        if MPI.Is_finalized():
            return False
        return _finish(self._comm.Ibarrier(), time.monotonic() + timeout_seconds)

    def close(self) -> None:
        """As in Group."""
        # Not freed: freeing is collective, and other ranks may have ended.
