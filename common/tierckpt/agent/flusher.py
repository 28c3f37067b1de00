"""The agent's flusher: local shards to the persistent level, one version after the other.

A node's shards of a version are flushed together, from the files of the local level, when the
version is complete there on all ranks: the files are durable and do not change, and no slot waits
for a slow store. Retention of the local level keeps the shards of versions that are to be flushed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from tierckpt._text import in_words
from tierckpt.codecs.codec import Pipeline
from tierckpt.core.levels import PERSISTENT
from tierckpt.core.retention import milestones
from tierckpt.format.ids import VersionName
from tierckpt.storage.local import LocalStore
from tierckpt.storage.marks import NewPins
from tierckpt.storage.persistent import (
    FlushCancelledError,
    FlushPacer,
    FlushResult,
    Lease,
    LeaseHeldError,
    PersistentError,
    PersistentStore,
    RetentionPolicy,
    RetryPolicy,
    Throttle,
    TimeSlots,
)
from tierckpt.storage.persistent.backend import (
    NAP_SECONDS,
    WINDOW_BYTES,
    Clock,
    SystemClock,
    lacks_room,
)
from tierckpt.storage.persistent.lease import LEASE_SECONDS, LeaseKeeper

from .protocol import (
    AgentMessage,
    Flushed,
    FlushFailed,
    FlushOrder,
    PersistentSettings,
    Problem,
    TaskStatus,
)
from .shard_sources import Bases, LostBaseError, ShardGuard, open_base, open_source
from .status import Task

FIRST_PAUSE_SECONDS, HELD_RETRY_SECONDS = 0.1, 5.0
"""Pauses before a lease that is held is tried again: the first, doubling up to the second."""
LEASE_PATIENCE_SECONDS = 2 * LEASE_SECONDS
"""A dead run's lease has ended after this time: a lease that is still held is a live run's."""
FIRST_NODE_SECONDS = 60.0
"""Time that other nodes wait for the first node's lease in a place that was never used."""
MOST_ROUNDS, ROUND_SECONDS = 4, 30.0
"""Number of attempts for a whole version while its store has trouble that may pass, and the time
between them."""
STILL_UNDER_WAY = 2
"""Number of versions before the present one that other nodes may still be flushing."""
CANCELLED = "the agent shuts down to make room for a later run's agent"
MOST_SUPERSEDED = 2
"""Number of flushes in a row that newer versions may replace; without a limit none might complete.
"""


Answer = Callable[[AgentMessage], None]


