"""This rank's share of the reads of a restore: threads open, read and check it, every byte once.

The threads hash the bytes while they are in the core's cache, and call nothing collective, so the
training thread may rebuild lost shards with the other ranks at the same time.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest
from typing import NamedTuple

from tierckpt._text import in_words
from tierckpt.codecs.codec import CodecError
from tierckpt.core.copies import Location
from tierckpt.core.levels import AGENT
from tierckpt.core.restore_plan import Source
from tierckpt.errors import CorruptShardError
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.manifest import digest, digest_at
from tierckpt.format.shard_file import ShardHeader, decode_header

from .shard_image import LOST, MakeRoom, OpenStore, Part, ShardImage, open_image, open_persistent

READERS = 4
"""Reader threads of a rank: enough that some hash while others wait for storage."""
RUN_BYTES = 8 * 1024 * 1024
"""Bytes that are read and checked at once; whole blocks."""


class FaultScope(Enum):
    """The scope of a failed read: the copy, the path to it, or the rank."""

    COPY = "copy"
    """The copy's bytes are bad: no rank can use it."""
    SIGHT = "sight"
    """This rank cannot reach the copy: other ranks may."""
    RANK = "rank"
    """This rank is out of memory or descriptors, or met a bug of ours or of a client. This says
    nothing about any copy, and another attempt would fail too."""

    @staticmethod
    def of(place: Location, error: BaseException) -> FaultScope:
        """The scope that follows from the error and the location."""
        if not isinstance(error, LOST) or _lacks_room(error):
            return FaultScope.RANK
        if isinstance(error, ImportError):
            return FaultScope.SIGHT
        if not isinstance(error, OSError):
            return FaultScope.COPY
        # All ranks that see a copy on a node's disk see the same disk.
        of_the_disk = isinstance(error, FileNotFoundError) or error.errno == errno.EIO
        return FaultScope.COPY if of_the_disk and not place.is_far else FaultScope.SIGHT


def _lacks_room(error: BaseException | None) -> bool:
    """True also if a store wrapped the error in its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__
    return False


@dataclass(frozen=True)
class Failure:
    """A failed read of one copy (of a shard, or of parity), with the reason."""

    key: ShardKey
    place: Location
    why: str
    undecodable: bool = False
    """A key or a codec is missing here: with it the copy may be sound."""
    blame: FaultScope = FaultScope.COPY
    node: str = field(default_factory=socket.gethostname)
    """The node that met the failure."""
    gone: bool = False
    """The copy does not exist (any more); there may be a newer version (see `RestoreSession`)."""
    silent: bool = False
    """The agent that has the copy does not answer any request."""

    @staticmethod
    def of(key: ShardKey, place: Location, error: BaseException) -> Failure:
        """The failure of a copy for which `error` was raised."""
        why = in_words(error, *LOST)
        blame, undecodable = FaultScope.of(place, error), isinstance(error, CodecError)
        silent = place.level == AGENT and isinstance(error, ConnectionError)
        return Failure(key, place, why, undecodable, blame, gone=_is_gone(error), silent=silent)


def _is_gone(error: BaseException) -> bool:
    """True also for a network file system's own error for it."""
    stale = isinstance(error, OSError) and error.errno == errno.ESTALE
    return stale or isinstance(error, FileNotFoundError)


OnRead = Callable[[int], None]
Kept = dict[tuple[ShardKey, Location, str], tuple[ShardImage, ShardHeader]]
"""Fetched shards that proved sound, by shard, location and run."""


class Run(NamedTuple):
    """Adjacent blocks."""

    low: int
    """Offset in the shard, in bytes."""
    first: int
    """Number of the first block; block 0 is the header."""
    block_bytes: tuple[int, ...]

    @property
    def high(self) -> int:
        """Offset of the end."""
        return self.low + sum(self.block_bytes)


Opened = tuple[ShardKey, Location, Future[tuple[ShardImage, ShardHeader]]]


def _give_up(opening: Future[tuple[ShardImage, ShardHeader]], taken: ShardImage | None) -> None:
    """Close an image when it is opened, unless it was taken."""
    if opening.cancel() or opening.exception() is not None:
        return
    image, _ = opening.result()
    if image is not taken:
        image.close()


