"""A stored shard's bytes, wherever they are: mapped from a slot or a file, or fetched.

This module checks only that the manifest is the right one; `shard_reader` checks the bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tierckpt.codecs.codec import CodecError
from tierckpt.codecs.decoder import Decoder, Read
from tierckpt.core.copies import Location
from tierckpt.erasure.parity_manifest import ParityManifest
from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.ids import ParityKey, ShardKey
from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.format.manifest import Manifest
from tierckpt.peer.read_client import RemoteFile, RemoteNode
from tierckpt.storage.files.mapped_file import MappedFile
from tierckpt.storage.local.encoded_files import open_encoded
from tierckpt.storage.local.store import LocalStore
from tierckpt.storage.memory.slots import Slot
from tierckpt.storage.persistent import PersistentError, PersistentStore, VersionName

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
    """A shard in a remote store; see `persistent.reader.ShardReader`."""

    @property
    def manifest(self) -> bytes: ...

    def read(self, offset: int, nbytes: int) -> bytes: ...

    def read_into(self, offset: int, into: memoryview) -> None: ...


class FarStore(Protocol):
    """A store that shards are fetched from: the persistent level, or an agent (`peer.remote`)."""

    def open_shard(self, name: VersionName, shard: int) -> Stored: ...

    def exists(self, name: VersionName) -> bool: ...

    def close(self) -> None: ...


OpenStore = Callable[[Location], FarStore]
"""Opens the store of a remote location."""
MakeRoom = Callable[[Manifest, Callable[[], None]], "ShardImage"]
"""Allocates the image of a shard; the second argument is called when the image is closed."""


def open_persistent(place: Location) -> FarStore:
    """Open a persistent store that needs no options."""
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
    """If this rank sees the version, whose manifest names the shard, a missing part is damage.
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
        begin, end = (offset - offset % mmap.PAGESIZE for offset in (low, high))
        if end > begin:
            room.madvise(mmap.MADV_DONTNEED, begin, end - begin)

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
        begin = low - low % mmap.PAGESIZE
        if high > begin:
            room.madvise(mmap.MADV_DONTNEED, begin, high - begin)  # the file keeps all pages

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
    """Map a parity; only its manifest is decoded. Raises the errors in `shard_image.LOST`."""
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
    """An image in memory that is filled block by block; each block is fetched once. Any thread."""

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
                    begin = block * BLOCK_BYTES
                    part = self.view[begin : begin + BLOCK_BYTES]
                    self._file.read_into(begin, part)
                    self._there.add(block)

    def close(self) -> None:
        self._then()
        with suppress(BufferError):  # a part is still in use: freed with that
            self.view.release()
            self._room.close()
