"""The engine for a GPU: copies on a side stream, and a barrier that does not block Python.

Differences from the engines for a CPU:

- Slots are page-locked in place (`cudaHostRegister`), so device-to-host copies are real DMA.
- The copier thread feeds copies to a low-priority stream, two batches deep. A few threads hash what
  has arrived, each a batch, while the next ones are copied. The C library enqueues a batch, and
  hashes it, in one call each (`DeviceCopies`). Blocks of small tensors are gathered on the device
  by torch, which does everything where the library is missing. A small number of batches leaves the
  source of the rest open:
- At the barrier, the blocks not yet fed are cloned on the device (terabytes a second) if memory
  allows, and are copied from the clone; otherwise they are fed at once. Then the compute stream
  waits for an event, but the Python thread does not. So the seal comes after the barrier here, and
  a third slot is the default.
- The rank's tree, which no optimizer changes, is copied when there is no other work.

Streams: the copies are ordered after all work that the *current* stream has at the boundary, and
the optimizer's update waits on the stream of its step. So a loop that trains on its own stream
calls `step()` on that stream, or joins it first, as before any use of its tensors. Memory that the
side stream reads is kept until the host has seen the copy complete, so the caching allocator cannot
reuse it earlier.

*Device copies:* each copy is a `cudaMemcpyAsync` of the CUDA runtime that torch has loaded, called
by its address. Python would hold the GIL for milliseconds to enqueue the thousands of blocks of a
large model, and the training thread would wait for it. Blocks with many small tensors are not for
this: a copy takes the device 2 microseconds, so torch gathers them by one kernel first.

The device clone is from CheckFreq; releasing it layer by layer under the allreduce is from
LightCheck.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache

import numpy as np
import torch
from msgspec import Struct

from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.format.manifest import DIGEST_BYTES, digest
from tierckpt.state import tree_codec
from tierckpt.storage.slots import Slot

from .copy_engine import Library, Progress, find
from .copy_plan import Binding, CopyPlan
from .engine import BlockQueue, Engine, SnapshotError

__all__ = [
    "MAX_COPY_BYTES",
    "DeviceCopies",
    "DeviceCopyError",
    "Sources",
    "device_copies",
    "forget_error",
]


MIN_SEGMENT_BYTES = 32 * 1024
"""Blocks with smaller tensors, on average, are gathered first."""
MAX_COPY_BYTES = 64 * 1024 * 1024
"""Limit of a single copy."""
CLONE_ALIGNMENT_BYTES = 512
"""As of torch's own allocations: copies on the device are fast."""


class DeviceCopyError(Exception):
    """CUDA refused a copy."""


