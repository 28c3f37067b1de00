"""Snapshot: copies one version from live tensors into a slot.

The steps, with their threads:

1. *boundary* (training thread): `CopyPlan.stage` copies buffers and small state aside.

2. *release* (training thread): blocks of a layer may be copied once its allreduce has started. A
small state is released as a whole, with its first layer. The first release wakes the copier: at the
boundary it would only slow down the forward pass. (As long as slots must be made, which takes
longer, it starts at once.) After one second without a release (an evaluation may follow the
boundary), the copier releases the rest by itself.

3. *bind*: claim a slot that may be overwritten. The training thread does so when it releases a
small state, if that does not wait and the engine can be *posted*: then it leaves the copier all
work, in one call. Otherwise (a large state, a large tree, a vote that has not come, a slot to be
made) the copier does, and waits.

4. *copy* (copier thread): the engine copies each block, and hashes it; blocks of the rank's tree
follow when no others are released.

5. *barrier* (training thread, before the optimizer's step): everything is released. The training
thread helps to copy instead of waiting for the copier, and returns when no block is left that the
optimizer could change during its copy.

6. *seal* (the thread that copied the last block, or saw that it was): digests, manifest, seal. If a
version was posted, and no barrier comes for `LINGER_SECONDS` after the copy, the copier seals it.

A failure means that it is never sealed. Training is not affected.

`Copier` is the thread that copies snapshots beside the training.

*Memory moves* are torch's operations that give a storage other memory and free what it had. A copy
in progress reads the memory that tensors had at the boundary. Aliases keep their storages, so
`tensor.data = ...`, `tensor.set_()` and `module.to()` are safe: they give the tensor another
storage. A few operations free the memory within a storage, such as `share_memory_()`, which
`multiprocessing` calls for every tensor that it sends, or `resize_()`. `guard_memory_moves` makes
these wait for the copy first, as an optimizer's step does, so the version is exact and nothing
reads freed memory. The wrappers stay in torch's classes, and call torch at once while nothing is
copied. Extensions that free memory without these methods are seen at the seal: see
`PlanCheck.counters`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from msgspec import Struct
from msgspec.structs import asdict

from tierckpt import _faults
from tierckpt._text import error_text, some
from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.format.manifest import Manifest, digest
from tierckpt.format.records import VersionFacts
from tierckpt.format.shard_file import rank_state_blocks
from tierckpt.state import tree_codec
from tierckpt.state.names import parameter_of
from tierckpt.storage.slot_pool import NoSlotError
from tierckpt.storage.slots import Slot

from .copy_engine import Desk, Progress
from .copy_plan import Binding, CopyPlan
from .engine import Engine, SnapshotError, Watch

__all__ = ["MOVED", "Copier", "Work", "guard_memory_moves"]


OF_STORAGES = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")
OF_TENSORS = ("resize_", "resize_as_")
MOVED = (
    "their memory was moved or freed between the boundary and the optimizer's step, by a way that "
    "Tierckpt could not wait for (an extension, or an operation with out=). Do that before the "
    "boundary, i.e. before step() of the checkpointer"
)


class Reader(Protocol):
    """A snapshot, or other work that reads the sources of a plan."""

    @property
    def plan(self) -> CopyPlan: ...

    @property
    def over(self) -> bool: ...

    @property
    def slot(self) -> object | None: ...

    def barrier(self) -> None: ...

    def wait_done(self) -> bool: ...


_copying: dict[int, weakref.ref[Reader]] = {}
"""Snapshots that may be copying, by a number; those that are over go with the next one."""
_numbers = itertools.count()


def guard_memory_moves(snapshot: Reader) -> None:
    """Let the memory of this snapshot's sources stay until it is copied. Training thread, before
    the first block may be copied."""
    _install_guards()
    for number, each in [*_copying.items()]:
        reader = each()
        if reader is None or reader.over:
            _copying.pop(number, None)
    _copying[next(_numbers)] = weakref.ref(snapshot)


def _before_move(storage: torch.UntypedStorage) -> None:
    """Wait for the copies that read this storage. Any thread; raises nothing but an interrupt."""
    for each in [*_copying.values()]:
        snapshot = each()
        if snapshot is not None and not snapshot.over and snapshot.plan.reads(storage):
            snapshot.barrier()
            if snapshot.slot is not None:  # else no block was started
                snapshot.wait_done()  # the barrier does not wait for the threads of a failed one


@functools.cache
def _install_guards() -> None:
    os.register_at_fork(after_in_child=_copying.clear)  # the parent's threads copy
    for name in OF_STORAGES:
        _wrap_move(torch.UntypedStorage, name, lambda storage: storage)
    for name in OF_TENSORS:
        _wrap_move(torch.Tensor, name, torch.Tensor.untyped_storage)


def _wrap_move(kind: type, name: str, storage_of: Callable[[Any], torch.UntypedStorage]) -> None:
    moves = getattr(kind, name, None)
    if moves is None:  # this torch has no such method
        return

    @functools.wraps(moves)
    def waits(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _copying:
            with contextlib.suppress(NotImplementedError):  # a sparse tensor has no storage
                _before_move(storage_of(self))
        return moves(self, *args, **kwargs)

    setattr(kind, name, waits)


_log = logging.getLogger("tierckpt")

RELEASE_AT_ONCE_BYTES = 16 * 1024 * 1024
"""A smaller state is released as a whole: its copy takes a few milliseconds, less than a wake-up of
the copier for each layer would cost the training."""

BIND_PATIENCE_SECONDS = 30.0
"""The barrier waits this long for a slot, then continues the training without the snapshot."""

LOOK_SECONDS = 0.05
"""Interval at which the barrier asks `hopeless`."""

QUIET_SECONDS = 1.0
"""Without a release for this time, the copier stops waiting for releases."""

LINGER_SECONDS = 0.02
"""The copy engine leaves the seal to the barrier, if it starts within this time after the copy: so
short a step would wait for the copier's turn at the interpreter."""

