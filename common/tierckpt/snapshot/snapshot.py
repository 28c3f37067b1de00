"""Snapshot: copies one version from live tensors into a slot.

The steps, with their threads:

1. *boundary* (training thread): `CopyPlan.stage` copies buffers and small state aside.

2. *release* (training thread): blocks of a layer may be copied once its allreduce has started. The
first release wakes the copier: at the boundary it would only slow down the forward pass. (As long
as slots must be made, which takes longer, it starts at once.) After one second without a release
(an evaluation may follow the boundary), the copier releases the rest by itself.

3. *bind* (copier thread): wait until some slot may be overwritten, and claim it. (The training
thread does so at the release if it need not wait, see `native_snapshot`.)

4. *copy* (copier thread): each block is copied and then hashed while it is in the core's cache;
blocks of the rank's tree follow when no others are released.

5. *barrier* (training thread, before the optimizer's step): everything is released. The training
thread helps to copy instead of waiting for the copier, and returns when no block is left that the
optimizer could change during its copy.

6. *seal* (the thread that copied the last block, or saw that it was): digests, manifest, seal.

A failure makes the snapshot FAILED, and it is then never sealed. Training is not affected.

`Copier` is the thread that copies snapshots beside the training.

*Memory moves* are torch's operations that give a storage other memory and free what it had. A copy
in progress reads the memory that tensors had at the boundary. Aliases keep their storages, so
`tensor.data = ...`, `tensor.set_()` and `module.to()` are safe: they give the tensor another
storage. A few operations free the memory within a storage, such as `share_memory_()`, which
`multiprocessing` calls for every tensor that it sends, or `resize_()`. `guard` makes these wait
for the copy first, as an optimizer's step does, so the version is exact and nothing reads freed
memory. The wrappers stay in torch's classes, and call torch at once while nothing is copied.
Extensions that free memory without these methods are seen at the seal: see `PlanCheck.counters`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from msgspec import Struct
from msgspec.structs import asdict

from tierckpt import _faults
from tierckpt._text import error_text, some
from tierckpt.format.manifest import Manifest, digest
from tierckpt.format.records import VersionFacts
from tierckpt.format.shard_file import rank_state_blocks
from tierckpt.state import tree_codec
from tierckpt.state.names import parameter_of
from tierckpt.storage.slots import Slot

from .copy_engine import Desk, Progress
from .copy_plan import Binding, CopyPlan
from .phase import Phase

if TYPE_CHECKING:
    from tierckpt.tracing.recorder import Trace

    from .copy_plan import CopyPlan

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


_copying: weakref.WeakValueDictionary[int, Reader] = weakref.WeakValueDictionary()
"""Snapshots that may be copying, by `id()`; those that are over go with the next one."""


def guard_memory_moves(snapshot: Reader) -> None:
    """Let the memory of this snapshot's sources stay until it is copied. Training thread, before
    the first block may be copied."""
    _install_guards()
    for key, each in [*_copying.items()]:
        if each.over:
            _copying.pop(key, None)
    _copying[id(snapshot)] = snapshot


def _before_move(storage: torch.UntypedStorage) -> None:
    """Wait for the copies that read this storage. Any thread; raises nothing but an interrupt."""
    for snapshot in [*_copying.values()]:
        if not snapshot.over and snapshot.plan.reads(storage):
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


class SnapshotError(Exception):
    """Reason for a failed snapshot; reported by an event, never raised in the training loop."""


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


@dataclass
class Snapshot:
    """One version on its way into a slot, see the module's text. Each method names its thread."""

    facts: VersionFacts
    plan: CopyPlan
    levels: tuple[str, ...]
    """Levels of the version after the seal: `memory`, and perhaps `local`."""
    node: tree_codec.Packed | None
    """The packed rank tree."""
    arena: tree_codec.Arena
    """The tensors in the tree."""
    choose_slot: ChooseSlot
    on_done: Callable[[Snapshot], None]
    """Called once, by the thread that sealed the snapshot or failed it."""
    clock: PhaseTimer = field(default_factory=PhaseTimer)
    phase: Phase = Phase.OPEN
    error: str = ""
    slot: Slot | None = None
    manifest: Manifest | None = None
    started_seconds: float = field(default_factory=time.monotonic)
    trace: Trace | None = None
    """Recorder of spans, if there is one."""
    submit: Callable[[Snapshot], None] | None = None
    """Submits the snapshot to a copier; called once, by `start`."""
    starts_at_once = False
    """True: start at the boundary, not with the first released block."""

    def __post_init__(self) -> None:
        blocks = self.plan.layout.blocks
        self.overwritten = False
        """True if it failed because its sources were changed during the copy."""
        self.starved = False
        """True if it failed because no slot could be claimed in `bind_patience_seconds`."""
        self.bind_patience_seconds = BIND_PATIENCE_SECONDS
        self.hopeless: Callable[[], bool] = lambda: False
        """Asked by the barrier while there is no slot: True if there will be none."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # with it, `with` would be Python's code
        self._todo: deque[int] = deque()
        self._held: set[int] = set()
        self._at_once = False
        """True: the first released layer releases everything."""
        self._all_released = False
        self._hold()
        self._tree_todo: deque[int] = deque()
        """Blocks of the tree, numbered after all others; empty until there is a slot."""
        self._left = len(blocks)
        self._in_flight = 0
        """Number of threads that use the slot."""
        self._reporting = self._reported = False
        self._digests: list[bytes] = [b""] * len(blocks)
        self._binding: Binding | None = None
        self._counters = self.plan.baseline
        self._header = b""
        self._data_bytes = 0
        self._tree: tree_codec.EncodedTree | None = None
        self._tree_bytes = 0
        guard_memory_moves(self)

    @property
    def over(self) -> bool:
        """True when no thread uses the slot or the sources any more. Any thread."""
        return self._reported

    def _hold(self) -> None:
        """Start with all striped blocks held."""
        self._todo.extend(self.plan.own_blocks)
        self._held.update(self.plan.striped_blocks)

    # --- training thread -----------------------------------------------------------------------

    def release(self, params: Iterable[torch.Tensor]) -> None:
        """Allow the copy of these parameters' layers from now on."""
        if self._all_released:
            return
        if self._at_once:
            self.release_all()
            return
        blocks = self.plan.blocks_of
        self._release([b for p in params for b in blocks.get(id(p), ())])

    def release_all(self) -> None:
        """Allow the copy of everything from now on."""
        self._let_all_copy()
        self.start()

    def _release(self, blocks: Iterable[int]) -> None:
        self._let_copy(blocks)
        self.start()

    def _let_copy(self, blocks: Iterable[int]) -> None:
        """Queue these blocks, each only once. Any thread."""
        try:
            with self._lock:
                fresh = []
                for block in blocks:
                    if block in self._held:
                        self._held.remove(block)
                        fresh.append(block)
                if fresh:
                    self._todo.extend(fresh)
                    self._changed.notify_all()
        except BaseException as error:  # as in `barrier`
            self.fail(error)
            raise

    def held_blocks(self) -> set[int]:
        """Blocks that may not be copied yet. Any thread."""
        return {*self._held}

    def _let_all_copy(self) -> None:
        with self._lock:
            self._let_copy(sorted(self._held))
            self._all_released = True

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

    def barrier(self) -> None:
        """Return when the optimizer may change the tensors: sealed, or given up."""
        start = time.perf_counter()
        try:
            self._release_rest()
            while self.work():
                pass
            with self._lock:
                if not self._reported:
                    self._changed.wait_for(lambda: self._reported or self.phase is Phase.FAILED)
        except BaseException as error:  # an interrupt (Ctrl-C): a block may have no copy
            self.fail(error)
            raise
        self.clock.barrier += time.perf_counter() - start
        if self.trace is not None:
            self._record("barrier", start)

    def _release_rest(self) -> None:
        """Start the barrier: release everything, and wait for a slot."""
        _faults.point("barrier", version=self.facts.id.version)
        self.release_all()
        if self._binding is not None:
            return
        deadline, bound = time.monotonic() + self.bind_patience_seconds, False
        while not bound and time.monotonic() < deadline:
            with self._lock:
                bound = self._changed.wait_for(
                    lambda: self._binding is not None or self.phase is not Phase.OPEN,
                    LOOK_SECONDS,
                )
            if not bound and self.hopeless():
                break
        if not bound:
            self.starved = True
            self.fail(SnapshotError("no slot could be claimed in time; another rank is stuck"))

    def wait_done(self, timeout_seconds: float | None = None) -> bool:
        """Return True when it is over and `on_done` was called, False after the time-out."""
        self._report()  # if the copier has left since it failed
        with self._lock:
            return self._changed.wait_for(lambda: self._reported, timeout_seconds)

    # --- copier thread, and the training thread inside the barrier ------------------------------

    def _enter(self) -> bool:
        """Register a user of the slot; False when the snapshot is over."""
        with self._lock:
            if self.phase is not Phase.OPEN:
                return False
            self._in_flight += 1
            return True

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        """Wrap the use of the slot after `_enter`: an error fails the snapshot."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._leave()

    def _leave(self) -> None:
        """Unregister a user of the slot; after the last one, the slot is given back."""
        with self._lock:
            self._in_flight -= 1
        self._report()

    def _encode(self) -> tree_codec.EncodedTree:
        """Encode the tree, once; sizes of the image are known then."""
        if self._tree is None:
            self._tree = tree_codec.EncodedTree(self.node, self.arena)
            self._tree_bytes = self._tree.nbytes
            self._header, self._data_bytes = self.plan.header(self._tree_bytes)
        return self._tree

    def bind(self) -> None:
        """Claim a slot, which voids its contents; copier thread only."""
        if self._binding is not None or not self._enter():
            return
        with self._leaving():
            self._encode()
            others = len(self.plan.layout.blocks)
            blocks = others + len(rank_state_blocks(self._data_bytes - self.plan.layout.nbytes))
            start = time.perf_counter()
            if self.slot is None:
                self.slot = self.choose_slot(blocks, len(self._header) + self._data_bytes)
            self._record("slot", start)
            _faults.point("refill", version=self.facts.id.version)
            binding = Binding(self.slot)
            self._bound(binding)
            with self._lock:
                if self.phase is Phase.OPEN:
                    self._tree_todo.extend(range(others, blocks))
                    self._digests += [b""] * (blocks - others)
                    self._left += blocks - others
                    self._binding = binding
                    self._changed.notify_all()

    def _bound(self, binding: Binding) -> None:
        """Prepare the copy into this slot; no thread copies yet."""

    def work(self) -> bool:
        """Copy one released block, or else one of the tree; False if there is none."""
        return self._work(self._todo) or self._work(self._tree_todo)

    def _work(self, todo: deque[int]) -> bool:
        """Copy one block of `todo`; False if there is none."""
        entered = False
        try:
            with self._lock:
                binding = self._binding
                if self.phase is not Phase.OPEN or not todo or binding is None:
                    return False
                self._in_flight += 1
                entered = True  # from here on, an interrupt fails the version
                block = todo.popleft()
            self._copy_and_digest(binding, block)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise  # a KeyboardInterrupt in the barrier
        finally:
            if entered:  # without a call: an interrupt may come at its start
                with self._lock:
                    self._in_flight -= 1
                self._report()
        return True

    def _copy_and_digest(self, binding: Binding, block: int) -> None:
        start = time.perf_counter()
        copied = self._copy(binding, block)
        middle = time.perf_counter()
        found = digest(copied)
        with self._lock:
            self._digests[block] = found
            self.clock.copy += middle - start
            end = time.perf_counter()
            self.clock.checksum += end - middle
            self._left -= 1
            last = self._left == 0
        self._record_copy(block, start, end)
        if last:
            self._seal()

    def _copy(self, binding: Binding, block: int) -> memoryview:
        number = block - len(self.plan.layout.blocks)
        if number < 0:
            _faults.point("copy", version=self.facts.id.version, block=block)
            return binding.copy_block(self.plan, block, len(self._header))
        _faults.point("tree", version=self.facts.id.version, block=number)
        assert self._tree is not None
        low, high = self._tree_range()
        return binding.copy_tree(self._tree, low, high, number)

    def _tree_range(self) -> tuple[int, int]:
        """Start of the tree in the image, and end of its padding."""
        start = len(self._header)
        return start + self.plan.layout.nbytes, start + self._data_bytes

    def run(self) -> None:
        """Copier thread: bind, then copy released blocks until the snapshot is done."""
        self.bind()
        while self.phase is Phase.OPEN:
            if not self.work():
                self._await_release()

    def run_if_quiet(self) -> None:
        """Copier thread, when idle: `run`, if no thread has submitted the snapshot within
        `QUIET_SECONDS` of the boundary."""
        quiet = time.monotonic() - self.started_seconds >= QUIET_SECONDS
        if quiet and self._take_submit() is not None:
            self._release_quietly()
            self.run()

    def _await_release(self) -> None:
        """Copier thread: wait until there may be work. After `QUIET_SECONDS` without a release (as
        in a long evaluation, in which the node may be preempted) it releases everything."""
        with self._lock:
            if not self._nothing_to_do() or self._changed.wait(QUIET_SECONDS):
                return
        self._release_quietly()

    def _nothing_to_do(self) -> bool:
        """True if no block may be copied now. With the lock held."""
        return not (self._todo or self._tree_todo) and self.phase is Phase.OPEN

    def _release_quietly(self) -> None:
        """Release all held blocks, on the copier's thread.

        Safe at any time: striped tensors do not change before the barrier, and the barrier returns
        only when all blocks are copied, whichever thread released them. A barrier at the same time
        is safe as well: it empties the queue that this fills.
        """
        self._let_all_copy()

    def _seal(self) -> None:
        """Seal the slot; by the thread that copied the last block."""
        started = time.perf_counter()
        self._check_before_seal()
        start = len(self._header)
        self.manifest = Manifest(
            facts=self.facts,
            shard=self.plan.layout.rank,
            image_bytes=start + self._data_bytes,
            header_bytes=start,
            rank_state_bytes=self._tree_bytes,
            digests=self._image_digests(),
            created_seconds=time.time(),
        )
        _faults.point("seal", version=self.facts.id.version)
        assert self.slot is not None
        self.slot.seal(self.manifest.encode())
        _faults.point("sealed", version=self.facts.id.version)
        self.clock.sealed_after = time.monotonic() - self.started_seconds
        if self.trace is not None:
            self._record("seal", started)
        self._end(Phase.SEALED)

    def _check_before_seal(self) -> None:
        self._check_counters()

    def _check_counters(self) -> None:
        """Raise SnapshotError when a source was changed during the copy."""
        if self.plan.counters() != self._counters:
            if moved := self.plan.moved():
                raise SnapshotError(f"{some(moved)}: {MOVED}")
            names = self.plan.changed_since(self._counters)
            self.overwritten = True
            raise SnapshotError(
                f"{some(names)}: changed between the boundary and the optimizer's step (the "
                "version counters moved); change weights before the boundary, i.e. before step() "
                "of the checkpointer. If the forward pass itself changes them, make them buffers, "
                f"or set forward_changes='{_parameters(names)}': then they are copied at the "
                "boundary"
            )

    def _image_digests(self) -> bytes:
        """Write the header; return its digest and those of all blocks, in order."""
        assert self._binding is not None
        self._binding.view[: len(self._header)] = self._header
        return b"".join((digest(self._header), *self._digests))

    def _record_copy(self, block: int, start_seconds: float, end_seconds: float) -> None:
        if self.trace is None:
            return
        version = self.facts.id.version
        if block >= len(self.plan.layout.blocks):
            self.trace.span("tree", start_seconds, end_seconds, version=version)
        else:
            self.trace.copied(version, self.plan, (block,), start_seconds, end_seconds)

    def _record(self, kind: str, start_seconds: float) -> None:
        """Record a span that ends now."""
        if self.trace is not None:
            now = time.perf_counter()
            self.trace.span(kind, start_seconds, now, version=self.facts.id.version)

    def fail(self, error: BaseException) -> None:
        """Give the snapshot up. Any thread."""
        self._end(Phase.FAILED, error_text(error))
        self._report()

    def _end(self, phase: Phase, error: str = "") -> None:
        with self._lock:
            if self.phase is Phase.OPEN:
                self.phase, self.error = phase, error
                self._binding = None
                if phase is Phase.FAILED:  # after a seal, waiters wait for the report
                    self._changed.notify_all()

    def _is_in_use(self) -> bool:
        """True while a thread uses the slot. With the lock held."""
        return self._in_flight > 0

    def _report(self) -> None:
        """Call `on_done`, once, when the snapshot is over and no thread uses the slot any more."""
        with self._lock:
            if self.phase is Phase.OPEN or self._reporting or self._is_in_use():
                return
            self._reporting = True
        # As large as the state, perhaps.
        self._tree, self.node, self.arena = None, None, tree_codec.Arena()
        try:
            self.on_done(self)
        except Exception:  # the training may be what waits here, or what called
            _log.exception("the end of v%d could not be reported", self.facts.id.version)
        finally:
            with self._lock:
                self._reported = True
                self._changed.notify_all()


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
