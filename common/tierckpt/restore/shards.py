"""Shards of a restore: a stored shard's bytes, wherever they are, and this rank's share of the
reads.

An image is mapped from a slot or a file, or fetched. Opening it checks only that the manifest is
the right one; the readers check the bytes.

Threads open, read and check this rank's share, every byte once. They hash the bytes while they are
in the core's cache, and call nothing collective, so the training thread may rebuild lost shards
with the other ranks at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct, field

from tierckpt._text import error_text
from tierckpt.codecs.codec import CodecError
from tierckpt.core.levels import AGENT
from tierckpt.core.restore_plan import Location, Source
from tierckpt.errors import CorruptShardError, FormatError, PersistentError
from tierckpt.format.ids import ParityKey, ShardKey, VersionId, VersionName
from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.format.manifest import Manifest, digest, digest_at
from tierckpt.format.shard_file import ShardHeader, decode_header
from tierckpt.storage.durable import MappedFile
from tierckpt.storage.local import LocalStore, open_encoded
from tierckpt.storage.slots import Slot

if TYPE_CHECKING:
    from tierckpt.codecs.shard_coding import Decoder, Read
    from tierckpt.erasure.parity_manifest import ParityManifest
    from tierckpt.peer.remote_reads import RemoteFile

LOST = (
    OSError,
    EOFError,
    ImportError,
    CorruptShardError,
    FormatError,
    CodecError,
    PersistentError,
)
"""Errors that make a copy unusable, for all ranks or for the reading rank."""


Part = tuple[int, int, memoryview]
"""A shard, an offset in it, and the bytes from there on."""
Bring = Callable[[int, int], None]


class Stored(Protocol):
    """A shard in a remote store; see `persistent.shards.ShardReader`."""

    @property
    def manifest(self) -> bytes: ...

    def read(self, offset: int, nbytes: int) -> bytes: ...

    def read_into(self, offset: int, into: memoryview) -> None: ...


class FarStore(Protocol):
    """A store that shards are fetched from: the persistent level, or an agent (`RemoteNode`)."""

    def open_shard(self, name: VersionName, shard: int) -> Stored: ...

    def exists(self, name: VersionName) -> bool: ...

    def close(self) -> None: ...


OpenStore = Callable[[Location], FarStore]
"""Opens the store of a remote location."""
MakeRoom = Callable[[Manifest, Callable[[], None]], "ShardImage"]
"""Allocates the image of a shard; the second argument is called when the image is closed."""


def open_persistent(place: Location) -> FarStore:
    """Open a persistent store that needs no options."""
    from tierckpt.storage.persistent import PersistentStore

    return PersistentStore(place.where)


def already_there(low: int, high: int) -> None:
    """A no-op: bytes in memory need no fetch, and mapped bytes need no release."""


class ShardImage:
    """One shard's bytes, mapped or received."""

    def __init__(
        self,
        manifest: Manifest,
        view: memoryview,
        close: Callable[[], None],
        bring: Bring = already_there,
        touch: Bring = already_there,
        forget: Bring = already_there,
        rest: Bring = already_there,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.manifest = manifest
        self.view = view
        self.bring = bring
        """`bring(low, high)` reads these bytes into `view`. Call it once for each range; any
        thread. Raises the errors of `open_image`."""
        self.touch = touch
        """`touch(low, high)` must precede access to bytes of a mapped file that may not be in
        memory; any number of times, any thread. Raises OSError."""
        self.forget = forget
        """`forget(low, high)`: these bytes, and all before them, are not needed any more; memory
        used only by them is returned to the system."""
        self.rest = rest
        """`rest(low, high)`: these bytes are not accessed before the next `touch`; any thread."""
        self.settle = settle
        """`settle()`, after all bytes were brought: checks that spilled bytes can be read back.
        Raises SetAsideError."""
        self._close = close

    def close(self) -> None:
        """Unmap."""
        self.view.release()
        self._close()


class SetAsideError(Exception):
    """Fetched bytes were spilled to a file of this process and cannot be read back. No copy is at
    fault."""


def open_image(
    key: ShardKey,
    place: Location,
    run_id: str = "",
    open_store: OpenStore = open_persistent,
    make_room: MakeRoom | None = None,
) -> ShardImage:
    """Map the shard, or allocate memory for it; `ShardImage.bring` reads its bytes. `open_store`
    opens remote stores. `make_room` allocates for shards that must be fetched or decoded (default:
    `in_memory`).

    Raises the errors in LOST.
    """
    make_room = make_room or in_memory
    if place.is_far:
        return _fetch(key, place, run_id, open_store, make_room)
    if place.level == "memory":
        slot = Slot.open(Path(place.where))
        if slot is None:
            raise FileNotFoundError(f"slot {place.where} is gone")
        try:
            data = slot.manifest_bytes()
            if data is None or (manifest := Manifest.decode(data)).key != key:
                raise CorruptShardError(f"slot {place.where} no longer holds {key}")
            if slot.image_bytes < manifest.image_bytes:
                raise CorruptShardError(f"the image of {key} in slot {place.where} is truncated")
            return ShardImage(manifest, slot.image(), slot.close)
        except BaseException:
            slot.close()
            raise
    store = LocalStore(place.where)
    manifest = Manifest.decode(store.read_manifest(key))
    if manifest.encoding is not None:
        return _decoded(open_encoded(store, manifest), lambda: None, make_room)
    try:
        file = MappedFile(store.open_image(key))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"its data file {key.stem}{key.SUFFIX} is missing; its manifest exists"
        ) from None
    return ShardImage(manifest, file.view, file.close, file.bring, file.bring)