JOIN_PATIENCE_SECONDS = 10.0


class ChooseSlot(Protocol):
    """(blocks, image bytes) -> an unsealed slot of that size. May raise.

    Copier thread, and waits; with `at_once` also the training thread, and raises NoSlotError
    instead of waiting."""

    def __call__(self, blocks: int, image_bytes: int, at_once: bool = False, /) -> Slot:
        """Choose a slot."""
        ...


class PhaseTimer(Struct):
    """Seconds spent on one snapshot, by activity."""

    boundary: float = 0.0
    """Training thread, at the boundary."""
    barrier: float = 0.0
    """Training thread, before the optimizer's step."""
    copy: float = 0.0
    """Copying, all threads."""
    checksum: float = 0.0
    """Hashing copied blocks, all threads."""
    sealed_after: float = 0.0
    """From the boundary to the seal."""

    def as_dict(self) -> dict[str, float]:
        """Values for events."""
        stall = self.boundary + self.barrier
        return {**asdict(self), "stall": stall}


@dataclass(eq=False, repr=False)
class Snapshot:
    """One version on its way into a slot, see the module's text. Each method names its thread."""

    facts: VersionFacts
    plan: CopyPlan
    levels: tuple[str, ...]
    """Levels of the version after the seal: `memory`, and perhaps `local`."""
    node: tree_codec.Packed | None
    """The packed rank tree."""
    arena: tree_codec.Arena | None
    """The tensors in the tree."""
    choose_slot: ChooseSlot
    on_done: Callable[[Any], None]
    """Called once, by the thread that sealed the snapshot or failed it."""
    engine: Engine
    """Copies this version alone."""
    clock: PhaseTimer = field(default_factory=PhaseTimer)
    open: bool = True
    """False once it is sealed or has failed."""
    sealed: bool = False
    error: str = ""
    slot: Slot | None = None
    manifest: Manifest | None = None
    started_seconds: float = field(default_factory=time.monotonic)
    submit: Callable[[Snapshot], None] | None = None
    """Submits the snapshot to a copier; called once, by `start`."""

    overwritten: bool = field(default=False, init=False)
    """True if it failed because its sources were changed during the copy."""
    starved: bool = field(default=False, init=False)
    """True if it failed because no slot could be claimed in `bind_patience_seconds`."""
    bind_patience_seconds: float = field(default=BIND_PATIENCE_SECONDS, init=False)
    hopeless: Callable[[], bool] | None = field(default=None, init=False)
    """Asked by the barrier while there is no slot: True if there will be none."""

    _changed: threading.Condition | None = field(default=None, init=False)
    """Of the lock, once a thread waits."""
    _all_released: bool = field(default=False, init=False)
    _digests: bytes | None = field(default=None, init=False)
    """Those of the engine's blocks, once all are copied."""
    _left: int = field(default=1, init=False)
    """Blocks of the tree that are not copied, and one more for all of the engine's."""
    _in_flight: int = field(default=0, init=False)
    """Number of threads that use the slot."""
    _reporting: bool = field(default=False, init=False)
    _reported: bool = field(default=False, init=False)
    _binding: Binding | None = field(default=None, init=False)
    _header: bytes = field(default=b"", init=False)
    _data_bytes: int = field(default=0, init=False)
    _tree: tree_codec.EncodedTree | None = field(default=None, init=False)
    _tree_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(self.facts.id.version, self.plan)
        self._lock = threading.RLock()
        self._at_once = 0 < self.plan.layout.nbytes <= RELEASE_AT_ONCE_BYTES
        """True: the first released layer releases everything."""
        if not self._at_once:
            self.engine.release(self.plan.own_blocks)
        self._tree_todo: deque[int] = deque()
        """Blocks of the tree; empty until there is a slot."""
        self._tree_digests: list[bytes] = []
        self._counters: bytes | None = self.plan.baseline
        """None once they were compared."""
        guard_memory_moves(self)

    @property
    def failed(self) -> bool:
        """True if it will never be sealed."""
        return not self.open and not self.sealed

    @property
    def over(self) -> bool:
        """True when no thread uses the slot or the sources any more. Any thread."""
        return self._reported

    @property
    def starts_at_once(self) -> bool:
        """True: start at the boundary, not with the first released block."""
        return self.engine.prepares and not self._at_once

    def held_blocks(self) -> set[int]:
        """Blocks that may not be copied yet. Any thread."""
        return self.engine.held()

    # --- training thread -----------------------------------------------------------------------

    def release(self, params: Iterable[torch.Tensor]) -> None:
        """Allow the copy of these parameters' layers from now on."""
        if self._all_released:
            return
        if self._at_once:
            self._release(None)
        else:
            blocks = self.plan.blocks_of
            self._release([b for p in params for b in blocks.get(id(p), ())])

    def release_all(self) -> None:
        """Allow the copy of everything from now on."""
        if not self._all_released:
            self._release(None)

    def _release(self, blocks: Iterable[int] | None) -> None:
        """Allow the copy of these blocks, of all with None, and have the copier start."""
        try:
            with self._lock:  # as `_take_submit`
                submit, self.submit = self.submit, None
            if submit is not None and self._at_once and self._post():
                self._all_released = True
                return
            self.engine.release(blocks)
            self._all_released = blocks is None
            if submit is not None:
                submit(self)
        except BaseException as error:  # as in `barrier`
            self.fail(error)
            raise

    def start(self) -> None:
        """Wake the copier, unless that was done before."""
        submit = self._take_submit()
        if submit is not None:
            submit(self)

    def _take_submit(self) -> Callable[[Snapshot], None] | None:
        """Take the submission, so that only one of several callers makes it. Any thread."""
        with self._lock:
            submit, self.submit = self.submit, None
            return submit

    def _post(self) -> bool:
        """Bind, release all, and leave the copier all work. False if it must bind itself, because
        that takes time. No other thread knows the slot before."""
        try:
            if not self.engine.posts or not self.open or self.watch.each():
                return False
            tail, room = self._encode().whole, self._data_bytes - self.plan.layout.nbytes
            if tail is None or room > BLOCK_BYTES:
                return False
            binding = self._claim(1, True)
            _faults.point("tree", version=self.facts.id.version, block=0)
            self._binding = binding
            if not self.engine.post(binding, self._header, tail, room, self._counters):
                self._binding = None
            return self.engine.posted
        except NoSlotError:
            return False
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
            return True

    def barrier(self) -> None:
        """Return when the optimizer may change the tensors: sealed, given up, or the device will
        have read them before."""
        start = time.perf_counter()
        try:
            _faults.point("barrier", version=self.facts.id.version)
            if not self._all_released:
                self._release(())  # the engine releases the rest
            if self._binding is None:
                self._await_slot()
            while (progress := self.work(None)) is Progress.UNFINISHED:
                pass
            if progress is not Progress.ORDERED and not self._reported:
                self._wait_for(lambda: self._reported or self.failed, None)
        except BaseException as error:  # an interrupt (Ctrl-C): a block may have no copy
            self.fail(error)
            raise
        self.clock.barrier += time.perf_counter() - start
        if self.watch.trace is not None:
            self.watch.span("barrier", start)

    def _await_slot(self) -> None:
        deadline, bound = time.monotonic() + self.bind_patience_seconds, False
        while not bound and time.monotonic() < deadline:
            bound = self._wait_for(lambda: self._binding is not None or not self.open, LOOK_SECONDS)
            if not bound and self.hopeless is not None and self.hopeless():
                break
        if not bound:
            self.starved = True
            self.fail(SnapshotError("no slot could be claimed in time; another rank is stuck"))

    def wait_done(self, timeout_seconds: float | None = None) -> bool:
        """Return True when it is over and `on_done` was called, False after the time-out."""
        self._report()  # if the copier has left since it failed
        return self._wait_for(lambda: self._reported, timeout_seconds)

    def _wait_for(self, reached: Callable[[], bool], timeout_seconds: float | None) -> bool:
        """Wait until this is true, or for so long; returns whether it is. Any thread."""
        with self._lock:
            if reached():
                return True
            if self._changed is None:
                self._changed = threading.Condition(self._lock)
            return self._changed.wait_for(reached, timeout_seconds)

    def _notify(self) -> None:
        """Have waiting threads look again; with the lock held."""
        if self._changed is not None:
            self._changed.notify_all()

    # --- copier thread -------------------------------------------------------------------------

    def run(self) -> None:
        """Copier thread: bind, then copy released blocks until all are copied."""
        try:
            with self.engine.serving():
                while self.open and (progress := self.work(0.0)) is not Progress.COMPLETE:
                    if progress is Progress.IDLE and self.work(QUIET_SECONDS) is Progress.IDLE:
                        self._release_quietly()
        finally:
            self._report()

    def run_if_quiet(self) -> None:
        """Copier thread, when idle: `run`, if no thread has submitted the snapshot within
        `QUIET_SECONDS` of the boundary. If it was posted, complete it here: no barrier has come,
        or it has failed."""
        quiet = time.monotonic() - self.started_seconds >= QUIET_SECONDS
        if self.engine.posted:
            self.run()
        elif quiet and self._take_submit() is not None:
            self._release_quietly()
            self.run()

    def _release_quietly(self) -> None:
        """Release all held blocks, on the copier's thread: the boundary may be followed by a long
        evaluation, in which the node may be preempted.

        Safe at any time: striped tensors do not change before the barrier, and the barrier returns
        only when all blocks are copied, whichever thread released them.
        """
        self.engine.release(None)

    # --- copier thread, and the training thread inside the barrier ------------------------------

    def work(self, wait_seconds: float | None) -> Progress:
        """Copy released blocks, waiting so long for more of them, or else one block of the tree.
        None: help in the barrier. Seals if nothing is left then. The copier binds first.

        COMPLETE: nothing is left to take. IDLE, UNFINISHED, ORDERED: as `Progress`. ABORTED: the
        snapshot is over.
        """
        entered = False
        try:
            with self._lock:
                if not self.open:
                    return Progress.ABORTED
                self._in_flight += 1
                entered = True  # from here on, an interrupt fails the version
            binding = self._binding or self._bind()  # keeps the slot mapped
            engine = self.engine
            progress = engine.help() if wait_seconds is None else engine.run(wait_seconds)
            if progress is Progress.ORDERED:
                self._check_counters()
                return progress
            if progress is Progress.COMPLETE and self._digests is None and self._count():
                self._seal()
            if self._tree_todo and self._copy_tree_block(binding):
                return Progress.UNFINISHED
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

    def _encode(self) -> tree_codec.EncodedTree:
        """Encode the tree, once; sizes of the image are known then."""
        if self._tree is None:
            assert self.arena is not None
            self._tree = tree_codec.EncodedTree(self.node, self.arena)
            self._tree_bytes = self._tree.nbytes
            self._header, self._data_bytes = self.plan.header(self._tree_bytes)
        return self._tree

    def _claim(self, tree_blocks: int, at_once: bool) -> Binding:
        """Claim a slot, which voids its contents. `at_once`: as in `ChooseSlot`."""
        start = time.perf_counter()
        blocks = len(self.plan.layout.blocks) + tree_blocks
        if self.slot is None:  # else the desk was taken
            image_bytes = len(self._header) + self._data_bytes
            self.slot = self.choose_slot(blocks, image_bytes, at_once)
        if self.watch.trace is not None:
            self.watch.span("slot", start)
        _faults.point("refill", version=self.facts.id.version)
        if self.slot.bound is None:
            self.slot.bound = Binding(self.slot)
        binding: Binding = self.slot.bound
        return binding

    def _bind(self) -> Binding:
        """Copier thread: claim a slot, and allow the copy into it."""
        self._encode()
        tree_blocks = len(rank_state_blocks(self._data_bytes - self.plan.layout.nbytes))
        binding = self._claim(tree_blocks, False)
        with self._lock:
            if self.open:
                self.engine.fill(binding, len(self._header), self.watch)
                self._tree_todo.extend(range(tree_blocks))
                self._tree_digests = [b""] * tree_blocks
                self._left += tree_blocks
                self._binding = binding
                self._notify()
        return binding

    def _count(self) -> bool:
        """Count the engine's blocks as copied, once; True if nothing else is left."""
        with self._lock:
            if self._digests is not None:
                return False
            copying, hashing, self._digests = self.engine.results()
            if self.engine.unchanged:
                self._counters = None
            self.clock.copy += copying
            self.clock.checksum += hashing
            self._left -= 1
            return self._left == 0

    def _copy_tree_block(self, binding: Binding) -> bool:
        """Copy a block of the tree; False if another thread has taken the last one."""
        with self._lock:
            if not self._tree_todo:
                return False
            block = self._tree_todo.popleft()
        start = time.perf_counter()
        _faults.point("tree", version=self.facts.id.version, block=block)
        assert self._tree is not None
        low = len(self._header) + self.plan.layout.nbytes
        copied = binding.copy_tree(self._tree, low, len(self._header) + self._data_bytes, block)
        middle = time.perf_counter()
        found = digest(copied)
        with self._lock:
            self._tree_digests[block] = found
            self.clock.copy += middle - start
            self.clock.checksum += time.perf_counter() - middle
            self._left -= 1
            last = self._left == 0
        self.watch.span("tree", start)
        if last:
            self._seal()
        return True

    def _seal(self) -> None:
        """Seal the slot; by the thread that copied the last block."""
        started = time.perf_counter()
        if self._counters is not None:
            self._check_counters()
        if not self.open:
            return
        assert self._digests is not None
        start = len(self._header)
        self.manifest = Manifest(
            facts=self.facts,
            shard=self.plan.layout.rank,
            image_bytes=start + self._data_bytes,
            header_bytes=start,
            rank_state_bytes=self._tree_bytes,
            digests=self._digests if self.engine.posted else self._head_and_tail(self._digests),
            created_seconds=time.time(),
        )
        _faults.point("seal", version=self.facts.id.version)
        assert self.slot is not None
        self.slot.seal(self.manifest.encode())
        _faults.point("sealed", version=self.facts.id.version)
        self.clock.sealed_after = time.monotonic() - self.started_seconds
        if self.watch.trace is not None:
            self.watch.span("seal", started)
        self._end(sealed=True)

    def _check_counters(self) -> None:
        """Raise SnapshotError when a source was changed during the copy: in the barrier and in the
        seal, until one of them finds none. From then on, the optimizer may run."""
        with self._lock:
            before = self._counters
            if before is None or self.plan.counters() == before:
                self._counters = None
                return
            if moved := self.plan.moved():
                raise SnapshotError(f"{some(moved)}: {MOVED}")
            names = self.plan.changed_since(before)
            self.overwritten = True
            raise SnapshotError(
                f"{some(names)}: changed between the boundary and the optimizer's step (the "
                "version counters moved); change weights before the boundary, i.e. before step() "
                "of the checkpointer. If the forward pass itself changes them, make them buffers, "
                f"or set forward_changes='{_parameters(names)}': then they are copied at the "
                "boundary"
            )

    def _head_and_tail(self, digests: bytes) -> bytes:
        """Write the header; return its digest, those of the blocks, and those of the tree."""
        assert self._binding is not None
        self._binding.view[: len(self._header)] = self._header
        return b"".join((digest(self._header), digests, *self._tree_digests))

    # --- its end -------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Give the snapshot up. Any thread."""
        self._end(sealed=False, error=error_text(error))
        self._report()

    def _end(self, sealed: bool, error: str = "") -> None:
        with self._lock:
            if self.open:
                self.sealed, self.error, self.open = sealed, error, False
                self._binding = None
                if not sealed:  # after a seal, waiters wait for the report
                    self._notify()
            sealed = self.sealed
        self.engine.end(sealed)

    def _report(self) -> None:
        """Call `on_done`, once, when the snapshot is over and no thread uses the slot any more."""
        with self._lock:
            if self.open or self._reporting or self._in_flight or self.engine.copying:
                return
            self._reporting = True
        # As large as the state, perhaps.
        self._tree = self.node = self.arena = None
        try:
            self.on_done(self)
        except Exception:  # the training may be what waits here, or what called
            _log.exception("the end of v%d could not be reported", self.facts.id.version)
        finally:
            with self._lock:
                self._reported = True
                self._notify()


