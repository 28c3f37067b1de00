"""The agent's flusher: local shards to the persistent level, one version after the other.

A node's shards of a version are flushed together, from the files of the local level, when the
version is complete there on all ranks: the files are durable and do not change, and no slot waits
for a slow store. Retention of the local level keeps the shards of versions that are to be flushed.

`open_source` opens a shard as a source for the persistent level; each level has its own codecs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tierckpt._text import error_text
from tierckpt.codecs.codec import CodecError, Pipeline
from tierckpt.codecs.shard_coding import Base, Chain, Decoder, Encoder, Plain, Read, cut
from tierckpt.core.levels import PERSISTENT
from tierckpt.core.retention import milestones
from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.ids import ShardKey, VersionName
from tierckpt.format.manifest import Buffer, Manifest
from tierckpt.format.records import ShardRecord
from tierckpt.storage.local import LocalStore, open_encoded
from tierckpt.storage.marks import NewPins
from tierckpt.storage.persistent import (
    FlushCancelledError,
    FlushPacer,
    FlushResult,
    Lease,
    LeaseHeldError,
    PersistentError,
    PersistentStore,
    RetryPolicy,
    Throttle,
)
from tierckpt.storage.persistent.backend import (
    NAP_SECONDS,
    WINDOW_BYTES,
    Clock,
    SystemClock,
    lacks_room,
)
from tierckpt.storage.persistent.lease import LEASE_SECONDS, LeaseKeeper
from tierckpt.storage.persistent.shards import ShardSource, Source

from .pipeline import CANCELLED, Answer, ShardGuard, Stage, sound_image
from .protocol import (
    Flushed,
    FlushFailed,
    FlushOrder,
    PersistentSettings,
    Problem,
)

__all__ = ["Flusher"]


class UnfoldedSource(Struct):
    """A shard encoded on the local level, and plain on this one. Holds one block in memory."""

    shard: int
    manifest: bytes
    most_bytes: int
    plain: Plain
    still_sealed: Callable[[], bool]
    base: VersionName | None = None

    def windows(self) -> Iterator[memoryview]:
        """Decode the shard, see `Source.windows`."""
        for block in self.plain():
            yield from _windows(block)

    def is_stored_as(self, record: ShardRecord) -> bool:
        """Compare manifests and lengths, see `Source.is_stored_as`."""
        return (record.manifest, record.nbytes) == (self.manifest, self.most_bytes)


class LostBaseError(Exception):
    """The version that a shard would refer to cannot be read."""


OpenBase = Callable[[Base], Callable[[int], Buffer]]
"""Opens a base on the persistent level, for its plain blocks."""


class EncodedSource:
    """A shard encoded for the persistent level. Holds one block in memory, and with `delta` four
    and a window of the base. One thread."""

    def __init__(
        self,
        sealed: bytes,
        plain: Plain,
        still_sealed: Callable[[], bool],
        pipeline: Pipeline,
        base: Base | None = None,
        open_base: OpenBase | None = None,
    ) -> None:
        self._open_base = open_base
        self._sealed_bytes, self._plain, self._pipeline = sealed, plain, pipeline
        self._sealed, self._refer_to = Manifest.decode(sealed), base
        self.still_sealed = still_sealed
        self.shard = self._sealed.shard
        self.most_bytes = pipeline.most_bytes(self._sealed.image_bytes)
        self._encoder: Encoder | None = None
        self._complete = False

    def windows(self) -> Iterator[memoryview]:
        """Encode the shard, see `Source.windows`. Every call encodes again, so no nonce is ever
        used for two encryptions. Raises LostBaseError."""
        self._complete = False
        block_of = self._block_of if self._open_base else None
        self._base_block: Callable[[int], Buffer] | None = None
        self._encoder = Encoder(self._pipeline, self._sealed_bytes, self._refer_to, block_of)
        for block in self._encoder.stored(self._plain()):
            yield from _windows(block)
        self._complete = True

    def _block_of(self, index: int) -> Buffer:
        """A block of the base, from the store."""
        base, open_base = self._refer_to, self._open_base
        assert base is not None
        assert open_base is not None
        try:
            if self._base_block is None:
                self._base_block = open_base(base)
            return self._base_block(index)
        except PersistentError as error:
            if error.transient:
                raise
            raise LostBaseError(f"{base.manifest.key} cannot be read: {error}") from error
        except (CorruptShardError, FormatError, CodecError, FileNotFoundError, EOFError) as error:
            raise LostBaseError(f"{base.manifest.key} cannot be read: {error}") from error

    @property
    def _done(self) -> Encoder:
        assert self._encoder is not None, "asked for after the last window"
        assert self._complete
        return self._encoder

    @property
    def manifest(self) -> bytes:
        """Manifest of the encoded shard, see `Source.manifest`."""
        return self._done.manifest.encode()

    @property
    def base(self) -> VersionName | None:
        """The version that it refers to, see `Source.base`."""
        encoding = self._done.manifest.encoding
        if encoding is None or encoding.base is None:
            return None
        return replace(self._sealed.facts.name, id=encoding.base)

    @property
    def made(self) -> Base | None:
        """The shard as a base for later versions, if it was written now and is whole."""
        return self._encoder.made if self._encoder is not None and self._complete else None

    @property
    def refers(self) -> bool:
        """True when it was written now, and is not whole."""
        return self._complete and self._done.made is None

    def is_stored_as(self, record: ShardRecord) -> bool:
        """Compare the origin, see `Source.is_stored_as`: a second encoding may have other bytes."""
        try:
            found = Manifest.decode(record.manifest)
        except (CorruptShardError, FormatError):
            return False
        ours = (self._sealed.key, self._sealed.facts.run_id, self._sealed.created_seconds)
        return (
            found.encoding is not None
            and self._pipeline.wrote(found.encoding.codecs)
            and (found.key, found.facts.run_id, found.created_seconds) == ours
        )


def _windows(block: Buffer) -> Iterator[memoryview]:
    view = memoryview(block)
    for low in range(0, len(view), WINDOW_BYTES):
        yield view[low : low + WINDOW_BYTES]


@contextlib.contextmanager
def open_source(
    local: LocalStore,
    key: ShardKey,
    pipeline: Pipeline,
    base: Base | None,
    open_base: OpenBase | None = None,
) -> Iterator[Source]:
    """A guarded local shard as a source for the persistent level with codecs `pipeline`.

    `base`: the version that it may refer to there; `open_base` opens it. Raises OSError,
    CorruptShardError, and the errors of `Decoder`.
    """
    data = local.read_manifest(key)
    manifest = Manifest.decode(data)

    def still() -> bool:
        return local.read_manifest(key) == data

    if manifest.encoding is not None:
        decoder = open_encoded(local, manifest)
        sealed, blocks = decoder.sealed_bytes, decoder.blocks
        if pipeline:
            yield EncodedSource(sealed, blocks, still, pipeline, base, open_base)
        else:
            nbytes = decoder.sealed.image_bytes
            yield UnfoldedSource(key.shard, sealed, nbytes, blocks, still)
        return
    with sound_image(local, manifest) as image:
        if pipeline:
            plain = lambda: cut(image, manifest.header_bytes)  # noqa: E731
            yield EncodedSource(data, plain, still, pipeline, base, open_base)
        else:
            yield ShardSource(key.shard, image, data, still)


class Bases:
    """Bases of the shards on the persistent level: whole versions that exist there. One thread."""

    def __init__(self, exists: Callable[[VersionName], bool]) -> None:
        self._exists = exists
        self._chains: dict[int, Chain] = {}
        self._candidates: dict[int, Base] = {}
        """Whole shards of versions that were not complete yet when they were written."""

    def base_of(self, shard: int, full_every: int) -> Base | None:
        """Base for the shard's next version; None when that must be whole."""
        chain = self._chains.setdefault(shard, Chain())
        candidate = self._candidates.get(shard)
        if candidate is not None and self._exists(_name_of(candidate)):
            chain.wrote(self._candidates.pop(shard))
        base = chain.base_for_next(full_every)
        return base if base is not None and self._exists(_name_of(base)) else None

    def wrote(self, source: Source) -> None:
        """Record that the shard is durable on the persistent level."""
        if isinstance(source, EncodedSource):
            if source.made is not None:
                self._candidates[source.shard] = source.made
            elif source.refers:
                self._chains[source.shard].wrote(None)

    def forget(self) -> None:
        """Make the next version of every shard whole."""
        self._chains.clear()
        self._candidates.clear()


