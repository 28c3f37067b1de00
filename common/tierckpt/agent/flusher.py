"""The agent's flusher: local shards to the persistent level, one version after the other.

A node's shards of a version are flushed together, from the files of the local level, when the
version is complete there on all ranks: what the flush reads is durable and does not change, and no
slot waits for a slow store. Retention of the local level leaves alone what is held here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from tierckpt.codecs.pipeline import Pipeline
from tierckpt.storage.local.store import LocalStore
from tierckpt.storage.persistent import (
    FlushCancelledError,
    FlushPacer,
    Lease,
    LeaseHeldError,
    PersistentError,
    PersistentStore,
    RetentionPolicy,
    RetryPolicy,
    Throttle,
    TimeSlots,
    VersionName,
)
from tierckpt.storage.persistent.backend import WINDOW_BYTES
from tierckpt.storage.persistent.clock import Clock, SystemClock
from tierckpt.storage.persistent.lease import LEASE_SECONDS
from tierckpt.storage.persistent.lease_keeper import LeaseKeeper
from tierckpt.storage.persistent.pins import NewPins
from tierckpt.storage.persistent.rate_limit import NAP_SECONDS
from tierckpt.storage.persistent.retry import lacks_room

from .flush_sources import Bases, open_source
from .protocol import AgentMessage, Flushed, FlushFailed, FlushOrder, PersistentSettings, Problem
from .shard_guard import ShardGuard

FIRST_PAUSE_SECONDS, HELD_RETRY_SECONDS = 0.1, 5.0
"""A lease that is not to be had is asked about again after this, doubling up to that."""
LEASE_PATIENCE_SECONDS = 2 * LEASE_SECONDS
"""A dead run's lease has ended by then: whoever has it lives."""
FIRST_NODE_SECONDS = 60.0
"""So long the other nodes wait for the first one's lease in a place that nobody ever used."""
MOST_ROUNDS, ROUND_SECONDS = 4, 30.0
"""So often a version is tried as a whole while its store has trouble that may pass, and the time
between."""
STILL_UNDER_WAY = 2
"""So many versions before the one that a node is at may be under way on others."""
CANCELLED = "the agent shuts down for a later start's"
MOST_SUPERSEDED = 2
"""So many flushes in a row may be given up for newer versions: else none would ever be complete."""


Answer = Callable[[AgentMessage], None]