class Flusher:
    """The flusher of one node and place. Any thread may call `order`; its own thread flushes.

    Transient errors are retried: first by the store, call by call, then for the version as a whole,
    whose finished parts stay. The number of attempts is limited, as other versions wait. A version
    that still fails is given up, and the next one is tried as usual.
    """

    def __init__(
        self,
        settings: PersistentSettings,
        held: ShardGuard,
        on_idle: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        """`on_idle` is called by the flushing thread whenever no work is left."""
        self.settings = settings
        self.held = held
        self._on_idle = on_idle
        self._clock: Clock = clock or SystemClock()
        self.went_on_at = time.monotonic()
        """Time when a flush last made progress, or waited as planned, for example for a window."""
        self._changed = threading.Condition()
        self._orders: deque[tuple[FlushOrder, Answer]] = deque()
        self._thread: threading.Thread | None = None
        self._store: PersistentStore | None = None
        self._lease: Lease | None = None
        self._keeper = LeaseKeeper(lambda: self._make_store(RetryPolicy(tries=1)))
        self._resting = False
        """No trainer of this node runs, so the lease need not be kept between flushes."""
        self._cancelled = False
        """Permanent, see `cancel`."""
        self._throttle: Throttle | None = None
        """Limit of all flushes together: many small flushes get no more bandwidth than a large one.
        """
        self._bases = Bases(lambda name: self._store is not None and self._store.exists(name))
        self._now: tuple[FlushOrder, Answer] | None = None
        """The flush under way."""
        self._task: Task | None = None
        """The same flush, for those that ask for its progress."""
        self._warned: set[str] = set()
        """Warnings of this flush that need not be repeated."""
        self._arrivals = NewPins()
        self._unproved: list[VersionName] = []
        """Versions that were not yet complete when this node's parts were."""
        self._last_stored: VersionName | None = None

    def order(self, order: FlushOrder, answer: Answer) -> None:
        """Flush a version after those ordered before; `answer` is called with the result.

        The trainers limit how many versions wait: they order alike on all nodes (see `promotion`).
        Raises RuntimeError where no thread can be started, and after `cancel`; then nothing is
        ordered.
        """
        with self._changed:
            if self._cancelled:
                raise RuntimeError(CANCELLED)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="tierckpt-flusher", daemon=True)
                thread.start()  # RuntimeError: no more threads; nothing was ordered then
                self._thread = thread
                self._go_on()
            self._resting = False
            self.held.add(order.keys)
            self._orders.append((order, answer))

    def busy(self) -> bool:
        """True while a version is being flushed or waits."""
        return self._thread is not None and not self._cancelled

    def quiet_seconds(self) -> float:
        """Return the time since the work under way last made progress; 0.0 without. Any thread."""
        return max(time.monotonic() - self.went_on_at, 0.0) if self.busy() else 0.0

    def status(self) -> tuple[TaskStatus | None, int]:
        """The flush under way, and the number of versions that wait for it. Any thread."""
        with self._changed:
            task = self._task if self.busy() else None
            return task.status() if task else None, len(self._orders)

    def close(self) -> None:
        """Stop renewing the lease; release it if all nodes have finished."""
        if not self._cancelled:  # a process waiting for this agent's end does not wait for a store
            self._keeper.close(self._last())

    def cancel(self) -> list[int]:
        """Give up the flush under way and all that wait, as if this process were killed: parts that
        are stored stay. From now on the lease is neither taken nor renewed, and no order is
        accepted. Returns the versions given up. Any thread; waits for nothing."""
        self.rest()
        with self._changed:
            now = [self._now] if self._now is not None and self.busy() else []
            given_up = [order.id.version for order, _ in (*now, *self._orders)]
            self._cancelled = True
            self._orders.clear()
            if self._lease is not None:
                self._lease.abandon()
        return given_up

    def rest(self) -> None:
        """Record that no trainer of this node runs: only flushes renew the lease, and it is
        released if all nodes have finished. Until the next order. Any thread; waits for nothing."""
        with self._changed:
            self._resting = True
            self._keeper.rest(self._last())

    def _last(self) -> VersionName | None:
        """Return the version flushed last, if nothing is under way."""
        return self._now[0].name if self._now is not None and not self.busy() else None

    # --- one version after the other -----------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._orders:
                    self._thread = None
                    break
                order, answer = self._now = self._orders.popleft()
                self._task = Task(PERSISTENT, order.id)
            self._warned.clear()
            try:
                answer(self._flushed(order))
            finally:
                self.held.discard(order.keys)
        self._on_idle()

    def _flushed(self, order: FlushOrder) -> Flushed | FlushFailed:
        """Flush a version, and apply retention to older ones; return the answer."""
        try:
            said = self._flush_patiently(order)
        except Exception as error:  # any error of a store's client costs this version only
            if not self._exists(order):
                return self._failed(order, error)
            said = Flushed(order.id, 0, 0.0, complete=True)  # the commit was complete
        if said.complete:
            self._arrivals.add(order.directory, order.name)
            self._retain(order)
        return said

    def _flush_patiently(self, order: FlushOrder) -> Flushed:
        rounds = 1
        while True:
            try:
                return self._flush(order)
            except PersistentError as error:
                if not error.transient or rounds == MOST_ROUNDS or self._orders:
                    raise
                self._warn(
                    f"{order.id}: {error}. Parts stored so far stay; the whole version is tried "
                    f"again in {ROUND_SECONDS:g} s"
                )
            self._pause(ROUND_SECONDS)
            rounds += 1

    def _failed(self, order: FlushOrder, error: Exception) -> FlushFailed:
        if isinstance(error, PersistentError) and not (error.transient or self._cancelled):
            with contextlib.suppress(Exception):  # it will never be complete: its room is needed
                self._open(order).give_up(order.name)
            if lacks_room(error):  # no complete version would ever trigger retention
                self._retain(order, complete=False)
        superseded = isinstance(error, FlushCancelledError) and self._superseded()
        return FlushFailed(order.id, in_words(error), superseded)

    def _exists(self, order: FlushOrder) -> bool:
        """Whether the version exists, as far as this node can see."""
        with contextlib.suppress(Exception):
            return self._store is not None and self._store.exists(order.name)
        return False

    def _retain(self, order: FlushOrder, complete: bool = True) -> None:
        """Remove old versions. A failure here does not affect the version just flushed, which may
        be `complete` or not."""
        self._go_on()
        if self._cancelled:
            return
        policy = retention_policy(self.settings)
        try:
            store = self._open(order)
            self._arrivals.pin(store)
            if complete:
                store.retain(policy, order.name, self._lease)
            else:
                store.make_room(policy, order.facts, self._lease)
        except Exception as error:
            why = in_words(error)
            self._warn(f"some older versions could not be removed; the next flush retries: {why}")

    # --- one version ---------------------------------------------------------------------------

    def _flush(self, order: FlushOrder) -> Flushed:
        begin = self._clock.monotonic()
        self._go_on()
        store = self._open(order)
        lease = self._wait_for_lease(store, order)
        with contextlib.suppress(PersistentError):  # it concerns older versions only
            self._look_back(store, order)
        try:
            result = self._write(store, order, lease)
        except LostBaseError as error:
            self._warn(f"{order.id} is stored whole: {error}")
            self._bases.forget()
            result = self._write(store, order, lease)
        if result.committed:
            self._unproved.clear()
        elif order.name not in self._unproved:
            self._unproved.append(order.name)
        nbytes = result.written_bytes + result.reused_bytes
        seconds = self._clock.monotonic() - begin
        return Flushed(order.id, nbytes, seconds, result.committed)

    def _write(self, store: PersistentStore, order: FlushOrder, lease: Lease) -> FlushResult:
        # A new pipeline for each flush: the key in a file may have changed.
        pipeline = Pipeline.of_setting(self.settings.codecs, "persistent_codecs")
        if pipeline.delta and not self._stays(order):
            pipeline = pipeline.whole()  # it goes soon, and would keep its base, or is one
        largest = pipeline.most_bytes(order.largest_bytes) if pipeline else order.largest_bytes
        local, open_it = LocalStore(order.directory), partial(open_base, store)
        with contextlib.ExitStack() as stack:
            sources = []
            for key in order.keys:
                base = self._bases.base_of(key.shard, pipeline.full_every)
                opened = open_source(local, key, pipeline, base, open_it)
                sources.append(stack.enter_context(opened))
            pacer = self._counted(self._pacer(lease), sum(each.most_bytes for each in sources))
            result = store.flush(order.facts, largest, sources, pacer)
            if pipeline.full_every:
                for source in sources:
                    self._bases.wrote(source)
        self._last_stored = order.name
        return result

    def _stays(self, order: FlushOrder) -> bool:
        """Whether `keep_every` keeps the version. The run's first one counts only if it is a
        multiple: the versions before it are not looked at."""
        last, version = self._last_stored, order.id.version
        before = last.id.version if last and last.run_id == order.name.run_id else version
        return version in milestones({min(before, version - 1), version}, self.settings.keep_every)

    def _pacer(self, lease: Lease) -> FlushPacer:
        settings = self.settings
        if settings.bytes_per_second and self._throttle is None:
            now = self._clock.monotonic()
            self._throttle = Throttle(settings.bytes_per_second, WINDOW_BYTES, now)
        turns = TimeSlots(settings.node, settings.nodes, settings.nodes_at_once)

        def keep() -> None:
            lease.keep()
            self._go_on()

        return FlushPacer(self._throttle, turns, self._superseded, keep, self._clock)

    def _counted(self, pacer: FlushPacer, total_bytes: int) -> Callable[[int], None]:
        """The pacer, which also counts the bytes of this attempt."""
        task = self._task
        if task is None:
            return pacer
        task.restart(total_bytes)

        def pace(nbytes: int) -> None:
            pacer(nbytes)
            task.advance(nbytes)

        return pace

    def _make_store(self, retry: RetryPolicy | None = None) -> PersistentStore:
        settings = self.settings
        how = (settings.shards_per_file, settings.read_back, retry, self._sleep, self._retried)
        return PersistentStore(settings.path, *how, **settings.options())

    def _open(self, order: FlushOrder) -> PersistentStore:
        """Return the store, opened by the first flush. The first node creates it: if another node
        does not see it then, it is not mounted there."""
        if self._store is None:
            store = self._make_store()
            if not self.settings.node:
                store.create()
            store.clean()
            self._store = store
        return self._store

    def _wait_for_lease(self, store: PersistentStore, order: FlushOrder) -> Lease:
        """Wait for this run's lease on the place; after a job was killed, its lease must end first.

        Raises LeaseHeldError when that takes much longer, and FileNotFoundError when the first node
        has not created the place after a long wait.
        """
        first, owner = not self.settings.node, f"{order.facts.job} on {order.node}"
        if self._lease is None or self._lease.run_id != order.name.run_id:
            self._lease = store.lease(order.name.run_id, owner, self._clock, begins=first)
        begin, pause = self._clock.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            if self._cancelled:
                raise FlushCancelledError(CANCELLED)
            try:
                self._lease.ensure()
            except (LeaseHeldError, FileNotFoundError) as error:
                held = isinstance(error, LeaseHeldError)
                patience_seconds = LEASE_PATIENCE_SECONDS if held else FIRST_NODE_SECONDS
                waited_seconds = self._clock.monotonic() - begin
                # A newer version is enough; but of many nodes some come before the first one, in
                # every run, and its lease is about to be there.
                soon = not (held or self._lease.was_held or self._superseded())
                if waited_seconds >= patience_seconds or (self._orders and not soon):
                    raise
                if held:
                    self._warn(f"{order.id} waits: {error}", "waits for the lease")
            else:
                with self._changed:
                    if first and not self._resting:
                        self._keeper.keep(order.name.run_id, owner)
                return self._lease
            if soon:
                self._clock.sleep(min(pause, NAP_SECONDS))
            else:
                self._pause(pause)
            pause = min(2 * pause, HELD_RETRY_SECONDS)

    def _look_back(self, store: PersistentStore, order: FlushOrder) -> None:
        """Warn about versions that other nodes did not complete, and remove their parts, which
        would fill the place while one node keeps failing.

        The last two are exempt: with `when_busy="wait"` other nodes may still flush the last one,
        and at the job's end, where waiting versions are ordered at once, the one before it. Exempt
        are also those that other nodes may still give up for newer ones. The first node removes a
        version; if it cannot, the second does so one version later, and so on.
        """
        self._unproved = [n for n in self._unproved if n.run_id == order.name.run_id]
        others = [n for n in self._unproved if n != order.name]  # the present one may be retried
        if not others:
            return
        if store.exists(others[-1]):
            self._unproved.clear()
            return
        drops = self.settings.drop_superseded
        if len(others) <= STILL_UNDER_WAY + self.settings.node + (MOST_SUPERSEDED if drops else 0):
            return
        self._unproved.remove(others[0])
        if others[0] not in store.incomplete() or not store.give_up(others[0]):
            return
        if not drops:  # else it was given up as planned
            self._warn(
                f"v{others[0].id.version} is not complete in {store.url}, though this node's part "
                "was stored: another node fails, or sees another place. The parts of the version "
                "are removed"
            )

    # --- waiting and warnings ------------------------------------------------------------------

    def _superseded(self) -> bool:
        return self._cancelled or (self.settings.drop_superseded and bool(self._orders))

    def _sleep(self, seconds: float) -> None:
        """Wait between two attempts of a call to the store. The lease is not renewed: that is
        another call."""
        FlushPacer(superseded=self._superseded, keep=self._go_on, clock=self._clock).sleep(seconds)

    def _pause(self, seconds: float) -> None:
        """Wait until the time is over, or a newer version waits."""
        end = self._clock.monotonic() + seconds
        while not (self._orders or self._cancelled) and (left := end - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left, NAP_SECONDS))
            self._go_on()

    def _go_on(self) -> None:
        self.went_on_at = time.monotonic()

    def _retried(self, text: str) -> None:
        if self._now is not None:
            self._warn(f"{self._now[0].id}: {text}", "retry")

    def _warn(self, text: str, kind: str = "") -> None:
        """Send a warning to the trainer; one of a `kind` per flush, and each text once. Any thread:
        parts of a shard are sent by several."""
        if self._now is None:
            return
        order, answer = self._now
        warning = f"{order.id} {kind}" if kind else text
        with self._changed:
            is_new = warning not in self._warned
            self._warned.add(warning)
        if is_new:
            answer(Problem(text, level="persistent", severity=logging.WARNING))


def retention_policy(settings: PersistentSettings) -> RetentionPolicy:
    """The policy of the persistent level."""
    kept = (settings.keep_last, settings.keep_every, settings.keep_best)
    return RetentionPolicy(*kept, best_is_low=settings.best == "lowest")


__all__ = ["Flusher", "retention_policy"]