def _parameters(names: Iterable[str]) -> str:
    """Parameters of these entries, as the value of a setting."""
    return ", ".join(dict.fromkeys(map(parameter_of, names)))


class Work(Protocol):
    """A job for the copier."""

    def run(self) -> None:
        """Do the job, until it is done."""
        ...

    def fail(self, error: BaseException) -> None:
        """Give up, because `run` raised."""
        ...


class Copier(threading.Thread):
    """The copier thread, one per training process. Executes its jobs in order."""

    def __init__(self, desk: Desk | None = None) -> None:
        """`desk`: where jobs of the copy engine are posted, if there is one."""
        super().__init__(name="tierckpt-copier", daemon=True)
        self.desk = desk
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._expected: deque[weakref.ref[Snapshot]] = deque(maxlen=2)
        """The newest snapshot, and the one before: it may have failed in the middle of a block."""
        self.start()

    def submit(self, work: Work) -> None:
        """Queue a snapshot, or a comparison of replicas."""
        self._queue.put(work)
        if self.desk is not None:
            self.desk.ring()

    def expect(self, snapshot: Snapshot) -> None:
        """Remember a started snapshot that may not be submitted for long: see
        `snapshot.QUIET_SECONDS`. Wakes no thread: the training thread has no time for that."""
        self._expected.append(weakref.ref(snapshot))

    def close(self) -> None:
        """End the thread after all queued jobs."""
        self._queue.put(None)
        if self.desk is not None:
            self.desk.ring()
        # A daemon: another rank may never answer its wait.
        self.join(JOIN_PATIENCE_SECONDS)
        if self.desk is not None and not self.is_alive():
            self.desk.clear()  # a slot still in use cannot be unmapped

    def run(self) -> None:
        """Execute jobs until `close`."""
        while True:
            try:
                work = self._next_work()
            except queue.Empty:
                self._look_at_expected()
                continue
            if work is None:
                return
            _carry_out(work, work.run)

    def _next_work(self) -> Work | None:
        """Wait for work. Raises queue.Empty after a quiet time, and when a posted job needs this
        thread."""
        if self.desk is None:
            return self._queue.get(timeout=QUIET_SECONDS)
        if self._queue.empty():
            progress = self.desk.serve(QUIET_SECONDS, LINGER_SECONDS)
            if progress is not Progress.UNFINISHED:  # first, even if there is work by now
                raise queue.Empty
        return self._queue.get_nowait()

    def _look_at_expected(self) -> None:
        for each in tuple(self._expected):
            if (snapshot := each()) is not None:
                _carry_out(snapshot, snapshot.run_if_quiet)


def _carry_out(work: Work, part: Callable[[], object]) -> None:
    try:
        part()
    except Exception as error:  # e.g. in `on_done`: only this version is lost
        work.fail(error)
