"""A device that copies as late as it may, on the host, for `DeviceCopies`: an order that a program
forgets is seen in the copied bytes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from tierckpt.snapshot import DeviceCopies, Library

COPY = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)
BY_ADDRESS = 4


class Compute:
    """The stream of the training: its work is done when it is enqueued, as on a CPU."""

    cuda_stream = 1
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waited_for = 0
        """Number of works of `Side` that are done before what comes next."""

    def enqueue(self, work: Callable[[], object]) -> None:
        work()

    def wait_event(self, event: LateEvent) -> None:
        event.synchronize()
        self.waited_for = max(self.waited_for, event.count)


class Side:
    """The stream of the copies: its work is done when a thread waits for it."""

    cuda_stream = 2
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: list[Callable[[], object]] = []
        self.enqueued = self._done = 0

    def enqueue(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._work.append(work)
            self.enqueued += 1

    def wait_event(self, event: object) -> None:
        """The work of `Compute` is done."""

    def synchronize(self, count: int | None = None) -> None:
        """Do the work up to the number `count`."""
        with self._lock:
            while self._work and (count is None or self._done < count):
                self._work.pop(0)()
                self._done += 1


class LateEvent:
    def __init__(self, blocking: bool = False) -> None:
        self._stream, self.count = None, 0

    def record(self, stream: Any) -> None:
        self._stream, self.count = stream, getattr(stream, "enqueued", 0)

    def synchronize(self) -> None:
        if isinstance(self._stream, Side):
            self._stream.synchronize(self.count)


class LateDevice:
    """Takes the place of CUDA. Like CUDA it refuses a copy that spans two allocations."""

    def __init__(self, library: Library) -> None:
        self.compute, self.side = Compute(), Side()
        self.sizes: list[int] = []
        """Of the copies, in bytes."""
        self.allocations: list[tuple[int, int]] = []
        """Start and end of each; if empty, all memory is one."""
        self.error = 0
        """Answer to the next copies."""
        self._function = COPY(self._copy)
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        assert address is not None
        self.copies = DeviceCopies(library, address)

    def _copy(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        assert kind == BY_ADDRESS
        self.sizes.append(nbytes)
        known = self.allocations
        if known and not any(low <= source and source + nbytes <= high for low, high in known):
            return 1
        if not self.error:
            streams = {each.cuda_stream: each for each in (self.compute, self.side)}
            streams[stream].enqueue(lambda: ctypes.memmove(to, source, nbytes))
        return self.error