class Reads:
    """Reads this rank's share of a version. One thread makes all calls; the caller owns `pool` and
    the images."""

    def __init__(
        self,
        pool: Executor,
        images: dict[int, ShardImage],
        on_read: OnRead = lambda nbytes: None,
        open_store: OpenStore = open_persistent,
        kept: Kept | None = None,
        make_room: MakeRoom | None = None,
    ) -> None:
        """Puts images into `images`, by shard; `on_read` receives counts of bytes read, from any
        thread. Images in `kept` are used again and not fetched; `make_room` allocates for fetched
        shards, see `open_image`."""
        self._pool, self._images, self._on_read = pool, images, on_read
        self._open_store, self._kept = open_store, {} if kept is None else kept
        self._make_room = make_room
        self.on_open: Callable[[ShardHeader], None] = lambda header: None
        """Called with each header before the rest of that shard is read; raises nothing."""
        self._checks: list[tuple[ShardKey, Location, list[Future[None]]]] = []
        self.headers: dict[int, ShardHeader] = {}
        """Checked headers of the shards that could be opened."""

    def open(self, version: VersionId, shards: int, run_id: str, sources: Iterable[Source]) -> None:
        """Open the shards and begin to read them. `finish` returns the failures."""
        opened: list[Opened] = []
        try:
            self._open(version, shards, run_id, sources, opened)
        except BaseException:
            for key, _, opening in opened:
                _give_up(opening, self._images.get(key.shard))
            raise

    def _open(
        self,
        version: VersionId,
        shards: int,
        run_id: str,
        sources: Iterable[Source],
        opened: list[Opened],
    ) -> None:
        """Register the shards being opened in `opened`, also if an error is raised."""
        for source in sources:
            key = ShardKey(version, source.shard, shards)
            there = self._kept.pop((key, source.place, run_id), None)
            if there is not None:
                self._images[key.shard], self.headers[key.shard] = there
                self.on_open(self.headers[key.shard])
                self._checks.append((key, source.place, []))
                continue
            how = (run_id, self._open_store, self._make_room)
            opening = self._pool.submit(_open, key, source.place, *how)
            opened.append((key, source.place, opening))
        for key, place, opening in opened:
            checks: list[Future[None]] = []
            try:
                image, header = opening.result()
            except Exception as error:
                checks.append(_failed(error))
            else:
                self._images[key.shard], self.headers[key.shard] = image, header
                self._on_read(header.header_bytes)
                self.on_open(header)
                checks += [self._pool.submit(self._check, image, run) for run in runs_of(header)]
            self._checks.append((key, place, checks))

    def opened(self) -> bool:
        """False if a shard could not be opened."""
        return len(self.headers) == len(self._checks)

    def sound(self) -> Iterator[Part]:
        """Parts that are read, in order, each as soon as it is checked; of a damaged shard, the
        parts before the damage. Raises OSError if mapped bytes can no longer be read."""
        for key, _, checks in self._checks:
            if (header := self.headers.get(key.shard)) is not None:
                yield from _checked(key.shard, self._images[key.shard], header, checks)

    def finish(self) -> list[Failure]:
        """Wait until everything is read; returns the failed copies, each with its first damage.
        Raises nothing, whatever happened before: the other ranks wait for this one."""
        failures = []
        for key, place, checks in self._checks:
            errors = [error for each in checks if (error := each.exception()) is not None]
            if not errors:
                errors = _settled(self._images[key.shard])
            failures += [Failure.of(key, place, error) for error in errors[:1]]
        return failures

    def _check(self, image: ShardImage, run: Run) -> None:
        """Read some blocks and compare them with their digests."""
        offset, digests = run.low, image.manifest.digests
        image.bring(offset, run.high)
        for number, nbytes in enumerate(run.block_bytes, run.first):
            if digest(image.view[offset : offset + nbytes]) != digest_at(digests, number):
                raise CorruptShardError(
                    f"bytes {offset} to {offset + nbytes} differ from their checksum"
                )
            offset += nbytes
        image.rest(run.low, run.high)
        self._on_read(sum(run.block_bytes))


def _checked(
    shard: int, image: ShardImage, header: ShardHeader, checks: Iterable[Future[None]]
) -> Iterator[Part]:
    """`checks` are the checks of all runs; empty if all were checked before."""
    yield shard, 0, image.view[: header.header_bytes]
    for run, check in zip_longest(runs_of(header), checks):
        if check is not None and check.exception() is not None:
            return
        image.touch(run.low, run.high)
        yield shard, run.low, image.view[run.low : run.high]


def runs_of(header: ShardHeader) -> Iterator[Run]:
    """All blocks of a shard, in runs of at most RUN_BYTES."""
    low, first, blocks = header.header_bytes, 1, list[int]()
    for number, nbytes in enumerate(header.block_bytes, 1):
        if blocks and sum(blocks) + nbytes > RUN_BYTES:
            yield Run(low, first, tuple(blocks))
            low, first, blocks = low + sum(blocks), number, []
        blocks.append(nbytes)
    if blocks:
        yield Run(low, first, tuple(blocks))


def _open(
    key: ShardKey, place: Location, run_id: str, open_store: OpenStore, make_room: MakeRoom | None
) -> tuple[ShardImage, ShardHeader]:
    """Open a shard and check its header. Raises the errors of `open_image` and of the check."""
    image = open_image(key, place, run_id, open_store, make_room)
    try:
        return image, check_header(image)
    except BaseException:
        image.close()
        raise


def check_header(image: ShardImage) -> ShardHeader:
    """Read the header, compare it with its digest and with the manifest, and decode it.

    Raises CorruptShardError or FormatError.
    """
    manifest, view = image.manifest, image.view
    if len(view) < manifest.image_bytes:
        raise CorruptShardError(f"truncated: {len(view)} of {manifest.image_bytes} bytes")
    end = manifest.header_bytes
    image.bring(0, end)
    if digest(view[:end]) != digest_at(manifest.digests, 0):
        raise CorruptShardError(f"bytes 0 to {end} (the header) differ from their checksum")
    header = decode_header(view[:end])
    lengths = (len(header.block_bytes), end + header.data_bytes)
    if lengths != (manifest.data_blocks, manifest.image_bytes):
        raise CorruptShardError("the header and the manifest do not belong together")
    return header


def _settled(image: ShardImage) -> list[BaseException]:
    try:
        image.settle()
    except Exception as error:
        return [error]
    return []


def _failed(error: Exception) -> Future[None]:
    failed: Future[None] = Future()
    failed.set_exception(error)
    return failed
