"""The snapshot on a GPU: copies on a side stream, a barrier that Python does not wait for.

What differs from the snapshot on a CPU:

- Slots are page-locked in place (`cudaHostRegister`), so device-to-host copies are real DMA.
- The copier thread feeds copies to a low-priority stream, two batches deep, and hashes what has
  arrived with a few threads. Blocks that lie side by side are one copy: 512 KiB at a time would
  take the link no longer than Python takes to ask for it. Feeding little at a time leaves the rest
  free to be re-pointed:
- At the barrier, what is not fed yet is cloned on the device (terabytes a second) if memory
  allows, and drains from the clone; else it is fed at once. Then the compute stream waits for an
  event, the Python thread does not. So the seal comes after the barrier here, and a third slot is
  the default.
- The rank's tree, which no optimizer changes, is copied when there is nothing else to do.

Streams: the state is read behind whatever the *current* stream has been given at the boundary, and
the optimizer's update waits on the stream that is current at its step. So a loop that trains on a
stream of its own calls `step()` there, or joins that stream first, as before any use of its
tensors. Memory that the side stream reads is kept until the host has seen the copy arrive, so the
caching allocator cannot hand it out before.

The device clone is CheckFreq's; clearing it up layer by layer under the allreduce is LightCheck's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain

import torch

from tierckpt import _faults
from tierckpt.format.manifest import digest
from tierckpt.storage.memory.slots import Slot

from .snapshot import Phase, Snapshot, SnapshotError

BATCH_BYTES = 64 * 1024 * 1024
"""Fed to the side stream at once; a single copy is no longer than this, either."""
BATCHES_IN_FLIGHT = 2
CLONE_FROM_BYTES = 32 * 1024 * 1024
"""Less than this is fed at the barrier rather than cloned: the compute stream waits about 1 ms."""
SPARE_DEVICE_FRACTION = 0.05
"""Device memory that a clone leaves alone."""


class CudaLane:
    """What all snapshots of a process share: the side stream and the hashing threads."""

    def __init__(self, device: torch.device) -> None:
        lowest, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=lowest)
        per_rank = (os.cpu_count() or 1) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.workers = max(1, min(8, per_rank // 2))
        self.hashers = ThreadPoolExecutor(self.workers, thread_name_prefix="tierckpt-hash")
        self._peak_bytes = self._cloned_bytes = 0
        """The most that the training had allocated, and the largest clone beside it."""

    def use(self) -> None:
        """Make this the calling thread's device.

        A thread begins on the first one. Each use of a stream would go back there, and so open a
        context of some 400 MiB on the first GPU for every rank of the machine.
        """
        torch.cuda.set_device(self.device)

    @contextlib.contextmanager
    def after(self, event: torch.cuda.Event) -> Iterator[None]:
        """Work enqueued inside runs on the side stream, behind `event`."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(event)
            yield

    def has_room(self, nbytes: int) -> bool:
        """True when a clone of that size fits beside all that the training has ever needed.

        What is free at a barrier will be wanted by the next forward pass, while the clone drains:
        the training must never fail for the sake of a checkpoint.
        """
        free, total = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        # The highest mark includes clones made here, at most one version's at a time.
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

    Where the system does not allow it (a limit on locked memory, a file system whose pages cannot
    be held), slots stay ordinary memory: right, but slower, and `on_notice(text, severity)` hears
    of it once.
    """

    def __init__(self, device: torch.device, on_notice: Callable[[str, int], None]) -> None:
        self._device, self._on_notice = device, on_notice
        self._refused = False

    def lock(self, slot: Slot) -> None:
        """Register the slot's memory, unless it is."""
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
        self._forget_error()
        self._on_notice(
            f"CUDA cannot page-lock a slot of {len(view)} bytes "
            f"({cuda.cudaGetErrorString(code)}): slots stay ordinary memory, copies to them are "
            "several times slower, and training waits for those that are left at the barrier. "
            "Allow more locked memory (ulimit -l unlimited, docker run --ulimit memlock=-1), or "
            "set shm_dir to a memory file system that allows it",
            logging.ERROR,
        )

    def unlock(self, slot: Slot) -> None:
        """The inverse; before the slot is unmapped. Any thread."""
        if slot.registered_address:
            torch.cuda.cudart().cudaHostUnregister(slot.registered_address)
            slot.registered_address = 0

    def _forget_error(self) -> None:
        """A failed call stays the thread's last error, for which its next kernel is blamed."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)


@dataclass
class _Batch:
    blocks: list[int]
    arrived: torch.cuda.Event
    sources: list[torch.Tensor]
    """Kept until the copies have read them."""


@dataclass
class CudaSnapshot(Snapshot):
    """See the module's text; methods say in `Snapshot` which thread calls them."""

    lane: CudaLane = field(kw_only=True)

    starts_at_once = True
    """Its slot is made ready, page locks and all, behind the forward pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._feeding = threading.Lock()
        """Held while blocks go from the queue to the stream, so the barrier sees all or nothing."""
        self._flying: deque[_Batch] = deque()
        self._clones: dict[int, torch.Tensor] = {}
        self._passed = False
        self._boundary = torch.cuda.Event(blocking=True)  # whoever waits does not spin on a core
        self._boundary.record(torch.cuda.current_stream(self.lane.device))
        self._ready = self._boundary

    def run(self) -> None:
        """Copier thread: feed, and hash what arrived, until the snapshot is done."""
        self.lane.use()
        self.bind()
        if not self._enter():
            return
        with self._leaving():
            try:
                self._feed_and_receive()
            except Exception as error:
                self.fail(error)  # first of all: now a barrier feeds nothing any more,
            with self._feeding:  # and is not in the middle of it, either
                # Nothing may write to the slot once it is given back.
                self.lane.stream.synchronize()
                self._clones.clear()

    def _feed_and_receive(self) -> None:
        self._boundary.synchronize()  # until the device is there, copying has not begun
        while self.phase is Phase.OPEN:
            begin = time.perf_counter()
            with self._feeding:
                fed = len(self._flying) < BATCHES_IN_FLIGHT and self._feed(BATCH_BYTES)
            if fed:
                with self._changed:
                    self.clock.copy += time.perf_counter() - begin
            elif self._flying:
                self._receive(self._flying.popleft())
            elif not self._copy_tree():
                self._await_release()

    def _copy_tree(self) -> bool:
        """Copy a block of the tree, if one is left. It is of clones, for which no barrier waits,
        and their memory is free when this returns: copies that read it have arrived."""
        with self.lane.after(self._boundary):
            return self._work(self._tree_todo)

    def _nothing_to_do(self) -> bool:
        return super()._nothing_to_do() and not self._flying

    def barrier(self) -> None:
        """Return when the compute stream is told to wait for what still reads the live tensors."""
        begin = time.perf_counter()
        try:
            with self._feeding:  # before the release: what is better cloned is not to be fed
                self._release_rest()
                self._let_go()
        except Exception as error:
            self.fail(error)
        self.clock.barrier += time.perf_counter() - begin
        self._record("barrier", begin)

    def _let_go(self) -> None:
        """Clone or feed the rest, check that nothing was changed, and order the streams."""
        if self.phase is not Phase.OPEN:
            return
        if torch.cuda.is_current_stream_capturing():
            raise SnapshotError(
                "the optimizer's step is being captured into a CUDA graph, whose replays run no "
                "hooks, so nothing could hold them back; capture forward and backward pass only"
            )
        compute = torch.cuda.current_stream(self.lane.device)
        if self._clone_rest():
            self._ready = torch.cuda.Event()
            self._ready.record(compute)
        else:
            while self._feed(BATCH_BYTES):
                pass
        read = torch.cuda.Event()
        read.record(self.lane.stream)
        compute.wait_event(read)
        with self._changed:
            self._check_counters()
            self._passed = True
            self._changed.notify_all()

    def _clone_rest(self) -> bool:
        """Put aside on the device what is not fed yet; False when that is little, or no room."""
        with self._changed:
            left = list(self._todo)
        nbytes = sum(self.plan.layout.blocks[b].nbytes for b in left)
        if nbytes <= CLONE_FROM_BYTES or not self.lane.has_room(nbytes):
            return False
        clones: dict[int, torch.Tensor] = {}
        try:
            for blocks, source in self._runs(left):
                sizes = [self.plan.layout.blocks[b].nbytes for b in blocks]
                clones.update(zip(blocks, source.clone().split(sizes), strict=True))
        except torch.cuda.OutOfMemoryError:  # it is there, but in pieces, or another rank was first
            return False
        self._clones = clones
        return True

    def _feed(self, most_bytes: int) -> bool:
        """Enqueue copies of released blocks; with `_feeding` held. False when there are none."""
        binding = self._binding
        with self._changed:
            if binding is None or self.phase is not Phase.OPEN:
                return False
            blocks: list[int] = []
            nbytes = 0
            while self._todo and nbytes < most_bytes:
                blocks.append(self._todo.popleft())
                nbytes += self.plan.layout.blocks[blocks[-1]].nbytes
        if not blocks:
            return False
        _faults.point("copy", version=self.facts.id.version, block=blocks[0])
        batch = _Batch(blocks, torch.cuda.Event(blocking=True), [])
        with self.lane.after(self._ready):
            for run, source in self._runs(blocks):
                low = len(self._header) + self.plan.layout.blocks[run[0]].offset
                target = binding.tensor.narrow(0, low, source.numel())
                target.copy_(source, non_blocking=True)
                batch.sources.append(source)
            batch.arrived.record(self.lane.stream)
        self._flying.append(batch)
        with self._changed:
            self._changed.notify_all()
        return True

    def _runs(self, blocks: Iterable[int]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Blocks and their bytes, those as one that lie side by side in the shard and in memory."""
        run: list[int] = []
        joined = torch.empty(0, dtype=torch.uint8)
        for block in blocks:
            source = self._source(block)
            if run and block == run[-1] + 1 and _adjoin(joined, source):
                run.append(block)
                joined = joined.as_strided((joined.numel() + source.numel(),), (1,))
                continue
            if run:
                yield run, joined
            run, joined = [block], source
        if run:
            yield run, joined

    def _source(self, block: int) -> torch.Tensor:
        """The block's bytes on the device; a copy made on the current stream if they are in many
        places."""
        clone = self._clones.pop(block, None)
        if clone is not None:
            return clone
        parts, _ = self.plan.source(block)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _receive(self, batch: _Batch) -> None:
        """Wait for a batch, hash it, and seal after the last one."""
        binding = self._binding
        if binding is None:
            return
        begin = time.perf_counter()
        batch.arrived.synchronize()
        batch.sources.clear()
        middle = time.perf_counter()
        found = self._hash(batch.blocks, binding.view)
        with self._changed:
            for block, value in found:
                self._digests[block] = value
            self._left -= len(batch.blocks)
            self.clock.copy += middle - begin
            self.clock.checksum += time.perf_counter() - middle
            last = self._left == 0
        if self.trace is not None:
            self.trace.copied(self.facts.id.version, self.plan, batch.blocks, begin)
        if last:
            self._seal()

    def _hash(self, blocks: list[int], view: memoryview) -> list[tuple[int, bytes]]:
        """(block, digest), by all hashing threads: a share each, as handing out costs time, too."""
        start = len(self._header)

        def hash_share(share: list[int]) -> list[tuple[int, bytes]]:
            found = []
            for block in share:
                low = start + self.plan.layout.blocks[block].offset
                found.append(
                    (block, digest(view[low : low + self.plan.layout.blocks[block].nbytes]))
                )
            return found

        shares = [blocks[i :: self.lane.workers] for i in range(self.lane.workers)]
        try:
            return list(chain.from_iterable(self.lane.hashers.map(hash_share, shares)))
        except RuntimeError:  # the interpreter is ending and takes no new work
            return hash_share(blocks)

    def _check_before_seal(self) -> None:
        with self._changed:
            if not self._passed:  # else the barrier checked, and the optimizer has moved on
                self._check_counters()


def _adjoin(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True when the bytes of `other` follow those of `one` in the same memory, and both together
    are no more than a batch."""
    return (
        one.data_ptr() + one.numel() == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.device == other.device
        and one.numel() + other.numel() <= BATCH_BYTES
    )
