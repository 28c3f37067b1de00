"""The agent's flusher: local shards to the persistent level, one version after the other.

A node's shards of a version are flushed together, from the files of the local level, when the
version is complete there on all ranks: what the flush reads is durable and does not change, and no
slot waits for a slow store. Retention of the local level leaves alone what is held here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .config import PersistentConfig
from .held import Held
from .localstore import LocalStore
from .modules.pipeline import Pipeline
from .modules.sources import Bases, open_source
from .naming import Lineage, ShardKey, VersionId
from .persistent import (
    Lease,
    LeaseHeldError,
    Pace,
    PersistentError,
    PersistentStore,
    RetentionPolicy,
    Throttle,
    Turns,
    VersionFacts,
    VersionName,
)
from .persistent.backend import WINDOW_BYTES
from .persistent.retention import METRIC

HELD_RETRY_SECONDS = 5.0
"""Another life's lease is asked about again after this."""


@dataclass(frozen=True)
class PersistentSettings(PersistentConfig):
    """The level's settings, and which of the job's nodes this one is."""

    node: int = 0
    nodes: int = 1
    best: str = "lowest"
    """The job's, see `Config.best`."""

    def retention(self) -> RetentionPolicy:
        """What to keep there."""
        kept = (self.keep_last, self.keep_every, self.keep_best)
        return RetentionPolicy(*kept, best_is_low=self.best == "lowest")


@dataclass(frozen=True)
class FlushOrder:
    """One version that is complete on the local level of all ranks. Alike on all nodes, but for
    `directory`, `here` and `node`."""

    directory: str
    """Of the local level."""
    here: tuple[int, ...]
    """Shards that this node's local level has."""
    version: int
    generation: int
    shards: int
    life: str
    job: str
    lineage: Lineage
    iteration: int
    largest_bytes: int
    metric: float | None
    """What the user measured of it."""
    node: str
    """Where the job has its memory level: of the same name, only one life can be alive there."""

    @property
    def name(self) -> VersionName:
        """On the persistent level."""
        return VersionName(VersionId(self.generation, self.version), self.shards, self.life)

    @property
    def keys(self) -> list[ShardKey]:
        """The node's shards."""
        return [ShardKey(self.name.id, shard, self.shards) for shard in self.here]

    def as_message(self) -> dict[str, Any]:
        """For the socket."""
        return asdict(self)

    @staticmethod
    def of_message(values: dict[str, Any]) -> FlushOrder:
        """The inverse of `as_message`."""
        lineage = tuple((int(g), int(v)) for g, v in values["lineage"])
        return FlushOrder(**{**values, "here": tuple(values["here"]), "lineage": lineage})


Answer = Callable[[dict[str, Any]], None]


class Flusher:
    """One a node and place. `order` may be called by any thread; a thread of its own flushes."""

    def __init__(
        self, settings: PersistentSettings, held: Held, on_idle: Callable[[], None]
    ) -> None:
        """`on_idle` is called, by the flushing thread, whenever nothing is left to do."""
        self.settings = settings
        self.held = held
        self._on_idle = on_idle
        self._changed = threading.Condition()
        self._orders: deque[tuple[FlushOrder, Answer]] = deque()
        self._thread: threading.Thread | None = None
        self._store: PersistentStore | None = None
        self._lease: Lease | None = None
        self._bases = Bases(lambda name: self._store is not None and self._store.exists(name))

    def order(self, order: FlushOrder, answer: Answer) -> None:
        """Flush a version after those ordered before; `answer` is told how it went.

        Raises RuntimeError, and has nothing to do, where there may be no more threads.
        """
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="tierckpt-flusher", daemon=True)
                thread.start()  # RuntimeError: no more threads; nothing was ordered then
                self._thread = thread
            self.held.add(order.keys)
            self._orders.append((order, answer))

    def busy(self) -> bool:
        """True while something is flushed or waits."""
        return self._thread is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._orders:
                    self._thread = None
                    break
                order, answer = self._orders.popleft()
            where = {"version": order.version, "generation": order.generation}
            try:
                answer({"op": "flushed", **where, **self._flush(order)})
            except Exception as error:  # whatever a store's client raises costs this version only
                answer({"op": "flush_failed", **where, "error": f"{type(error).__name__}: {error}"})
                if isinstance(error, PersistentError):
                    with contextlib.suppress(Exception):
                        self._open(order).retire(order.name)
            finally:
                self.held.discard(order.keys)
        self._on_idle()

    def _flush(self, order: FlushOrder) -> dict[str, Any]:
        begin = time.perf_counter()
        store, settings = self._open(order), self.settings
        throttle = None
        if settings.bytes_per_second:
            throttle = Throttle(settings.bytes_per_second, WINDOW_BYTES, time.monotonic())
        lease = self._wait_for_lease(store, order)
        pace = Pace(
            throttle,
            Turns(settings.node, settings.nodes, settings.nodes_at_once),
            superseded=self._superseded,
            keep=lease.keep,
        )
        # Made anew for each: a key in a file may be another one by now.
        pipeline = Pipeline.of_setting(settings.modules, "persistent_modules")
        largest = pipeline.most_bytes(order.largest_bytes) if pipeline else order.largest_bytes
        metrics = {} if order.metric is None else {METRIC: order.metric}
        facts = VersionFacts(order.job, order.lineage, order.iteration, largest, metrics)
        local = LocalStore(order.directory)
        with contextlib.ExitStack() as stack:
            sources = []
            for key in order.keys:
                base = self._bases.base_of(key.shard, pipeline.full_every)
                sources.append(stack.enter_context(open_source(local, key, pipeline, base)))
            result = store.flush(order.name, facts, sources, pace)
            for source in sources:
                self._bases.wrote(source)
        if result.committed:
            store.retain(settings.retention(), order.name, lease)
        return {
            "complete": result.committed,
            "nbytes": result.written_bytes + result.reused_bytes,
            "seconds": time.perf_counter() - begin,
        }

    def _open(self, order: FlushOrder) -> PersistentStore:
        """The store, opened by the first flush."""
        if self._store is None:
            settings = self.settings
            how = (settings.shards_per_file, settings.read_back)
            store = PersistentStore(settings.path, *how, **settings.options())
            store.create()
            store.clean()
            self._store = store
        return self._store

    def _wait_for_lease(self, store: PersistentStore, order: FlushOrder) -> Lease:
        """The place is this life's alone; after a job was killed that takes its lease's time."""
        if self._lease is None or self._lease.life != order.life:
            self._lease = store.lease(order.life, f"{order.job} on {order.node}")
        while True:
            try:
                self._lease.ensure()
            except LeaseHeldError:
                if self._orders:  # a newer version will do
                    raise
                time.sleep(HELD_RETRY_SECONDS)
            else:
                return self._lease

    def _superseded(self) -> bool:
        return self.settings.drop_superseded and bool(self._orders)


__all__ = ["FlushOrder", "Flusher", "PersistentSettings"]