class Flusher:
    """One a node and place. `order` may be called by any thread; a thread of its own flushes.

    What passes is tried again: first by the store, call by call, then the version as a whole, whose
    parts stay; not without end, as other versions wait. A version that cannot be had is given up,
    and the next one is tried as usual.
    """

    def __init__(
        self,
        settings: PersistentSettings,
        held: ShardGuard,
        on_idle: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        """`on_idle` is called, by the flushing thread, whenever nothing is left to do."""
        self.settings = settings
        self.held = held
        self._on_idle = on_idle
        self._clock: Clock = clock or SystemClock()
        self.went_on_at = time.monotonic()
        """When a flush last got on, or waited as it should: before a window, say."""
        self._changed = threading.Condition()
        self._orders: deque[tuple[FlushOrder, Answer]] = deque()
        self._thread: threading.Thread | None = None
        self._store: PersistentStore | None = None
        self._lease: Lease | None = None
        self._keeper = LeaseKeeper(lambda: self._make_store(RetryPolicy(tries=1)))
        self._resting = False
        """No trainer lives here for whom the lease would be kept between flushes."""
        self._cancelled = False
        """For good: see `cancel`."""
        self._throttle: Throttle | None = None
        """Of all flushes: the node's bandwidth is no larger for many small ones."""
        self._bases = Bases(lambda name: self._store is not None and self._store.exists(name))
        self._now: tuple[FlushOrder, Answer] | None = None
        """What is being flushed."""
        self._told: set[str] = set()
        """What need not be said again of this flush."""
        self._arrivals = NewPins()
        self._unproved: list[VersionName] = []
        """Versions whose other parts were still to come when this node's were there."""

    def order(self, order: FlushOrder, answer: Answer) -> None:
        """Flush a version after those ordered before; `answer` is called with how it went.

        How many wait is the trainers' affair: they order alike on all nodes (see `promotion`).
        Raises RuntimeError, and has nothing to do, where there may be no more threads, and after
        `cancel`.
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
        """True while something is flushed or waits."""
        return self._thread is not None and not self._cancelled

    def quiet_seconds(self) -> float:
        """How long what is under way has not got on; 0.0 where nothing is. Any thread."""
        return max(time.monotonic() - self.went_on_at, 0.0) if self.busy() else 0.0

    def close(self) -> None:
        """The lease is renewed no more, and given back if all nodes are through."""
        if not self._cancelled:  # who waits for our end does not for the store's
            self._keeper.close(self._last())

    def cancel(self) -> list[int]:
        """Give up what is under way and what waits, as if this process were killed: what there is
        of it stays. The lease is neither taken nor renewed from now on, and nothing is ordered any
        more. Returns the versions. Any thread; waits for nothing."""
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
        """No trainer of this node lives: the lease is renewed by flushes alone, and given back if
        all nodes are through. Until the next order; any thread; waits for nothing."""
        with self._changed:
            self._resting = True
            self._keeper.rest(self._last())

    def _last(self) -> VersionName | None:
        """What was flushed last, if nothing is under way."""
        return self._now[0].name if self._now is not None and not self.busy() else None

    # --- one version after the other -----------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._orders:
                    self._thread = None
                    break
                order, answer = self._now = self._orders.popleft()
            self._told.clear()
            try:
                answer(self._flushed(order))
            finally:
                self.held.discard(order.keys)
        self._on_idle()

    def _flushed(self, order: FlushOrder) -> Flushed | FlushFailed:
        """Flush it, and see to older ones; returns the answer."""
        try:
            said = self._flush_patiently(order)
        except Exception as error:  # whatever a store's client raises costs this version only
            if not self._exists(order):
                return self._failed(order, error)
            said = Flushed(order.id, 0, 0.0, complete=True)  # the commit was done
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
                    f"{order.id}: {error}. What is there of it stays; all is tried again in "
                    f"{ROUND_SECONDS:g} s"
                )
            self._pause(ROUND_SECONDS)
            rounds += 1

    def _failed(self, order: FlushOrder, error: Exception) -> FlushFailed:
        if isinstance(error, PersistentError) and not (error.transient or self._cancelled):
            with contextlib.suppress(Exception):  # it will never be whole: its room is wanted
                self._open(order).give_up(order.name)
            if lacks_room(error):  # no version that is complete would ever see to that
                self._retain(order, complete=False)
        superseded = isinstance(error, FlushCancelledError) and self._superseded()
        return FlushFailed(order.id, f"{type(error).__name__}: {error}", superseded)

    def _exists(self, order: FlushOrder) -> bool:
        """The version, as far as one can see."""
        with contextlib.suppress(Exception):
            return self._store is not None and self._store.exists(order.name)
        return False

    def _retain(self, order: FlushOrder, complete: bool = True) -> None:
        """What fails here does not concern the version, whether it is `complete` or not."""
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
            why = f"{type(error).__name__}: {error}"
            self._warn(f"not all older versions could be removed, the next one tries again: {why}")

    # --- one version ---------------------------------------------------------------------------

    def _flush(self, order: FlushOrder) -> Flushed:
        begin = self._clock.monotonic()
        self._go_on()
        store = self._open(order)
        lease = self._wait_for_lease(store, order)
        with contextlib.suppress(PersistentError):  # it concerns older versions only
            self._look_back(store, order)
        # Made anew for each: a key in a file may be another one by now.
        pipeline = Pipeline.of_setting(self.settings.codecs, "persistent_codecs")
        largest = pipeline.most_bytes(order.largest_bytes) if pipeline else order.largest_bytes
        local = LocalStore(order.directory)
        with contextlib.ExitStack() as stack:
            sources = []
            for key in order.keys:
                base = self._bases.base_of(key.shard, pipeline.full_every)
                sources.append(stack.enter_context(open_source(local, key, pipeline, base)))
            result = store.flush(order.facts, largest, sources, self._pacer(lease))
            for source in sources:
                self._bases.wrote(source)
        if result.committed:
            self._unproved.clear()
        elif order.name not in self._unproved:
            self._unproved.append(order.name)
        nbytes = result.written_bytes + result.reused_bytes
        seconds = self._clock.monotonic() - begin
        return Flushed(order.id, nbytes, seconds, result.committed)

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

    def _make_store(self, retry: RetryPolicy | None = None) -> PersistentStore:
        settings = self.settings
        how = (settings.shards_per_file, settings.read_back, retry, self._sleep, self._retried)
        return PersistentStore(settings.path, *how, **settings.options())

    def _open(self, order: FlushOrder) -> PersistentStore:
        """The store, opened by the first flush, and made by the first node's: what another node
        does not see then is not mounted there."""
        if self._store is None:
            store = self._make_store()
            if not self.settings.node:
                store.create()
            store.clean()
            self._store = store
        return self._store

    def _wait_for_lease(self, store: PersistentStore, order: FlushOrder) -> Lease:
        """The place is this run's alone; after a job was killed that takes its lease's time.

        Raises LeaseHeldError when it has taken much longer, and FileNotFoundError when the first
        node has not been there for long.
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
                if self._orders or waited_seconds >= patience_seconds:  # a newer version will do
                    raise
                if held:
                    self._warn(f"{order.id} waits: {error}", "waits for the lease")
            else:
                with self._changed:
                    if first and not self._resting:
                        self._keeper.keep(order.name.run_id, owner)
                return self._lease
            self._pause(pause)
            pause = min(2 * pause, HELD_RETRY_SECONDS)

    def _look_back(self, store: PersistentStore, order: FlushOrder) -> None:
        """Tell of versions that other nodes did not complete, and remove what there is of them: or
        they fill the place while one node keeps failing.

        Not of the last two: with `when_busy="wait"` others may still be at the last one, and at the
        job's end, where what waits is ordered at once, at the one before it; nor of those that they
        may give up for newer ones yet. The first node removes; where it cannot, the second one, a
        version later, and so on.
        """
        self._unproved = [n for n in self._unproved if n.run_id == order.name.run_id]
        others = [n for n in self._unproved if n != order.name]  # it may be tried again
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
        if not drops:  # else it was given up, as it should be
            self._warn(
                f"v{others[0].id.version} is not complete in {store.url}, though this node's part "
                "was there: another node has trouble, or sees another place. What there was of it "
                "is removed"
            )

    # --- waiting, and what is said meanwhile ---------------------------------------------------

    def _superseded(self) -> bool:
        return self._cancelled or (self.settings.drop_superseded and bool(self._orders))

    def _sleep(self, seconds: float) -> None:
        """Between two tries of a call to the store. The lease is not seen to: that is a call."""
        FlushPacer(superseded=self._superseded, keep=self._go_on, clock=self._clock).sleep(seconds)

    def _pause(self, seconds: float) -> None:
        """Wait, but not when something newer does."""
        end = self._clock.monotonic() + seconds
        while not (self._orders or self._cancelled) and (left := end - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left, NAP_SECONDS))
            self._go_on()

    def _go_on(self) -> None:
        self.went_on_at = time.monotonic()

    def _retried(self, text: str) -> None:
        if self._now is not None:
            self._warn(f"{self._now[0].id}: {text}", "is tried again")

    def _warn(self, text: str, kind: str = "") -> None:
        """An event where the trainer is. Of a `kind`, once a flush; of the same text, once."""
        if self._now is None:
            return
        order, answer = self._now
        what = f"{order.id} {kind}" if kind else text
        if what not in self._told:
            self._told.add(what)
            answer(Problem(text, level="persistent", severity=logging.WARNING))


def retention_policy(settings: PersistentSettings) -> RetentionPolicy:
    """The policy of the persistent level."""
    kept = (settings.keep_last, settings.keep_every, settings.keep_best)
    return RetentionPolicy(*kept, best_is_low=settings.best == "lowest")


__all__ = ["Flusher", "retention_policy"]
