"""Engine: copies and hashes the blocks of one plan into one slot.

A block is held, then released, then taken by one thread, then done. There are three engines: one
calls the C library (`copy_engine`), one torch; `cuda` has the one for GPUs. `Snapshot` has the life
of a version around them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tierckpt import _faults
from tierckpt.format.manifest import digest

from .copy_engine import Desk, Job, Library, Progress, Table
from .copy_plan import Binding, CopyPlan

if TYPE_CHECKING:
    from tierckpt.tracing.recorder import Trace


class SnapshotError(Exception):
    """Reason for a failed snapshot; reported by an event, never raised in the training loop."""


@dataclass
class Watch:
    """The view that a trace, or a fault of a test, has of the copies of one version."""

    version: int
    plan: CopyPlan
    trace: Trace | None = None
    """Recorder of spans, if there is one."""

    def each(self) -> bool:
        """True if each block is reported to a trace, or may be hit by a fault."""
        return self.trace is not None or _faults.armed("copy")

    def copies(self, block: int) -> None:
        """Report that this block is copied next."""
        _faults.point("copy", version=self.version, block=block)

    def copied(self, blocks: Sequence[int], start_seconds: float, end_seconds: float) -> None:
        """Report that these blocks were copied."""
        if self.trace is not None:
            self.trace.copied(self.version, self.plan, blocks, start_seconds, end_seconds)

    def span(self, kind: str, start_seconds: float) -> None:
        """Report a part of the snapshot that ends now."""
        if self.trace is not None:
            now = time.perf_counter()
            self.trace.span(kind, start_seconds, now, version=self.version)


class Engine(Protocol):
    """Copies the blocks of one version. Any thread may call a method that names none.

    `run` and `help` may raise; the caller then calls `end`. After `end`, no block is started.
    """

    prepares: bool = False
    """True if a slot should be claimed at the boundary, as it needs preparation."""
    posts: bool = False
    """True if the engine may be posted."""
    posted: bool = False
    """True once it was."""
    unchanged: bool = False
    """With the results: True if a barrier has found the plan's counters as at the boundary."""

    @property
    def copying(self) -> bool:
        """True while a thread uses the slot outside of `run` and `help`."""
        ...

    def held(self) -> set[int]:
        """Blocks that may not be copied yet."""
        ...

    def release(self, blocks: Iterable[int] | None) -> None:
        """Allow the copy of these blocks, of all with None."""
        ...

    def post(
        self, binding: Binding, head: bytes, tail: bytes, room: int, counters: bytes | None
    ) -> bool:
        """Fill the image around the blocks, release all of them, and leave them to the barrier and
        the copier, who copy them without the interpreter. The image has `room` bytes for the tail.
        `counters`: the plan's at the boundary. Training thread.

        Returns False, and does nothing, if the copier is still with another version, or the engine
        never does.
        """
        return False

    def fill(self, binding: Binding, start: int, watch: Watch) -> None:
        """Allow the copy into this slot, from byte `start` on; nothing is copied before."""
        ...

    def serving(self) -> contextlib.AbstractContextManager[object]:
        """Context of the copier's work for this version. After it, nothing reads or writes for the
        engine, except calls of `run` and `help`."""
        return contextlib.nullcontext()

    def run(self, wait_seconds: float) -> Progress:
        """Copy released blocks, until none was released for so long. Copier thread."""
        ...

    def help(self) -> Progress:
        """Release all blocks; return when the optimizer may change their sources. Training
        thread."""
        ...

    def results(self) -> tuple[float, float, bytes]:
        """Seconds of copying and of hashing, summed over all threads, and the digests of all
        blocks; if the version was posted, those of head and tail around them. After COMPLETE."""
        ...

    def end(self, sealed: bool) -> None:
        """The version is over: start no further block, and wake all threads."""
        ...