class Sources(Struct):
    """Addresses of a plan's blocks. Right for as long as the plan fits."""

    segments: np.ndarray
    blocks: np.ndarray
    """Both as in `copy_engine.Table`."""
    owners: np.ndarray
    """For each segment, the number of its tensor, uint32: CUDA refuses a copy that spans two."""
    direct: list[bool]
    """For each block, True if the library copies it."""

    @classmethod
    def of(cls, plan: CopyPlan) -> Sources:
        """Those of the live tensors."""
        owners = [part[0] for block in plan.layout.blocks for part in block.parts]
        return cls(*plan.addresses(), np.array(owners, np.uint32), _direct(plan))

    def split(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """The blocks that the library copies, and the others."""
        direct = self.direct
        own = [b for b in blocks if direct[b]]
        return own, [] if len(own) == len(blocks) else [b for b in blocks if not direct[b]]


def _direct(plan: CopyPlan) -> list[bool]:
    pieces = [t.is_cuda and tree_codec.is_dense(t) for t in plan.sources]
    return [
        all(pieces[part[0]] for part in block.parts)
        and block.nbytes >= min(MIN_SEGMENT_BYTES, block.nbytes) * len(block.parts)
        for block in plan.layout.blocks
    ]


class DeviceCopies:
    """The library's functions for a device. Any thread; its current device must be the one of the
    stream. The caller keeps the memory until a copy is complete."""

    def __init__(self, library: Library, copy_address: int) -> None:
        self._library, self._copy = library, copy_address

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
        self._library.hash_blocks(
            self._library.hash_address,
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
        code = self._library.enqueue(
            self._copy,
            stream.cuda_stream,
            sources.segments.ctypes.data,
            sources.owners.ctypes.data,
            blocks.ctypes.data,
            numbers.ctypes.data,
            len(numbers),
            target,
            MAX_COPY_BYTES,
        )
        if code:
            forget_error(stream.device)
            raise DeviceCopyError(f"CUDA refused the copy of a block (error {code})")


def _cloned(sources: Sources, blocks: Sequence[int], rows: np.ndarray, address: int) -> Sources:
    """Sources with their blocks in a clone: one segment each, with the blocks' numbers."""
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
    """The library with the CUDA runtime of torch; None if either is missing, or does not copy
    right. Then torch copies, with more time of the CPU."""
    library, address = find(), _copy_address()
    if library is None or address is None:
        return None
    copies = DeviceCopies(library, address)
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


BATCH_BYTES = MAX_COPY_BYTES
"""Limit of one batch for the side stream, and of a single copy."""
BATCHES_IN_FLIGHT = 2
GATHERED_BYTES = 16 * 1024 * 1024
"""Limit of the small tensors that are gathered at once."""
HASHED_ALONE_BYTES = 4 * 1024 * 1024
"""Fewer bytes are hashed by the copier itself: threads would take longer to wake."""
CLONE_FROM_BYTES = 32 * 1024 * 1024
"""Fewer bytes are fed at the barrier, not cloned: the compute stream waits about 1 ms."""
SPARE_DEVICE_FRACTION = 0.05
"""Fraction of the device memory that a clone leaves free."""


class CudaLane:
    """Resources that all snapshots of a process share: the side stream and the hashing threads."""

    def __init__(self, device: torch.device) -> None:
        lowest, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=lowest)
        per_rank = (os.cpu_count() or 1) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.workers = max(1, min(8, per_rank // 2))
        self.hashers = ThreadPoolExecutor(self.workers, thread_name_prefix="tierckpt-hash")
        self._peak_bytes = self._cloned_bytes = 0
        """Peak of the training's own allocations, and the largest clone in addition to it."""
        self.copies = device_copies(device)
        self._sources: tuple[CopyPlan, Sources] | None = None

    def sources_of(self, plan: CopyPlan) -> Sources | None:
        """The addresses of the plan, for `copies`; None without these."""
        if self.copies is None:
            return None
        if self._sources is None or self._sources[0] is not plan:
            self._sources = plan, Sources.of(plan)
        return self._sources[1]

    def use(self) -> None:
        """Make this the calling thread's device.

        A new thread uses the first device. Every use of a stream would switch back to that one, and
        so create a context of some 400 MiB on the first GPU for every rank of the machine.
        """
        torch.cuda.set_device(self.device)

    @contextlib.contextmanager
    def after(self, event: torch.cuda.Event) -> Iterator[None]:
        """Run the work enqueued inside on the side stream, after `event`."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(event)
            yield

    def has_room(self, nbytes: int) -> bool:
        """True when a clone of this size fits in addition to the training's peak memory.

        Memory free at a barrier is needed by the next forward pass, while the clone is
        being copied: training must never fail because of a checkpoint.
        """
        free, total = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        # The peak includes clones made here, at most one version's at a time.
        highest = stats["allocated_bytes"]["all"]["peak"] - self._cloned_bytes
        self._peak_bytes = max(self._peak_bytes, highest)
        ours = free + stats["reserved_bytes"]["all"]["current"]
        fits: bool = ours - self._peak_bytes - int(total * SPARE_DEVICE_FRACTION) > nbytes
        if fits:
            self._cloned_bytes = max(self._cloned_bytes, nbytes)
        return fits

    def close(self) -> None:
        """End the threads."""
        self.hashers.shutdown()


class PageLocks:
    """Registers slots with CUDA, so that copies into them are asynchronous. Copier thread.

    If the system refuses (a limit on locked memory, a file system with pages that cannot be
    locked), slots stay ordinary memory: correct, but slower. `on_notice(text, severity)` is called
    once then.
    """

    def __init__(self, device: torch.device, on_notice: Callable[[str, int], None]) -> None:
        self._device, self._on_notice = device, on_notice
        self._refused = False

    def lock(self, slot: Slot) -> None:
        """Register the slot's memory, unless it is registered already."""
        if slot.registered_address or self._refused:
            return
        view = slot.image()
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        cuda = torch.cuda.cudart()
        code = cuda.cudaHostRegister(address, len(view), 0)
        if int(code) == 0:
            slot.registered_address = address
            return
        self._refused = True
        forget_error(self._device)
        self._on_notice(
            f"CUDA cannot page-lock a slot of {len(view)} bytes "
            f"({cuda.cudaGetErrorString(code)}): slots stay ordinary memory, copies to them are "
            "several times slower, and training waits for the remaining ones at the barrier. "
            "Allow more locked memory (ulimit -l unlimited, docker run --ulimit memlock=-1), or "
            "set shm_dir to a memory file system that allows it",
            logging.ERROR,
        )

    def unlock(self, slot: Slot) -> None:
        """Undo `lock`, before the slot is unmapped. Any thread."""
        if slot.registered_address:
            torch.cuda.cudart().cudaHostUnregister(slot.registered_address)
            slot.registered_address = 0


class _Batch(Struct):
    blocks: list[int]
    arrived: torch.cuda.Event
    sources: list[torch.Tensor]
    """Kept until the copies have read them."""


class CudaEngine(BlockQueue, Engine):
    """The engine for a GPU, see the module's text. Made at the boundary."""

    prepares = True

    def __init__(self, plan: CopyPlan, lane: CudaLane) -> None:
        super().__init__(plan)
        self.lane = lane
        self._feeding = threading.Lock()
        """Held while a batch moves from the queue to the stream: the barrier sees whole batches."""
        self._flying: deque[_Batch] = deque()
        self._hashing: deque[Future[tuple[list[int], list[bytes], float]]] = deque()
        """Batches that have arrived; only the copier's thread uses it."""
        self._sources = lane.sources_of(plan)
        """Addresses of the blocks that the library copies: in live tensors, then in the clone."""
        self._clone: torch.Tensor | None = None
        self._clones: dict[int, torch.Tensor] = {}
        """Clones of other blocks."""
        self._boundary = torch.cuda.Event(blocking=True)  # a waiting thread does not spin
        self._boundary.record(torch.cuda.current_stream(lane.device))
        self._ready = self._boundary

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """See `Engine`. Copies of the rank tree are work for the side stream, too: their sources
        are clones, so no barrier waits for them."""
        self.lane.use()
        self.copying = True
        try:
            with self.lane.after(self._boundary):
                yield
        finally:
            try:
                with self._feeding:  # a barrier in progress; a later one feeds nothing
                    # Nothing may use the slot once it is given back.
                    self.lane.stream.synchronize()
                    wait(self._hashing)
                    self._clones.clear()
                    self._clone = None
            finally:
                self.copying = False

    def run(self, wait_seconds: float) -> Progress:
        """Feed, and hash arrived blocks; see `Engine`."""
        self._boundary.synchronize()  # copies start after the device reaches the boundary
        while not self._ended:
            start = time.perf_counter()
            with self._feeding:
                fed = len(self._flying) < BATCHES_IN_FLIGHT and self._feed()
            if fed:
                self._count((), (), time.perf_counter() - start, 0.0)
            elif self._flying:
                self._receive(self._flying.popleft())
            elif self._hashing:
                blocks, found, seconds = self._hashing.popleft().result()
                self._count(blocks, found, 0.0, seconds)
            else:
                with self._changed:
                    more = self._changed.wait_for(
                        lambda: self._todo or self._flying or self._ended or not self._left,
                        wait_seconds,
                    )
                if not more or not self._left:
                    break
        return self._progress()

    def help(self) -> Progress:
        """Clone or feed the rest, and order the compute stream after all reads of live tensors."""
        with self._feeding:  # before the release: cloning is better than feeding
            self.release(None)
            if self._ended:
                return Progress.ABORTED
            if torch.cuda.is_current_stream_capturing():
                raise SnapshotError(
                    "the optimizer's step is being captured into a CUDA graph. Replays run no "
                    "hooks, so they would not wait for copies: capture only forward and backward "
                    "pass"
                )
            compute = torch.cuda.current_stream(self.lane.device)
            if self._clone_rest():
                self._ready = torch.cuda.Event()
                self._ready.record(compute)
            else:
                while self._feed():
                    pass
            read = torch.cuda.Event()
            read.record(self.lane.stream)
            compute.wait_event(read)
        with self._changed:
            self._changed.notify_all()
        return Progress.ORDERED

    def _clone_rest(self) -> bool:
        """Clone the blocks not fed yet; False if they are few, or there is no room."""
        with self._changed:
            left = list(self._todo)
        nbytes = sum(self._plan.layout.blocks[b].nbytes for b in left)
        if nbytes <= CLONE_FROM_BYTES or not self.lane.has_room(nbytes):
            return False
        try:
            self._clone_now(left)
        except torch.cuda.OutOfMemoryError:  # fragmented memory, or another rank was faster
            return False
        return True

    def _clone_now(self, blocks: list[int]) -> None:
        """Clone these blocks, on the current stream. Raises torch.cuda.OutOfMemoryError."""
        sources, clone = self._sources, None
        clones: dict[int, torch.Tensor] = {}
        direct, others = sources.split(blocks) if sources is not None else ([], blocks)
        if direct:
            assert self.lane.copies is not None
            assert sources is not None
            stream = torch.cuda.current_stream(self.lane.device)
            clone, sources = self.lane.copies.clone(sources, direct, stream)
        for run, source in self._runs(others):
            sizes = [self._plan.layout.blocks[b].nbytes for b in run]
            clones.update(zip(run, source.clone().split(sizes), strict=True))
        self._sources, self._clone, self._clones = sources, clone, clones

    def _feed(self) -> bool:
        """Enqueue copies of released blocks; with `_feeding` held. False when there are none."""
        with self._changed:
            if (target := self._target) is None:
                return False
            blocks: list[int] = []
            nbytes = 0
            while self._todo and nbytes < BATCH_BYTES:
                blocks.append(self._todo.popleft())
                nbytes += self._plan.layout.blocks[blocks[-1]].nbytes
        if not blocks:
            return False
        binding, start, watch = target
        watch.copies(blocks[0])
        batch = _Batch(blocks, torch.cuda.Event(blocking=True), [])
        self._enqueue(batch, binding, start)
        batch.arrived.record(self.lane.stream)
        self._flying.append(batch)
        with self._changed:
            self._changed.notify_all()
        return True

    def _enqueue(self, batch: _Batch, binding: Binding, start: int) -> None:
        """Enqueue the copies of a batch on the side stream."""
        others = batch.blocks
        if self._sources is not None:
            direct, others = self._sources.split(others)
            if direct:
                assert self.lane.copies is not None
                self.lane.stream.wait_event(self._ready)
                target = binding.address + start
                self.lane.copies.enqueue(self._sources, direct, target, self.lane.stream)
        if not others:
            return
        with self.lane.after(self._ready):
            for run, source in self._runs(others):
                low = start + self._plan.layout.blocks[run[0]].offset
                binding.tensor.narrow(0, low, source.numel()).copy_(source, non_blocking=True)
                batch.sources.append(source)

    def _runs(self, blocks: Iterable[int]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Blocks with their bytes on the device, those adjacent in the shard in one piece: if they
        are adjacent in memory, too, or have many small tensors, which are gathered by a copy on the
        current stream."""
        run: list[int] = []
        parts: list[torch.Tensor] = []
        gathered_bytes = 0
        for block in blocks:
            more = self._parts(block)
            nbytes = sum(map(torch.Tensor.numel, more))
            follows = bool(run) and block == run[-1] + 1
            if follows and len(parts) == len(more) == 1 and _adjoin(parts[0], more[0]):
                parts = [parts[0].as_strided((parts[0].numel() + more[0].numel(),), (1,))]
            elif follows and _alike(parts, more) and gathered_bytes + nbytes <= GATHERED_BYTES:
                parts = [*parts, *more]
                gathered_bytes += nbytes
            else:
                if run:
                    yield run, _joined(parts)
                run, parts, gathered_bytes = [], more, nbytes
            run.append(block)
        if run:
            yield run, _joined(parts)

    def _parts(self, block: int) -> list[torch.Tensor]:
        """The block's bytes, in order."""
        clone = self._clones.pop(block, None)
        return [clone] if clone is not None else self._plan.source(block)[0]

    def _receive(self, batch: _Batch) -> None:
        """Wait for a batch, and have it hashed."""
        if (target := self._target) is None:
            return
        binding, start, watch = target
        begin = time.perf_counter()
        batch.arrived.synchronize()
        batch.sources.clear()
        end = time.perf_counter()
        self._count((), (), end - begin, 0.0)
        watch.copied(batch.blocks, begin, end)
        if len(batch.blocks) * BLOCK_BYTES > HASHED_ALONE_BYTES:
            # Raises RuntimeError while the interpreter shuts down: then the snapshot fails.
            hashing = self.lane.hashers.submit(self._hash, batch.blocks, binding, start)
            self._hashing.append(hashing)
        else:
            blocks, found, seconds = self._hash(batch.blocks, binding, start)
            self._count(blocks, found, 0.0, seconds)

    def _hash(
        self, blocks: list[int], binding: Binding, start: int
    ) -> tuple[list[int], list[bytes], float]:
        """The blocks, their digests, and the seconds that this took. Any thread."""
        begin = time.perf_counter()
        sources, copies = self._sources, self.lane.copies
        if sources is not None and copies is not None:
            found = copies.hash(sources, blocks, binding.address + start)
        else:
            each = (self._plan.layout.blocks[b] for b in blocks)
            lows = ((start + block.offset, block.nbytes) for block in each)
            found = [digest(binding.view[low : low + nbytes]) for low, nbytes in lows]
        return blocks, found, time.perf_counter() - begin


def _alike(parts: list[torch.Tensor], more: list[torch.Tensor]) -> bool:
    """True if both are many tensors of one device."""
    return len(parts) > 1 and len(more) > 1 and parts[0].device == more[0].device


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _adjoin(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True when the bytes of `other` follow those of `one` in the same memory, and both together
    fit into a batch."""
    return (
        one.data_ptr() + one.numel() == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.device == other.device
        and one.numel() + other.numel() <= BATCH_BYTES
    )