def open_base(store: PersistentStore, base: Base) -> Callable[[int], Buffer]:
    """The plain blocks of a base, by number, in order. Raises as `Decoder`, and PersistentError."""
    shard = store.open_shard(_name_of(base), base.manifest.shard)
    if shard.manifest != base.manifest.encode():
        raise CorruptShardError("it was replaced")
    return Decoder(base.manifest, _ahead(shard.read, shard.nbytes), _no_other).block


def _ahead(read: Read, nbytes: int) -> Read:
    """Read whole windows, as blocks are asked for one after the other: a store takes its time for
    each request."""
    start, window = 0, b""

    def read_ahead(offset: int, wanted: int) -> bytes:
        nonlocal start, window
        if not start <= offset <= offset + wanted <= start + len(window):
            start = offset
            window = read(offset, min(max(wanted, WINDOW_BYTES), nbytes - offset))
        return window[offset - start : offset - start + wanted]

    return read_ahead


def _no_other(key: ShardKey) -> tuple[Manifest, Read]:
    raise FormatError(f"{key} is a base, and refers to another version")


def _name_of(base: Base) -> VersionName:
    return base.manifest.facts.name


FIRST_PAUSE_SECONDS, HELD_RETRY_SECONDS = 0.1, 5.0
"""Pauses before a held lease is tried again: the first, doubling up to the second."""
LEASE_PATIENCE_SECONDS = 2 * LEASE_SECONDS
"""A dead run's lease has ended after this time: a lease still held is a live run's."""
FIRST_NODE_SECONDS = 60.0
"""Time that other nodes wait for the first node's lease in a place that was never used."""
MAX_ROUNDS, ROUND_SECONDS = 4, 30.0
"""Number of attempts for a whole version while its store has trouble that may pass, and the time
between them."""
STILL_UNDER_WAY = 2
"""Number of versions before the present one that other nodes may still be flushing."""


