"""Bare limits for the same bytes: copy, hash, O_DIRECT write.

One thread, one buffer, no format. No method can move these bytes faster, so the figures of
Tierckpt are given as fractions of these.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

CHUNK_BYTES = 8 << 20  # one write call; larger ones gain nothing on NVMe or virtio
ALIGNMENT_BYTES = 4096  # O_DIRECT requires it of address, offset and length


@dataclass(frozen=True)
class Cost:
    """The cost of a piece of work: wall seconds, and CPU seconds of this thread."""

    wall_s: float
    cpu_s: float


def timed(work: Callable[[], object]) -> Cost:
    """Run `work` once and time it."""
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return Cost(time.perf_counter() - wall, time.thread_time() - cpu)


@contextmanager
def direct_file(path: Path, flags: int = os.O_WRONLY | os.O_CREAT) -> Iterator[int]:
    """Open a file without the page cache, or with it if O_DIRECT is refused."""
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _timed_pinned_copy(nbytes: int) -> Cost:
    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def work() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    work()  # the first copy includes deferred work of the driver
    return timed(work)


class Limits:
    """Buffers of `nbytes` (rounded up to whole pages) and the loops over them.

    Args:
        nbytes: size of the whole state.
        directory: a folder on the measured disk.
        device: the type of device that holds the state, `cpu` or `cuda`.
        ranks: the number of ranks that share the state.
    """

    def __init__(self, nbytes: int, directory: Path, device: str = "cpu", ranks: int = 1) -> None:
        self.device, self.ranks = device, ranks
        self.nbytes = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.path = directory / "bare"
        # Anonymous shared mappings, like slots. Touched now, so that no page fault is measured.
        self._source = mmap.mmap(-1, self.nbytes)
        self._target = mmap.mmap(-1, self.nbytes)
        noise = np.random.default_rng(0).integers(0, 256, self.nbytes, dtype=np.uint8)
        np.copyto(np.frombuffer(self._source, np.uint8), noise)
        self.copy()
        self.write_recycled()

    def copy(self) -> Cost:
        source = np.frombuffer(self._source, np.uint8)
        target = np.frombuffer(self._target, np.uint8)
        return timed(lambda: np.copyto(target, source))

    def copy_pinned(self) -> Cost | None:
        """Copy one rank's shard from the GPU to page-locked memory; None without a GPU.

        The memory of the device is freed afterwards: the teams may need all of it.
        """
        if self.device != "cuda":
            return None
        cost = _timed_pinned_copy(-(-self.nbytes // self.ranks))
        torch.cuda.empty_cache()
        return cost

    def checksum(self) -> Cost | None:
        """Hash all bytes with xxh3_128; None without xxhash."""
        try:
            import xxhash
        except ImportError:
            return None
        return timed(lambda: xxhash.xxh3_128(self._source).digest())

    def write_recycled(self) -> Cost:
        """Write and fsync over a file of the same length: no block is allocated."""
        return timed(self._write)

    def _write(self) -> None:
        with direct_file(self.path) as descriptor, memoryview(self._source) as view:
            offset = 0
            while offset < self.nbytes:
                offset += os.pwrite(descriptor, view[offset : offset + CHUNK_BYTES], offset)
            os.fsync(descriptor)

    def once(self) -> dict[str, Cost]:
        """Take one sample of each limit."""
        samples = {
            "copy": self.copy(),
            "copy_pinned": self.copy_pinned(),
            "checksum": self.checksum(),
            "write_recycled": self.write_recycled(),
        }
        return {name: cost for name, cost in samples.items() if cost is not None}
