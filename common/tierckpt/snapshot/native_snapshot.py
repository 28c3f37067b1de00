"""Native snapshot: copied by the copy engine, in a few calls without the interpreter.

Differences from the snapshot that copies with torch:

- The copier copies and hashes all released blocks in one call, and waits inside of it for more.
- A small state is released as a whole with its first layer: one wake-up of the copier for each
  version.
- In the barrier one call copies the rest, and returns when no thread copies any more.

Blocks of the rank's tree are copied in Python as before, mostly a single one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from tierckpt import _faults

from . import snapshot
from .copy_engine import Engine, Job, Progress, Table
from .copy_plan import Binding
from .snapshot import Phase, Snapshot

RELEASE_AT_ONCE_BYTES = 16 * 1024 * 1024
"""A smaller state is released as a whole: its copy takes a few milliseconds, less than a wake-up of
the copier for each layer would cost the training."""


@dataclass
class NativeSnapshot(Snapshot):
    """A snapshot copied by the engine; `Snapshot` names the thread of each method."""

    engine: Engine = field(kw_only=True)
    table: Table = field(kw_only=True)
    """The plan's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._todo.clear()
        self._held.clear()
        self._job = Job(self.engine, self.table)
        self._job.release(self.plan.own_blocks)
        self._counted = False
        """True once the blocks of the job are counted as copied."""
        self._at_once = self.table.nbytes <= RELEASE_AT_ONCE_BYTES
        self._all_released = False

    # --- training thread -----------------------------------------------------------------------

    def release(self, params: Iterable[torch.Tensor]) -> None:
        """Allow the copy of these parameters' layers from now on."""
        if self._all_released:
            return
        if self._at_once:
            self.release_all()
        else:
            super().release(params)

    def _let_copy(self, blocks: Iterable[int]) -> None:
        with self._failing_where_cut_short():
            self._job.release(blocks)

    def held_blocks(self) -> set[int]:
        """Blocks that may not be copied yet. Any thread."""
        return self._job.held()

    def _let_all_copy(self) -> None:
        if self._all_released:
            return
        with self._failing_where_cut_short():
            self._job.release_all()
            self._all_released = True

    # --- copier thread, and the training thread inside the barrier ------------------------------

    def _bound(self, binding: Binding) -> None:
        self._job.bind(binding.tensor.data_ptr() + len(self._header))

    def run(self) -> None:
        """Copier thread: bind, then copy released blocks until all are copied."""
        self.bind()
        while self.phase is Phase.OPEN:
            progress = self._advance(0.0)
            if self._work(self._tree_todo):
                continue
            if progress is Progress.COMPLETE:
                return  # the thread that copies the last block of the tree seals
            if self._advance(snapshot.QUIET_SECONDS) is Progress.IDLE:
                self._release_quietly()

    def work(self) -> bool:
        """Copy all that is left, or else one block of the tree; False if there is none."""
        if not self._counted and self._advance(None) is Progress.IDLE:
            return False
        return self._work(self._tree_todo)

    def _advance(self, wait_seconds: float | None) -> Progress:
        """Copy released blocks and wait for more of them; with None, help, and wait for none.
        Seals if nothing is left then."""
        entered = False
        try:
            with self._lock:
                binding = self._binding  # keeps the slot mapped while the engine writes to it
                if self.phase is not Phase.OPEN or binding is None:
                    return Progress.ABORTED
                self._in_flight += 1
                entered = True  # from here on, an interrupt fails the version
            progress = self._copy_released(wait_seconds)
            if progress is Progress.COMPLETE and self._count():
                self._seal()
            return progress
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise  # a KeyboardInterrupt in the barrier
            return Progress.ABORTED
        finally:
            if entered:
                self._leave()

    def _copy_released(self, wait_seconds: float | None) -> Progress:
        copied = False
        if self._one_by_one():
            copied = self._copy_one_by_one(wait_seconds or 0.0)
            wait_seconds = wait_seconds and 0.0
        done = self._job.help() if wait_seconds is None else self._job.run(wait_seconds)
        return Progress.UNFINISHED if copied and done is Progress.IDLE else done

    def _one_by_one(self) -> bool:
        """True if each block is reported to a trace, or may be hit by a fault."""
        return self.trace is not None or _faults.armed("copy")

    def _copy_one_by_one(self, wait_seconds: float) -> bool:
        """Wait for released blocks and copy them; False if there were none."""
        copied = self._job.wait(wait_seconds) is Progress.UNFINISHED
        while (block := self._job.take()) is not None:
            _faults.point("copy", version=self.facts.id.version, block=block)
            begin = time.perf_counter()
            self._job.copy_one(block)
            self._record_copy(block, begin)
        return copied

    def _count(self) -> bool:
        """Count the job's blocks as copied, once; True if none is left then."""
        with self._lock:
            if self._counted:
                return False
            self._counted = True
            copy_seconds, hash_seconds = self._job.seconds()
            self.clock.copy += copy_seconds
            self.clock.checksum += hash_seconds
            self._left -= self.table.count
            return self._left == 0

    def _all_digests(self) -> list[bytes]:
        return [self._job.digests(), *self._digests[self.table.count :]]

    def _end(self, phase: Phase, error: str = "") -> None:
        super()._end(phase, error)
        if self.phase is Phase.FAILED:
            self._job.abort()
