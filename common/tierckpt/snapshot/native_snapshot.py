"""Native snapshot: copied by the copy engine, in a few calls without the interpreter.

Differences from the snapshot that copies with torch:

- A small state is released as a whole with its first layer: one wake-up of the copier for each
  version.
- The training thread claims the slot at that release, if that does not wait, and writes header and
  tree. It posts the blocks at the copier's desk (`copy_engine.Desk`): the copier does not need the
  interpreter, which the training has.
- In the barrier one call copies the rest, and returns when no thread copies any more. Then the
  training thread seals. If no barrier comes for `LINGER_SECONDS`, the copier does.

Otherwise (a large state, a large tree, a vote that has not come, a slot to be made) the copier
claims the slot. It copies all released blocks in one call, waits inside of it for more, and copies
the tree in Python.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierckpt import _faults
from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.format.manifest import DIGEST_BYTES
from tierckpt.storage.slot_pool import NoSlotError

from . import snapshot
from .copy_engine import Desk, Engine, Job, Progress, Table
from .copy_plan import Binding
from .phase import Phase
from .snapshot import Snapshot

RELEASE_AT_ONCE_BYTES = 16 * 1024 * 1024
"""A smaller state is released as a whole: its copy takes a few milliseconds, less than a wake-up of
the copier for each layer would cost the training."""


@dataclass
class NativeSnapshot(Snapshot):
    """A snapshot copied by the engine; `Snapshot` names the thread of each method."""

    engine: Engine = field(kw_only=True)
    table: Table = field(kw_only=True)
    """The plan's."""
    desk: Desk = field(kw_only=True)
    """The copier's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._counted = False
        """True once the blocks of the job are counted as copied."""
        self._is_posted = False

    def _hold(self) -> None:
        self._job = Job(self.engine, self.table)
        self._at_once = 0 < self.table.nbytes <= RELEASE_AT_ONCE_BYTES
        if not self._at_once:
            self._job.release(self.plan.own_blocks)

    # --- training thread -----------------------------------------------------------------------

    def release_all(self) -> None:
        """Allow the copy of everything from now on."""
        if self._all_released:
            return
        try:
            submit = self._take_submit()
            if submit is not None and self._at_once and self._post():
                self._all_released = True
                return
            self._let_all_copy()
            if submit is not None:
                submit(self)
        except BaseException as error:  # as in `barrier`
            self.fail(error)
            raise

    def _let_copy(self, blocks: Iterable[int]) -> None:
        self._job.release(blocks)

    def held_blocks(self) -> set[int]:
        """Blocks that may not be copied yet. Any thread."""
        return self._job.held()

    def _let_all_copy(self) -> None:
        if not self._all_released:
            self._job.release_all()
            self._all_released = True

    def _post(self) -> bool:
        """Bind, release all, and have the copier copy without the interpreter. False if it must
        bind itself, because that takes time. No other thread knows the slot before."""
        try:
            if self.phase is not Phase.OPEN or self._one_by_one():
                return False
            tail, room = self._encode().whole, self._data_bytes - self.plan.layout.nbytes
            if tail is None or room > BLOCK_BYTES:
                return False
            start, head = time.perf_counter(), self._header
            self.slot = self.choose_slot(self.table.count + 1, len(head) + self._data_bytes, True)
            if self.trace is not None:
                self._record("slot", start)
            _faults.point("refill", version=self.facts.id.version)
            _faults.point("tree", version=self.facts.id.version, block=0)
            binding = Binding(self.slot)
            image = ctypes.addressof(ctypes.c_char.from_buffer(binding.view))
            parts = head, self.plan.layout.nbytes, tail, room
            self._is_posted, self._binding = True, binding
            if not self.desk.post(self._job, (self.plan, binding), image, parts):
                self._is_posted, self._binding = False, None
            return self._is_posted
        except NoSlotError:
            return False
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
            return True

    # --- copier thread, and the training thread inside the barrier ------------------------------

    def _is_in_use(self) -> bool:
        return super()._is_in_use() or self._job.copying

    def run_if_quiet(self) -> None:
        """Copier thread: see `Snapshot`. If the job was posted, complete the version here: no
        barrier has come, or the version has failed."""
        if not self._is_posted:
            super().run_if_quiet()
            return
        if self.phase is Phase.OPEN:
            self.run()
        self._report()

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
        """Copy the rest, or else one block of the tree; False if there is none."""
        if not self._counted and self._advance(None) is Progress.IDLE:
            return False
        return bool(self._tree_todo) and self._work(self._tree_todo)

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
            if self._is_posted and wait_seconds is None:
                progress = self._job.help()
            else:
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
            if entered:  # without a call: an interrupt may come at its start
                with self._lock:
                    self._in_flight -= 1
                self._report()

    def _copy_released(self, wait_seconds: float | None) -> Progress:
        copied = False
        if not self._is_posted and self._one_by_one():
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
            start = time.perf_counter()
            end = self._job.copy_one(block)
            self._record_copy(block, start, end)
        return copied

    def _count(self) -> bool:
        """Count the job's blocks as copied, once; True if none is left then."""
        with self._lock:
            if self._counted:
                return False
            self._counted = True
            copy_seconds, hash_seconds, self._job_digests = self._job.results()
            self.clock.copy += copy_seconds
            self.clock.checksum += hash_seconds
            self._left -= self.table.count
            return self._left == 0

    def _image_digests(self) -> bytes:
        if self._is_posted:
            return self._job_digests
        blocks = slice(DIGEST_BYTES, -DIGEST_BYTES)
        self._digests[: self.table.count] = [self._job_digests[blocks]]
        return super()._image_digests()

    def _end(self, phase: Phase, error: str = "") -> None:
        super()._end(phase, error)
        if self.phase is Phase.FAILED:
            self._job.abort()
        else:
            self.desk.settle(self._job)
