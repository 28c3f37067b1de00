"""Shards for all ranks together: broadcast by windows where not every rank sees the file, and
rebuilt if they are lost.

In a rebuild, each rank that has a surviving shard or parity broadcasts it, window by window. One
rank makes each lost shard, holds it, and shows it to the others during loading. A rank holds only
the shards that it makes, and windows.

The sources are still being checked during the rebuild. The rebuilt shards are checked too, so no
damage gets through; the checks of the sources tell which source was damaged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from tierckpt._text import error_text
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.core.restore_plan import ParitySource, Rebuild, RestorePlan, Source
from tierckpt.errors import CorruptShardError, FormatError, RestoreError
from tierckpt.format.ids import ParityKey
from tierckpt.format.shard_file import ShardSummary
from tierckpt.group import Group
from tierckpt.restored import TransferStats

from .shards import (
    Bring,
    Failure,
    OnRead,
    OpenStore,
    ParityImage,
    ShardImage,
    in_memory,
    open_parity,
)

if TYPE_CHECKING:
    from tierckpt.erasure.parity_manifest import ParityManifest
    from tierckpt.peer.parity_file import Read
    from tierckpt.peer.windows import Rebuilding

BROADCAST_BYTES = 64 * 1024 * 1024
"""Size of a broadcast window: the most that a rank holds of shards that other ranks read."""
MAPPED_BYTES = 8 * 1024 * 1024
"""Size of a window of a mapped shard. A rank skips the windows it does not need."""


def clear(window: memoryview) -> None:
    """Fill the window with zeros; takes no memory."""
    np.frombuffer(window, dtype=np.uint8).fill(0)


def _as_buffer(window: memoryview) -> Any:
    """The window as a buffer of `Group.broadcast`: a tensor, or a numpy array without torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return np.frombuffer(window, dtype=np.uint8)
    return torch.frombuffer(window, dtype=torch.uint8)


Visit = Callable[[int, int, memoryview], None]
"""`visit(shard, offset, window)`."""
Wants = Callable[[int, int, int], bool]
"""`wants(shard, low, high)`: whether a visit needs these bytes."""


def all_of_it(shard: int, low: int, high: int) -> bool:
    """The default `wants`: every byte is needed."""
    return True


class ShardBroadcaster:
    """The group's broadcasts, with byte counts. Training thread; all ranks make the same calls."""

    def __init__(self, group: Group | ErrorBarrier, volume: TransferStats) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._volume = group, volume
        self.trouble = ""
        """Why verified bytes can no longer be shown, as text for messages; empty if they can."""
        self.broken = False
        """True after a broadcast failed: this rank can no longer exchange anything with the
        others."""
        self._buffer: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def broadcast(self, window: memoryview, source: int) -> None:
        """Copy `window` from rank `source` to all ranks."""
        data = _as_buffer(window)
        self.broken = True
        self._group.broadcast(data, source)
        self.broken = False
        if source != self.rank:
            self._volume.received(len(window))

    def trouble_of_any(self) -> str:
        """The `trouble` of all ranks, joined: bytes sent by such a rank are unusable.
        Collective."""
        reasons = dict.fromkeys(why for why in self._group.all_gather_object(self.trouble) if why)
        return "; ".join(list(reasons)[:4])

    def make_room(self, outlines: Iterable[ShardSummary]) -> None:
        """Allocate the broadcast buffer early, when an error does not leave other ranks waiting."""
        longest = (min(o.nbytes, max(BROADCAST_BYTES, o.header_bytes)) for o in outlines)
        self._buffer = np.empty(max(longest, default=0), dtype=np.uint8)

    def fail(self, shard: int, error: Exception) -> None:
        """Record in `trouble` that this rank failed; it continues to send and receive."""
        why = f"shard {shard} (rank {self.rank}): {error_text(error)}"
        self.trouble = self.trouble or why

    def show(
        self,
        source: Source,
        outline: ShardSummary,
        image: ShardImage | None,
        visit: Visit,
        wants: Wants = all_of_it,
    ) -> None:
        """Let all ranks visit a shard. `image` is given on all ranks if `source.direct`, else only
        on the reader.

        The first window contains the whole header. A window from another rank is valid only during
        the visit. Mapped bytes after the header that `wants` refuses (asked in order) are skipped:
        touching them takes half as long as copying them.

        Mapped bytes may have left memory since they were verified. If they cannot be read again,
        the visits end, `trouble` says why, and the other ranks receive zeros. The same holds if a
        visit raises: the visits of this rank end, the other ranks continue.
        """
        nbytes, high = outline.nbytes, 0
        window_bytes = MAPPED_BYTES if source.direct else BROADCAST_BYTES
        while (low := high) < nbytes:
            high = min(max(low + window_bytes, outline.header_bytes), nbytes)
            if source.direct and low and not self._wants(wants, source.shard, low, high):
                continue
            window = self._window(image, low, high)
            if not source.direct:
                self.broadcast(window, source.reader)
            if not self.trouble:
                self._visit(visit, source.shard, low, window)

    def _wants(self, wants: Wants, shard: int, low: int, high: int) -> bool:
        try:
            return not self.trouble and wants(shard, low, high)
        except Exception as error:
            self.fail(shard, error)
            return False

    def _visit(self, visit: Visit, shard: int, low: int, window: memoryview) -> None:
        try:
            visit(shard, low, window)
        except FormatError as error:  # zeros were sent instead of the header
            self.trouble = f"shard {shard} has no header: {error}"
        except Exception as error:
            self.fail(shard, error)

    def _window(self, image: ShardImage | None, low: int, high: int) -> memoryview:
        """Part of a shard, or a buffer for it."""
        if image is not None and not self.trouble:
            try:
                image.touch(low, high)
            except Exception as error:
                self.trouble = (
                    f"{image.manifest.key} was sound and can no longer be read (rank {self.rank}): "
                    f"{error}. The live state is partly loaded: restore again, or restart the job"
                )
            else:
                return image.view[low:high]
        window = self._room(high - low)
        if image is not None:
            clear(window)
        return window

    def _room(self, nbytes: int) -> memoryview:
        if self._buffer is None or len(self._buffer) < nbytes:
            self._buffer = np.empty(nbytes, dtype=np.uint8)
        return self._buffer.data[:nbytes]