def _fetch(
    key: ShardKey, place: Location, run_id: str, open_store: OpenStore, make_room: MakeRoom
) -> ShardImage:
    """An image of a remote shard, and the function that fills it."""
    shared = open_store(place)
    name = VersionName(key.id, key.shards, run_id)

    def other(base: ShardKey) -> tuple[Manifest, Read]:
        found = shared.open_shard(VersionName(base.id, base.shards, run_id), base.shard)
        return Manifest.decode(found.manifest), found.read

    try:
        with _missing_here_or_anywhere(shared, name):
            reader = shared.open_shard(name, key.shard)
        manifest = Manifest.decode(reader.manifest)
        if manifest.key != key:
            raise CorruptShardError(f"{place.where} has {manifest.key} instead of {key}")
        if manifest.encoding is not None:
            from tierckpt.codecs.shard_coding import Decoder

            image = _decoded(Decoder(manifest, reader.read, other), shared.close, make_room)
        else:
            image = make_room(manifest, shared.close)
    except BaseException:
        shared.close()
        raise
    decode = image.bring

    def bring(low: int, high: int) -> None:
        with _missing_here_or_anywhere(shared, name):
            if manifest.encoding is not None:
                decode(low, high)
            else:
                reader.read_into(low, image.view[low:high])

    image.bring = bring
    return image


@contextlib.contextmanager
def _missing_here_or_anywhere(shared: FarStore, name: VersionName) -> Iterator[None]:
    """If this rank sees the version, with the shard in its manifest, a missing part is damage.
    Otherwise FileNotFoundError is raised unchanged: another rank may see the version."""
    try:
        yield
    except FileNotFoundError as error:
        if shared.exists(name):
            raise CorruptShardError(f"a part of it is missing: {error}") from error
        raise


def _decoded(decoder: Decoder, close: Callable[[], None], make_room: MakeRoom) -> ShardImage:
    """An image for an encoded shard, and the function that fills it."""
    image = make_room(decoder.sealed, close)

    def bring(low: int, high: int) -> None:
        decoder.bring(low, high, image.view)

    image.bring = bring
    return image


