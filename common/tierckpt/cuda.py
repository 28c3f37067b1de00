"""The snapshot on a GPU: copies on a side stream, a barrier that Python does not wait for.

What differs from the snapshot on a CPU:

- Slots are page-locked in place (`cudaHostRegister`), so device-to-host copies are real DMA.
- The copier thread feeds copies to a low-priority stream, two batches deep, and hashes what has
  arrived with a few threads. Feeding little at a time leaves the rest free to be re-pointed:
- At the barrier, what is not fed yet is cloned on the device (terabytes a second) if memory
  allows, and drains from the clone; else it is fed at once. Then the compute stream waits for an
  event, the Python thread does not. So the seal comes after the barrier here, and a third slot is
  the default.

The device clone is CheckFreq's; clearing it up layer by layer under the allreduce is LightCheck's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from . import faults
from .manifest import digest
from .slots import Slot
from .snapshot import Phase, Snapshot, SnapshotError

BATCH_BYTES = 64 * 1024 * 1024
"""Fed to the side stream at once."""
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
        self.hashers = ThreadPoolExecutor(
            max_workers=max(1, min(8, per_rank // 2)), thread_name_prefix="tierckpt-hash"
        )

    @contextlib.contextmanager
    def after(self, event: torch.cuda.Event) -> Iterator[None]:
        """Work enqueued inside runs on the side stream, behind `event`."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(event)
            yield

    def has_room(self, nbytes: int) -> bool:
        """True when a clone of that size fits without crowding the training."""
        free, total = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached - int(total * SPARE_DEVICE_FRACTION) > nbytes

    def close(self) -> None:
        """End the threads."""
        self.hashers.shutdown()


def page_lock(slot: Slot) -> None:
    """Register the slot's memory with CUDA, once; copies into it are then asynchronous."""
    if slot.registered_address:
        return
    view = slot.image()
    address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    code = torch.cuda.cudart().cudaHostRegister(address, len(view), 0)
    if int(code) != 0:
        raise SnapshotError(f"cudaHostRegister of {len(view)} bytes failed with error {int(code)}")
    slot.registered_address = address


def page_unlock(slot: Slot) -> None:
    """The inverse of `page_lock`; before the slot is unmapped."""
    if slot.registered_address:
        torch.cuda.cudart().cudaHostUnregister(slot.registered_address)
        slot.registered_address = 0


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

    def __post_init__(self) -> None:
        super().__post_init__()
        self._feeding = threading.Lock()
        """Held while blocks go from the queue to the stream, so the barrier sees all or nothing."""
        self._flying: deque[_Batch] = deque()
        self._clones: dict[int, torch.Tensor] = {}
        self._passed = False
        self._boundary = torch.cuda.Event()
        self._boundary.record(torch.cuda.current_stream(self.lane.device))
        self._ready = self._boundary

    def bind(self) -> None:
        """Claim a slot; the small state is read back behind the boundary, on the side stream."""
        with self.lane.after(self._boundary):
            super().bind()

    def run(self) -> None:
        """Copier thread: feed, and hash what arrived, until the snapshot is done."""
        self.bind()
        if not self._enter():
            return
        with self._leaving():
            while self.phase is Phase.OPEN:
                with self._feeding:
                    fed = len(self._flying) < BATCHES_IN_FLIGHT and self._feed(BATCH_BYTES)
                if not fed and self._flying:
                    self._receive(self._flying.popleft())
                elif not fed:
                    with self._changed:
                        if not self._todo and not self._flying and self.phase is Phase.OPEN:
                            self._changed.wait()
            # After a failure: nothing may write to the slot once it is given back.
            self.lane.stream.synchronize()

    def barrier(self) -> None:
        """Return when the compute stream is told to wait for what still reads the live tensors."""
        begin = time.perf_counter()
        self._release_rest()
        try:
            with self._feeding:
                self._let_go()
        except Exception as error:
            self.fail(error)
        self.clock.barrier += time.perf_counter() - begin
        self._record("barrier", begin)

    def _let_go(self) -> None:
        """Clone or feed the rest, check that nothing was changed, and order the streams."""
        if self.phase is not Phase.OPEN:
            return
        compute = torch.cuda.current_stream(self.lane.device)
        with self._changed:
            left = list(self._todo)
        nbytes = sum(self.plan.layout.blocks[b].nbytes for b in left)
        if nbytes > CLONE_FROM_BYTES and self.lane.has_room(nbytes):
            for block in left:
                parts, _ = self.plan.source(block)
                self._clones[block] = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
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
        faults.point("copy", version=self.head.version, block=blocks[0])
        batch = _Batch(blocks, torch.cuda.Event(), [])
        with self.lane.after(self._ready):
            for block in blocks:
                low = len(self._header) + self.plan.layout.blocks[block].offset
                target = binding.tensor.narrow(0, low, self.plan.layout.blocks[block].nbytes)
                parts, _ = self.plan.source(block)
                source = self._clones.pop(block, None)
                if source is None:
                    source = torch.cat(parts) if len(parts) > 1 else parts[0]
                target.copy_(source, non_blocking=True)
                batch.sources.append(source)
            batch.arrived.record(self.lane.stream)
        self._flying.append(batch)
        with self._changed:
            self._changed.notify_all()
        return True

    def _receive(self, batch: _Batch) -> None:
        """Wait for a batch, hash it, and seal after the last one."""
        binding = self._binding
        if binding is None:
            return
        begin = time.perf_counter()
        batch.arrived.synchronize()
        batch.sources.clear()
        start = len(self._header)

        def hash_block(block: int) -> bytes:
            low = start + self.plan.layout.blocks[block].offset
            return digest(binding.view[low : low + self.plan.layout.blocks[block].nbytes])

        try:
            found = list(self.lane.hashers.map(hash_block, batch.blocks))
        except RuntimeError:  # the interpreter is ending and takes no new work
            found = [hash_block(block) for block in batch.blocks]
        with self._changed:
            for block, value in zip(batch.blocks, found, strict=True):
                self._digests[block] = value
            self._left -= len(batch.blocks)
            self.clock.copy += time.perf_counter() - begin
            last = self._left == 0
        if self.trace is not None:
            self.trace.copied(self.head.version, self.plan, batch.blocks, begin)
        if last:
            self._seal()

    def _check_before_seal(self) -> None:
        with self._changed:
            if not self._passed:  # else the barrier checked, and the optimizer has moved on
                self._check_counters()
