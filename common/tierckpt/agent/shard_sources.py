"""Shards of the local level that an agent still reads, for a flush or for an exchange with peers.

`ShardGuard` keeps retention from the shards that are read. `open_source` opens a shard as a source
for the persistent level; each level has its own codecs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tierckpt.codecs.codec import CodecError, Pipeline
from tierckpt.codecs.shard_coding import Base, Chain, Decoder, Encoder, Plain, Read, cut
from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.ids import ShardKey, VersionName
from tierckpt.format.manifest import Buffer, Manifest
from tierckpt.format.records import ShardRecord
from tierckpt.storage.local import LocalStore, open_encoded
from tierckpt.storage.persistent import PersistentError, PersistentStore
from tierckpt.storage.persistent.backend import WINDOW_BYTES
from tierckpt.storage.persistent.shards import ShardSource, Source


class ShardGuard:
    """Set of local shards that must not be retired now. Any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Hold it from the check to the removal of a shard."""
        self._keys: dict[ShardKey, int] = {}

    def add(self, keys: list[ShardKey]) -> None:
        """Guard the shards; call it once for every use."""
        with self.lock:
            for key in keys:
                self._keys[key] = self._keys.get(key, 0) + 1

    def discard(self, keys: list[ShardKey]) -> None:
        """Undo one `add`."""
        with self.lock:
            for key in keys:
                self._keys[key] -= 1
                if not self._keys[key]:
                    del self._keys[key]

    def __contains__(self, key: ShardKey) -> bool:
        return key in self._keys


@contextlib.contextmanager
def open_shard(local: LocalStore, key: ShardKey) -> Iterator[tuple[memoryview, bytes]]:
    """A guarded shard's image, mapped, and the manifest that it was sealed with.

    The image is checked, because other nodes and the persistent level trust it. An encoded shard is
    decoded first, into a file without a name. Raises OSError, CorruptShardError, and the errors of
    `codecs.shard_coding.Decoder`.
    """
    data = local.read_manifest(key)
    manifest = Manifest.decode(data)
    if manifest.encoding is not None:
        from tierckpt.storage.local import open_encoded, unfolded

        decoder = open_encoded(local, manifest)
        with unfolded(local, decoder) as image:
            yield image, decoder.sealed_bytes
        return
    with sound_image(local, manifest) as image:
        yield image, data


@contextlib.contextmanager
def sound_image(local: LocalStore, manifest: Manifest) -> Iterator[memoryview]:
    """Bytes of a shard stored without codecs, mapped and checked."""
    from tierckpt.format.manifest import verify_shard

    mapped = local.open_image(manifest.key)
    image = memoryview(mapped)
    try:
        verify_shard(manifest, image, f"{manifest.key} in {local.directory}")
        yield image
    finally:
        with contextlib.suppress(BufferError):  # a traceback has a view, and frees it later
            image.release()
            mapped.close()


@dataclass
class UnfoldedSource:
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
    begin, window = 0, b""

    def read_ahead(offset: int, wanted: int) -> bytes:
        nonlocal begin, window
        if not begin <= offset <= offset + wanted <= begin + len(window):
            begin = offset
            window = read(offset, min(max(wanted, WINDOW_BYTES), nbytes - offset))
        return window[offset - begin : offset - begin + wanted]

    return read_ahead


def _no_other(key: ShardKey) -> tuple[Manifest, Read]:
    raise FormatError(f"{key} is a base, and refers to another version")


def _name_of(base: Base) -> VersionName:
    return base.manifest.facts.name