def in_memory(manifest: Manifest, then: Callable[[], None] = lambda: None) -> ShardImage:
    """An image in memory of this process, zeros at first; `then` is called when it is closed."""
    room = mmap.mmap(-1, manifest.image_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def forget(low: int, high: int) -> None:
        start, end = (offset - offset % mmap.PAGESIZE for offset in (low, high))
        if end > start:
            room.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close() -> None:
        with contextlib.suppress(BufferError):  # a part is still in use: freed with that
            room.close()
        then()

    return ShardImage(manifest, memoryview(room), close, forget=forget)


def in_file(
    manifest: Manifest, folder: Path, then: Callable[[], None] = lambda: None
) -> ShardImage:
    """An image in a file without a name in `folder`: it needs memory only for the pages in use, and
    others as the system can spare them. Raises OSError if the disk has no room, or the folder is
    missing."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, manifest.image_bytes)  # or a full disk is SIGBUS
        room = mmap.mmap(file.fileno(), manifest.image_bytes)
        own = os.dup(file.fileno())
    mapped = MappedFile(room)

    def rest(low: int, high: int) -> None:
        start = low - low % mmap.PAGESIZE
        if high > start:
            room.madvise(mmap.MADV_DONTNEED, start, high - start)  # the file keeps all pages

    def settle() -> None:
        try:
            os.fsync(own)  # pages that could not be written come back as if they had been
        except OSError as error:
            raise SetAsideError(f"fetched shards cannot be kept in {folder}: {error}") from error

    def close() -> None:
        mapped.close()
        os.close(own)
        then()

    view = mapped.view
    return ShardImage(
        manifest, view, close, touch=mapped.bring, forget=rest, rest=rest, settle=settle
    )


class ParityImage(Protocol):
    """A mapped image; `bring` makes its bytes available, see `MappedFile`."""

    view: memoryview

    def ask(self, low: int = 0, high: int | None = None) -> None: ...

    def bring(self, low: int, high: int) -> None: ...

    def close(self) -> None: ...


def open_parity(
    key: ParityKey, place: Location, open_store: OpenStore
) -> tuple[ParityManifest, ParityImage]:
    """Map a parity; only its manifest is decoded. Raises the errors in `LOST`."""
    from tierckpt.erasure.parity_manifest import ParityManifest
    from tierckpt.peer.remote_reads import RemoteNode

    if not place.is_far:
        store = LocalStore(place.where)
        record = ParityManifest.decode(store.read_manifest(key))
        return record, MappedFile(store.open_image(key))
    node = open_store(place)
    try:
        if not isinstance(node, RemoteNode):
            raise FileNotFoundError(f"{key} no longer exists: {place.where} has no parity")
        file = node.open_parity(key)
        record = ParityManifest.decode(file.manifest)
        return record, _Fetched(file, record.image_bytes, node.close)
    except BaseException:
        node.close()
        raise


class _Fetched:
    """An image in memory, filled block by block; each block is fetched once. Any thread."""

    def __init__(self, file: RemoteFile, nbytes: int, then: Callable[[], None]) -> None:
        self._room = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._room)[:nbytes]
        self._file, self._then = file, then
        self._lock = threading.Lock()
        self._there: set[int] = set()
        """Which blocks are there."""

    def ask(self, low: int = 0, high: int | None = None) -> None:
        """Does nothing: all blocks come by one connection."""

    def bring(self, low: int, high: int) -> None:
        """Fetch the missing blocks of the range. Raises OSError, and EOFError."""
        with self._lock:
            for block in range(low // BLOCK_BYTES, -(-high // BLOCK_BYTES)):
                if block not in self._there:
                    start = block * BLOCK_BYTES
                    part = self.view[start : start + BLOCK_BYTES]
                    self._file.read_into(start, part)
                    self._there.add(block)

    def close(self) -> None:
        self._then()
        with suppress(BufferError):  # a part is still in use: freed with that
            self.view.release()
            self._room.close()


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


class Failure(Struct, frozen=True):
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
    """The copy does not exist (any more); there may be a newer version (see `VersionSearch`)."""
    silent: bool = False
    """The agent that has the copy does not answer any request."""

    @staticmethod
    def of(key: ShardKey, place: Location, error: BaseException) -> Failure:
        """The failure of a copy with this `error`."""
        why = error_text(error, *LOST)
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
        """Open the shards and start to read them. `finish` returns the failures."""
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