class Parities:
    """Parities of a plan: those that this rank reads, and the shards rebuilt from all of them.

    Training thread; the caller owns `pool`.
    """

    def __init__(
        self,
        plan: RestorePlan,
        broadcaster: ShardBroadcaster,
        pool: Executor,
        open_store: OpenStore,
        on_read: OnRead = lambda nbytes: None,
    ) -> None:
        """`open_store` opens stores for parities on no node of the job. `on_read` receives counts
        of bytes read, from any thread."""
        self._plan, self._broadcaster, self._pool, self._on_read = plan, broadcaster, pool, on_read
        self._open_store = open_store
        self._mine: dict[ParityKey, tuple[ParityManifest, ParityImage]] = {}
        self._room: dict[int, ShardImage] = {}
        """Resources of the shards rebuilt here."""
        self._started: list[tuple[Rebuild, Rebuilding, dict[int, Read], dict[int, Read]]] = []
        """Readers of the shards and the parities of each group."""
        self._failures: list[Failure] = []
        self._checks: list[tuple[ParitySource, Future[None]]] = []
        self._close: list[Callable[[], None]] = []

    def open(self) -> None:
        """Map this rank's parities, and start to check them."""
        for source in (s for each in self._plan.rebuilds for s in each.parities):
            if source.reader == self._broadcaster.rank:
                try:
                    self._open(source)
                except Exception as error:
                    self._failures.append(Failure.of(source.key, source.place, error))

    def opened(self) -> bool:
        """False if a parity could not be mapped."""
        return not self._failures

    def finish(self) -> list[Failure]:
        """Wait until this rank's parities are checked; returns those that are damaged or
        unreadable. Raises nothing, whatever happened before: the other ranks wait for this one."""
        for source, check in self._checks:
            error = check.exception()
            if error is not None:
                self._failures.append(Failure.of(source.key, source.place, error))
        return self._failures

    def _open(self, source: ParitySource) -> None:
        record, file = open_parity(source.key, source.place, self._open_store)
        self._close.append(file.close)
        for index in source.segments:  # while other files are still being opened
            file.ask(index * record.segment_bytes, (index + 1) * record.segment_bytes)
        if len(file.view) < record.image_bytes:  # or this rank would fail while all exchange
            raise CorruptShardError(
                f"truncated: {source.key} has {len(file.view)} of {record.image_bytes} bytes"
            )
        self._mine[source.key] = (record, file)
        self._checks.append((source, self._pool.submit(self._check, source, record, file)))

    def _check(self, source: ParitySource, record: ParityManifest, file: ParityImage) -> None:
        from tierckpt.peer.parity_file import check_parity

        self._on_read(check_parity(record, reader_of(file.view, file.bring), source.segments))

    def records(self) -> list[tuple[ParityKey, bytes]]:
        """Manifests of this rank's parities, for the other ranks."""
        return [(key, record.encode()) for key, (record, _) in self._mine.items()]

    def make_room(
        self, records: Mapping[ParityKey, bytes], images: Mapping[int, ShardImage]
    ) -> None:
        """Allocate the shards that this rank makes, before any rank waits for another. `images` are
        the shards this rank has read. Raises RestoreError if there is no memory."""
        if not self._plan.rebuilds:
            return
        from tierckpt.erasure.parity_manifest import ParityManifest
        from tierckpt.peer.windows import Rebuilding

        for each in self._plan.rebuilds:
            record = ParityManifest.decode(records[each.parities[0].key])
            views: dict[int, memoryview] = {}
            for shard in each.lost:
                if self._plan.sources[shard].reader != self._broadcaster.rank:
                    continue
                member = each.group.index(shard)
                manifest = record.manifests[member]
                try:
                    self._room[shard] = in_memory(manifest)
                except (OSError, MemoryError) as error:
                    raise RestoreError(
                        f"no memory for shard {shard} ({manifest.image_bytes} bytes): {error}"
                    ) from error
                views[member] = self._room[shard].view
            left = [member for member, shard in enumerate(each.group) if shard not in each.lost]
            made = Rebuilding(record, left, [s.member for s in each.parities], views)
            self._started.append((each, made, self._shards(each, images), self._parities(each)))

    def rebuild(self, images: dict[int, ShardImage], trouble: list[str]) -> list[Failure]:
        """Make this rank's lost shards, into `images`. Collective; after `make_room`.

        Returns the parities of groups with a wrong result on this rank: the parity, or a shard it
        was made with, is damaged. Raises nothing, because the other ranks would wait: other
        failures are added to `trouble` as text.
        """
        suspected = []
        for each, rebuilding, shards, parities in self._started:
            made = {shard: self._room[shard] for shard in each.lost if shard in self._room}
            try:
                rebuilding.run(shards, parities)
            except CorruptShardError as error:
                suspected += [Failure(s.key, s.place, str(error)) for s in each.parities]
            except Exception as error:
                if self._broadcaster.broken:
                    raise
                trouble.append(f"shards {sorted(made)}: {error_text(error)}")
            else:
                images.update(made)
                for shard in made:
                    self._room.pop(shard)
        return suspected

    def _shards(self, each: Rebuild, images: Mapping[int, ShardImage]) -> dict[int, Read]:
        readers = {s.shard: s.reader for s in self._plan.sources}
        return {
            member: self._broadcast(readers[shard], self._image(shard, images))
            for member, shard in enumerate(each.group)
            if shard not in each.lost
        }

    def _parities(self, each: Rebuild) -> dict[int, Read]:
        return {s.member: self._broadcast(s.reader, self._parity(s.key)) for s in each.parities}

    def _image(self, shard: int, images: Mapping[int, ShardImage]) -> Read:
        def read(offset: int, into: memoryview) -> None:
            image = images[shard]  # missing if its rebuild failed
            reader_of(image.view, image.touch)(offset, into)

        return read

    def _parity(self, key: ParityKey) -> Read:
        def read(offset: int, into: memoryview) -> None:
            _, file = self._mine[key]
            reader_of(file.view, file.bring)(offset, into)

        return read

    def _broadcast(self, reader: int, read: Read) -> Read:
        """Broadcast a range from the rank that has it; all ranks ask for the same ranges in the
        same order."""

        def read_together(offset: int, into: memoryview) -> None:
            if reader == self._broadcaster.rank:
                try:
                    read(offset, into)
                except Exception:  # the check of this source reports it as damage
                    clear(into)
            self._broadcaster.broadcast(into, reader)

        return read_together

    def close(self) -> None:
        """Unmap after all checks have ended; the rebuilt shards belong to `images`."""
        wait([check for _, check in self._checks])
        self._mine.clear()
        for image in self._room.values():
            image.close()
        for close in self._close:
            close()


def reader_of(view: memoryview, touch: Bring) -> Read:
    def read(offset: int, into: memoryview) -> None:
        touch(offset, offset + len(into))
        into[:] = view[offset : offset + len(into)]

    return read
