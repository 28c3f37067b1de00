"""What the same bytes cost with nothing around them: copies, hash, bare O_DIRECT write.

One thread, one buffer, no format. Nothing that moves these bytes can be faster, so our own
figures are given as a fraction of these.
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
ALIGNMENT_BYTES = 4096  # what O_DIRECT wants of address, offset and length


@dataclass(frozen=True)
class Cost:
    """One piece of work: wall seconds, CPU seconds of this thread."""

    wall_s: float
    cpu_s: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


def timed(work: Callable[[], object]) -> Cost:
    """Run `work` once."""
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return Cost(time.perf_counter() - wall, time.thread_time() - cpu)


@contextmanager
def direct_file(path: Path, flags: int = os.O_WRONLY | os.O_CREAT) -> Iterator[int]:
    """A descriptor that passes the page cache by, or uses it where O_DIRECT is refused."""
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

    work()  # the first one pays for what the driver puts off
    return timed(work)


class Limits:
    """Buffers of `nbytes` (rounded up to whole pages) and the loops over them.

    Args:
        nbytes: of the whole state.
        directory: on the disk to write to.
        device: type of device that the state is on, `cpu` or `cuda`.
        ranks: over how many the state is dealt.
    """

    def __init__(self, nbytes: int, directory: Path, device: str = "cpu", ranks: int = 1) -> None:
        self.device, self.ranks = device, ranks
        self.nbytes = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.path = directory / "bare"
        # Anonymous shared mappings, as a slot is one; touched now, so that no page fault is
        # measured.
        self._source = mmap.mmap(-1, self.nbytes)
        self._target = mmap.mmap(-1, self.nbytes)
        noise = np.random.default_rng(0).integers(0, 256, self.nbytes, dtype=np.uint8)
        np.copyto(np.frombuffer(self._source, np.uint8), noise)
        self.copy()
        self.write_new()

    def copy(self) -> Cost:
        source = np.frombuffer(self._source, np.uint8)
        target = np.frombuffer(self._target, np.uint8)
        return timed(lambda: np.copyto(target, source))

    def copy_pinned(self) -> Cost | None:
        """One rank's shard from the GPU to page-locked memory, in one copy; None without a GPU.

        The device's memory is given back: the teams may need all of it.
        """
        if self.device != "cuda":
            return None
        cost = _timed_pinned_copy(-(-self.nbytes // self.ranks))
        torch.cuda.empty_cache()
        return cost

    def checksum(self) -> Cost | None:
        """xxh3_128 over everything, or None without xxhash."""
        try:
            import xxhash
        except ImportError:
            return None
        return timed(lambda: xxhash.xxh3_128(self._source).digest())

    def write_new(self) -> Cost:
        """Write and fsync a file that did not exist."""
        self.path.unlink(missing_ok=True)
        return timed(self._write)

    def write_recycled(self) -> Cost:
        """Write and fsync over a file of the same length: no block has to be found."""
        return timed(self._write)

    def _write(self) -> None:
        with direct_file(self.path) as descriptor, memoryview(self._source) as view:
            offset = 0
            while offset < self.nbytes:
                offset += os.pwrite(descriptor, view[offset : offset + CHUNK_BYTES], offset)
            os.fsync(descriptor)

    def once(self) -> dict[str, Cost]:
        """One sample of everything, the recycled write last."""
        samples = {
            "copy": self.copy(),
            "copy_pinned": self.copy_pinned(),
            "checksum": self.checksum(),
            "write_new": self.write_new(),
            "write_recycled": self.write_recycled(),
        }
        return {name: cost for name, cost in samples.items() if cost is not None}
