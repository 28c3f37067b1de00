"""Device copies: the copy engine enqueues the copies of many blocks in one call, and hashes them.

Each copy is a `cudaMemcpyAsync` of the CUDA runtime that torch has loaded, called by its address.
Python would hold the GIL for milliseconds to enqueue the thousands of blocks of a large model, and
the training thread would wait for it.

Blocks with many small tensors are not for this: a copy takes the device 2 microseconds, so torch
gathers them by one kernel first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from tierckpt.format.manifest import DIGEST_BYTES
from tierckpt.state import tree_codec

from .copy_engine import Engine, find
from .copy_plan import CopyPlan

LEAST_SEGMENT_BYTES = 32 * 1024
"""Blocks whose tensors are smaller, on average, are gathered first."""
MOST_COPY_BYTES = 64 * 1024 * 1024
"""Limit of a single copy."""
CLONE_ALIGNMENT_BYTES = 512
"""As of torch's own allocations: copies on the device are fast."""


class DeviceCopyError(Exception):
    """CUDA refused a copy."""


@dataclass
class Sources:
    """Addresses of a plan's blocks. Right for as long as the plan fits."""

    segments: np.ndarray
    blocks: np.ndarray
    """Both as in `copy_engine.Table`."""
    owners: np.ndarray
    """For each segment, the number of its tensor, uint32: CUDA refuses a copy that spans two."""
    direct: list[bool]
    """For each block, True if the engine copies it."""

    @classmethod
    def of(cls, plan: CopyPlan) -> Sources:
        """Those of the live tensors."""
        owners = [part[0] for block in plan.layout.blocks for part in block.parts]
        return cls(*plan.addresses(), np.array(owners, np.uint32), _direct(plan))

    def split(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """The blocks that the engine copies, and the others."""
        direct = self.direct
        own = [b for b in blocks if direct[b]]
        return own, [] if len(own) == len(blocks) else [b for b in blocks if not direct[b]]


def _direct(plan: CopyPlan) -> list[bool]:
    pieces = [t.is_cuda and tree_codec.is_dense(t) for t in plan.sources]
    return [
        all(pieces[part[0]] for part in block.parts)
        and block.nbytes >= min(LEAST_SEGMENT_BYTES, block.nbytes) * len(block.parts)
        for block in plan.layout.blocks
    ]


class DeviceCopies:
    """The engine's functions for a device. Any thread; its current device must be the one of the
    stream. The caller keeps the memory until a copy is complete."""

    def __init__(self, engine: Engine, copy_address: int) -> None:
        self._engine, self._copy = engine, copy_address

    def enqueue(
        self, sources: Sources, blocks: Sequence[int], target: int, stream: torch.cuda.Stream
    ) -> None:
        """Enqueue copies of blocks to a slot. `target`: the address of its offset 0. Raises
        DeviceCopyError."""
        numbers = np.array(blocks, np.uint32)
        self._enqueue(sources, sources.blocks, numbers, target, stream)

    def clone(
        self, sources: Sources, blocks: Sequence[int], stream: torch.cuda.Stream
    ) -> tuple[torch.Tensor, Sources]:
        """Enqueue copies of blocks within the device; returns their memory, and sources that read
        these blocks from it. Raises DeviceCopyError, torch.cuda.OutOfMemoryError."""
        rows = sources.blocks[list(blocks)]
        unit = np.uint64(CLONE_ALIGNMENT_BYTES)
        ends = np.cumsum((rows[:, 3] + unit - np.uint64(1)) // unit * unit, dtype=np.uint64)
        memory = torch.empty(int(ends[-1]), dtype=torch.uint8, device=stream.device)
        rows[:, 2] = np.concatenate([np.zeros(1, np.uint64), ends[:-1]])
        numbers = np.arange(len(rows), dtype=np.uint32)
        self._enqueue(sources, rows, numbers, memory.data_ptr(), stream)
        return memory, _cloned(sources, blocks, rows, memory.data_ptr())

    def hash(self, sources: Sources, blocks: Sequence[int], target: int) -> list[bytes]:
        """Digests of blocks that have arrived."""
        numbers = np.array(blocks, np.uint32)
        found = ctypes.create_string_buffer(len(numbers) * DIGEST_BYTES)
        self._engine.hash_blocks(
            self._engine.hash_address,
            sources.blocks.ctypes.data,
            numbers.ctypes.data,
            len(numbers),
            target,
            ctypes.addressof(found),
        )
        raw = found.raw
        return [raw[i : i + DIGEST_BYTES] for i in range(0, len(raw), DIGEST_BYTES)]

    def _enqueue(
        self,
        sources: Sources,
        blocks: np.ndarray,
        numbers: np.ndarray,
        target: int,
        stream: torch.cuda.Stream,
    ) -> None:
        code = self._engine.enqueue(
            self._copy,
            stream.cuda_stream,
            sources.segments.ctypes.data,
            sources.owners.ctypes.data,
            blocks.ctypes.data,
            numbers.ctypes.data,
            len(numbers),
            target,
            MOST_COPY_BYTES,
        )
        if code:
            forget_error(stream.device)
            raise DeviceCopyError(f"CUDA refused the copy of a block (error {code})")


def _cloned(sources: Sources, blocks: Sequence[int], rows: np.ndarray, address: int) -> Sources:
    """Sources whose blocks are in a clone: one segment each, with the blocks' numbers."""
    count = len(sources.blocks)
    segments = np.zeros((count, 2), np.uint64)
    segments[list(blocks), 0] = rows[:, 2] + np.uint64(address)
    segments[:, 1] = sources.blocks[:, 3]
    cloned = sources.blocks.copy()
    cloned[:, 0], cloned[:, 1] = np.arange(count, dtype=np.uint64), 1
    return Sources(segments, cloned, np.zeros(count, np.uint32), sources.direct)


def forget_error(device: torch.device) -> None:
    """Clear the thread's last CUDA error, which its next kernel would report as its own."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


@cache
def device_copies(device: torch.device) -> DeviceCopies | None:
    """The engine with the CUDA runtime of torch; None if either is missing, or does not copy right.
    Then torch copies, with more time of the CPU."""
    engine, address = find(), _copy_address()
    if engine is None or address is None:
        return None
    copies = DeviceCopies(engine, address)
    return copies if _copies_right(copies, device) else None


def _copy_address() -> int | None:
    """Address of `cudaMemcpyAsync`, if torch has loaded the runtime as a library."""
    version = torch.version.cuda
    if version is None:
        return None
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}", os.RTLD_NOLOAD)
        return ctypes.cast(runtime.cudaMemcpyAsync, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _copies_right(copies: DeviceCopies, device: torch.device) -> bool:
    """Copy in the ways that snapshots use, behind work of the device, and compare: two tensors of
    odd sizes, one from its own memory and one from a clone, which are then overwritten."""
    compute, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    sizes = (1_000_003, 77_777)
    live = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    target = torch.zeros(sum(sizes), dtype=torch.uint8).pin_memory()
    segments = [(t.data_ptr(), t.numel()) for t in live]
    rows = [(0, 1, 0, sizes[0]), (1, 1, sizes[0], sizes[1])]
    sources = Sources(
        np.array(segments, np.uint64),
        np.array(rows, np.uint64),
        np.arange(2, dtype=np.uint32),
        [True, True],
    )
    expected = torch.arange(sum(sizes), device=device).remainder_(251).to(torch.uint8)
    for tensor, part in zip(live, expected.split(sizes), strict=True):
        tensor.copy_(part)
    try:
        side.wait_stream(compute)
        copies.enqueue(sources, [0], target.data_ptr(), side)
        memory, clone = copies.clone(sources, [1], compute)
        side.wait_stream(compute)
        compute.wait_stream(side)
        for tensor in live:
            tensor.zero_()
        copies.enqueue(clone, [1], target.data_ptr(), side)
    except DeviceCopyError:
        return False
    side.synchronize()
    del memory  # kept until here
    return torch.equal(target, expected.cpu())


__all__ = [
    "MOST_COPY_BYTES",
    "DeviceCopies",
    "DeviceCopyError",
    "Sources",
    "device_copies",
    "forget_error",
]