class Flusher(Stage[FlushOrder]):
    """The flusher of one node and place.

    Transient errors are retried: first by the store, call by call, then for the version as a whole;
    finished parts stay. The number of attempts is limited, as other versions wait. A version that
    still fails is given up, and the next one is tried as usual.
    """

    def __init__(
        self,
        settings: PersistentSettings,
        held: ShardGuard,
        on_idle: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        super().__init__(PERSISTENT, held, on_idle)
        self.settings = settings
        self._clock: Clock = clock or SystemClock()
        self._place: PersistentStore | None = None
        self._lease: Lease | None = None
        self._keeper = LeaseKeeper(lambda: self._make_store(RetryPolicy(tries=1)))
        self._resting = False
        """No trainer of this node runs, so the lease need not be kept between flushes."""
        self._throttle: Throttle | None = None
        """Limit of all flushes together: many small flushes get no more bandwidth than a large one.
        """
        self._bases = Bases(lambda name: self._place is not None and self._place.exists(name))
        self._warned: set[str] = set()
        """Warnings of this flush that need not be repeated."""
        self._arrivals = NewPins()
        self._unproved: list[VersionName] = []
        """Versions that were not yet complete when this node's parts were."""
        self._last_stored: VersionName | None = None

    def accept(self, order: FlushOrder, answer: Answer) -> None:
        """Flush a version, see `Stage`. The trainers limit how many versions wait: they order
        alike on all nodes (see `Promotion`)."""
        self._resting = False
        super().accept(order, answer)

    def close(self) -> None:
        """Stop renewing the lease; release it if all nodes have finished."""
        if not self._cancelled:  # a process waiting for this agent's end does not wait for a store
            self._keeper.close(self._last())

    def cancel(self) -> list[int]:
        """Give up all flushes, see `Stage`: parts that are stored stay. From now on the lease is
        neither taken nor renewed."""
        self.rest()
        given_up = super().cancel()
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

    def _store(self, order: FlushOrder) -> Flushed | FlushFailed:
        """Flush a version, and apply retention to older ones; return the answer."""
        self._warned.clear()
        try:
            said = self._flush_patiently(order)
        except Exception as error:  # any error of a store's client costs this version only
            if not self._exists(order):
                return self._given_up(order, error)
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
                if not error.transient or rounds == MAX_ROUNDS or self._orders:
                    raise
                self._warn(
                    f"{order.id}: {error}. Parts stored so far stay; the whole version is tried "
                    f"again in {ROUND_SECONDS:g} s"
                )
            self._pause(ROUND_SECONDS)
            rounds += 1

    def _given_up(self, order: FlushOrder, error: Exception) -> FlushFailed:
        if isinstance(error, PersistentError) and not (error.transient or self._cancelled):
            with contextlib.suppress(Exception):  # it will never be complete: its room is needed
                self._open(order).give_up(order.name)
            if lacks_room(error):  # no complete version would ever trigger retention
                self._retain(order, complete=False)
        superseded = isinstance(error, FlushCancelledError) and self._cancelled
        return self._failed(order, error_text(error), superseded)

    def _failed(self, order: FlushOrder, error: str, superseded: bool = False) -> FlushFailed:
        return FlushFailed(order.id, error, superseded)

    def _exists(self, order: FlushOrder) -> bool:
        """Whether the version exists, as far as this node can see."""
        with contextlib.suppress(Exception):
            return self._place is not None and self._place.exists(order.name)
        return False

    def _retain(self, order: FlushOrder, complete: bool = True) -> None:
        """Remove old versions. A failure here does not affect the version just flushed, which may
        be `complete` or not."""
        self._note_progress()
        if self._cancelled:
            return
        policy = self.settings.retention
        try:
            store = self._open(order)
            self._arrivals.pin(store)
            if complete:
                store.retain(policy, order.name, self._lease)
            else:
                store.make_room(policy, order.facts, self._lease)
        except Exception as error:
            why = error_text(error)
            self._warn(f"some older versions could not be removed; the next flush retries: {why}")

    # --- one version ---------------------------------------------------------------------------

    def _flush(self, order: FlushOrder) -> Flushed:
        start = self._clock.monotonic()
        self._note_progress()
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
        seconds = self._clock.monotonic() - start
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
        """Whether `every` in `persistent_keep` keeps the version. The run's first one counts only
        if it is a multiple: the versions before it are not looked at."""
        last, version = self._last_stored, order.id.version
        before = last.id.version if last and last.run_id == order.name.run_id else version
        return version in milestones(
            {min(before, version - 1), version}, self.settings.retention.keep_every
        )

    def _pacer(self, lease: Lease) -> FlushPacer:
        settings = self.settings
        if settings.bytes_per_second and self._throttle is None:
            now = self._clock.monotonic()
            self._throttle = Throttle(settings.bytes_per_second, WINDOW_BYTES, now)

        def keep() -> None:
            lease.keep()
            self._note_progress()

        return FlushPacer(self._throttle, self._is_cancelled, keep, self._clock)

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
        ours: dict[str, Any] = {"sleep": self._sleep, "on_retry": self._retried}
        return PersistentStore(settings.path, retry=retry, **ours, **settings.options())

    def _open(self, order: FlushOrder) -> PersistentStore:
        """Return the store, opened by the first flush. The first node creates it: if another node
        does not see it then, it is not mounted there."""
        if self._place is None:
            store = self._make_store()
            if not self.settings.node:
                store.create()
            store.clean()
            self._place = store
        return self._place

    def _wait_for_lease(self, store: PersistentStore, order: FlushOrder) -> Lease:
        """Wait for this run's lease on the place; after a job was killed, its lease must end first.

        Raises LeaseHeldError when that takes much longer, and FileNotFoundError when the first node
        has not created the place after a long wait.
        """
        first, owner = not self.settings.node, f"{order.facts.job} on {order.node}"
        if self._lease is None or self._lease.run_id != order.name.run_id:
            self._lease = store.lease(order.name.run_id, owner, self._clock, creates=first)
        start, pause = self._clock.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            if self._cancelled:
                raise FlushCancelledError(CANCELLED)
            try:
                self._lease.ensure()
            except (LeaseHeldError, FileNotFoundError) as error:
                held = isinstance(error, LeaseHeldError)
                patience_seconds = LEASE_PATIENCE_SECONDS if held else FIRST_NODE_SECONDS
                waited_seconds = self._clock.monotonic() - start
                # A newer version is enough; but of many nodes some come before the first one, in
                # every run, and its lease is about to be there.
                soon = not (held or self._lease.was_held or self._cancelled)
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
        and at the job's end, where waiting versions are ordered at once, the one before it. The
        first node removes a version; if it cannot, the second does so one version later, and so on.
        """
        self._unproved = [n for n in self._unproved if n.run_id == order.name.run_id]
        others = [n for n in self._unproved if n != order.name]  # the present one may be retried
        if not others:
            return
        if store.exists(others[-1]):
            self._unproved.clear()
            return
        if len(others) <= STILL_UNDER_WAY + self.settings.node:
            return
        self._unproved.remove(others[0])
        if others[0] not in store.incomplete() or not store.give_up(others[0]):
            return
        self._warn(
            f"v{others[0].id.version} is not complete in {store.url}, though this node's part was "
            "stored: another node fails, or sees another place. The parts of the version are "
            "removed"
        )

    # --- waiting and warnings ------------------------------------------------------------------

    def _is_cancelled(self) -> bool:
        return self._cancelled

    def _sleep(self, seconds: float) -> None:
        """Wait between two attempts of a call to the store. The lease is not renewed: another call
        does so."""
        FlushPacer(None, self._is_cancelled, self._note_progress, self._clock).sleep(seconds)

    def _pause(self, seconds: float) -> None:
        """Wait until the time is over, or a newer version waits."""
        end = self._clock.monotonic() + seconds
        while not (self._orders or self._cancelled) and (left := end - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left, NAP_SECONDS))
            self._note_progress()

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