class BlockQueue:
    """The blocks of a plan, for an engine in Python. Any thread."""

    copying = False

    def __init__(self, plan: CopyPlan) -> None:
        count = len(plan.layout.blocks)
        self._plan = plan
        self._changed = threading.Condition(threading.RLock())
        self._held = {*range(count)}
        self._todo: deque[int] = deque()
        """Released blocks that no thread has taken."""
        self._left = count
        """Number of blocks that are not done."""
        self._digests = [b""] * count
        self._copy_seconds = self._hash_seconds = 0.0
        self._ended = False
        self._target: tuple[Binding, int, Watch] | None = None

    def held(self) -> set[int]:
        """See `Engine`."""
        return {*self._held}

    def release(self, blocks: Iterable[int] | None) -> None:
        """See `Engine`."""
        with self._changed:
            wanted = sorted(self._held) if blocks is None else dict.fromkeys(blocks)
            fresh = [block for block in wanted if block in self._held]
            if fresh:
                self._held.difference_update(fresh)
                self._todo.extend(fresh)
                self._changed.notify_all()

    def fill(self, binding: Binding, start: int, watch: Watch) -> None:
        """See `Engine`."""
        with self._changed:
            if not self._ended:
                self._target = binding, start, watch

    def results(self) -> tuple[float, float, bytes]:
        """See `Engine`."""
        return self._copy_seconds, self._hash_seconds, b"".join(self._digests)

    def end(self, sealed: bool) -> None:
        """See `Engine`."""
        with self._changed:
            self._ended, self._target = True, None
            self._changed.notify_all()

    def _count(
        self, blocks: Sequence[int], digests: Iterable[bytes], copying: float, hashing: float
    ) -> None:
        """Note that blocks are done, and the seconds that this took."""
        with self._changed:
            for block, found in zip(blocks, digests, strict=True):
                self._digests[block] = found
            self._left -= len(blocks)
            self._copy_seconds += copying
            self._hash_seconds += hashing
            if not self._left:
                self._changed.notify_all()

    def _progress(self) -> Progress:
        with self._changed:
            if self._ended:
                return Progress.ABORTED
            return Progress.IDLE if self._left else Progress.COMPLETE


class TorchEngine(BlockQueue, Engine):
    """Copies with torch, block by block, wherever the sources are; on the threads that call."""

    def run(self, wait_seconds: float | None) -> Progress:
        """See `Engine`. With None, wait until no block is left."""
        if (target := self._target) is None:
            return Progress.ABORTED
        while (block := self._take(wait_seconds)) is not None:
            self._copy(block, *target)
        return self._progress()

    def help(self) -> Progress:
        """See `Engine`."""
        self.release(None)
        return self.run(None)

    def _take(self, wait_seconds: float | None) -> int | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._todo or self._ended or not self._left, wait_seconds
            )
            return self._todo.popleft() if self._todo and not self._ended else None

    def _copy(self, block: int, binding: Binding, start: int, watch: Watch) -> None:
        watch.copies(block)
        begin = time.perf_counter()
        copied = binding.copy_block(self._plan, block, start)
        middle = time.perf_counter()
        found = digest(copied)
        end = time.perf_counter()
        self._count((block,), (found,), middle - begin, end - middle)
        watch.copied((block,), begin, end)


class NativeEngine(Job, Engine):
    """Copies by the C library, in a few calls without the interpreter.

    A posted version is copied by the copier inside of `Desk.serve`, beside the training thread in
    `help`. Others are copied by `run`, one call for all released blocks.
    """

    posts = True

    def __init__(self, library: Library, plan: CopyPlan, table: Table, desk: Desk) -> None:
        """`table`: the plan's. `desk`: the copier's."""
        super().__init__(library, table)
        self._plan, self._desk = plan, desk
        self._watch: Watch | None = None
        """Set if it wants to see each block."""
        self._sealed = False

    def post(
        self, binding: Binding, head: bytes, tail: bytes, room: int, counters: bytes | None
    ) -> bool:
        """See `Engine`."""
        parts, plan = (head, self._plan.layout.nbytes, tail, room), self._plan
        counted = self._table.counters_of(plan.records), counters
        return self._desk.post(self, (plan, binding), binding.address, parts, counted)

    def fill(self, binding: Binding, start: int, watch: Watch) -> None:
        """See `Engine`."""
        self._watch = watch if watch.each() else None
        self.bind(binding.address + start)

    def run(self, wait_seconds: float) -> Progress:
        """See `Engine`."""
        if self._watch is None:
            return super().run(wait_seconds)
        copied = self.wait(wait_seconds) is Progress.UNFINISHED
        self._copy_one_by_one(self._watch)
        progress = super().run(0.0)
        return Progress.UNFINISHED if copied and progress is Progress.IDLE else progress

    def help(self, desk: Desk | None = None) -> Progress:
        """See `Engine`."""
        if not self.posted:
            self.release(None)
            if self._watch is not None:
                self._copy_one_by_one(self._watch)
        return super().help(desk or self._desk)

    def _copy_one_by_one(self, watch: Watch) -> None:
        while (block := self.take()) is not None:
            watch.copies(block)
            start = time.perf_counter()
            end = self.copy_one(block)
            watch.copied((block,), start, end)

    def end(self, sealed: bool) -> None:
        """See `Engine`."""
        self._sealed = sealed
        if not sealed:
            self.abort()
        elif not self.unchanged:  # else `help` has done it
            self._desk.settle(self)

    @property
    def copying(self) -> bool:
        """See `Engine`. No block is left after the seal."""
        return not self._sealed and super().copying


__all__ = ["BlockQueue", "Engine", "NativeEngine", "SnapshotError", "TorchEngine", "Watch"]
