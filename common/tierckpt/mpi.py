"""The core's Group over mpi4py, for jobs that mpirun starts, with Horovod or without."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import torch

from .errors import ConfigError

try:
    from mpi4py import MPI
except ImportError as error:
    raise ImportError(
        f"tierckpt.mpi needs mpi4py, and importing it failed: {error}. "
        "Install an MPI library, then `pip install tierckpt[mpi]`"
    ) from error

POLL_SECONDS = 2e-4
"""MPI's own wait spins; ours sleeps in between."""


class _PendingReduce:
    def __init__(self, request: Any, sent: Any, received: Any) -> None:
        self._request = request
        self._buffers = (sent, received)  # MPI's until the request is complete
        self._lock = threading.Lock()

    def wait(self) -> list[int]:
        """See Pending."""
        with self._lock:
            _finish(self._request)
            return [int(v) for v in self._buffers[1]]

    def done(self) -> bool:
        """See Pending."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            return bool(self._request.Test())
        finally:
            self._lock.release()


def _finish(request: Any, deadline_seconds: float | None = None) -> bool:
    """Wait for a request; False when the deadline passed."""
    while not request.Test():
        if deadline_seconds is not None and time.monotonic() > deadline_seconds:
            return False
        time.sleep(POLL_SECONDS)
    return True


class MPIGroup:
    """The ranks of a communicator (default: COMM_WORLD), on a duplicate of it.

    Creating one is collective. Raises ConfigError when MPI was started without support for threads,
    and on a rank that is in no communicator (COMM_NULL).
    """

    def __init__(self, communicator: Any = None) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ConfigError(
                "MPI was initialised without MPI_THREAD_MULTIPLE, which the copying thread needs; "
                "let mpi4py initialise it (import mpi4py.MPI first)"
            )
        if communicator is None:
            communicator = MPI.COMM_WORLD
        if communicator == MPI.COMM_NULL:
            raise ConfigError(
                "the communicator is MPI.COMM_NULL: this rank was left out when it was made "
                "(Split with MPI.UNDEFINED, say). Make the MPIGroup on the ranks that are in it"
            )
        self._comm = communicator.Dup()
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Group."""
        return list(self._comm.allgather(value))

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """See Group."""
        self._comm.Bcast([buffer.numpy(), MPI.BYTE], root=source)

    def all_reduce_min(self, values: list[int]) -> _PendingReduce:
        """See Group."""
        sent = np.array(values, dtype=np.int64)
        received = np.empty_like(sent)
        request = self._comm.Iallreduce(sent, received, op=MPI.MIN)
        return _PendingReduce(request, sent, received)

    def barrier(self) -> None:
        """See Group."""
        self._comm.Barrier()

    def meet(self, timeout_seconds: float) -> bool:
        """See Group."""
        if MPI.Is_finalized():
            return False
        return _finish(self._comm.Ibarrier(), time.monotonic() + timeout_seconds)

    def close(self) -> None:
        """See Group."""
        # Not freed: freeing is collective, and the others may be gone.
