"""Encoding and decoding of a shard, block by block, also against an earlier version.

`Encoder`: plain blocks in, stored blocks out, one at a time. `Decoder`: stored blocks in, plain
blocks out, in any order, by any thread.

*Incremental versions:* an unchanged block refers to the block of an earlier, whole version. Frozen
layers and embeddings then cost nothing after their first version. A version refers to at most one
other, and that one to none. So a read opens at most two files, retention follows one reference
only, and a damaged file affects the versions that refer to it and no others.

Blocks are compared by their xxh3_128, which the writer keeps in memory. So a restarted writer
starts with a whole version, and nothing on a level reveals which blocks are equal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator

import xxhash
from msgspec import Struct
from msgspec.structs import replace

from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.ids import ShardKey
from tierckpt.format.manifest import (
    DIGEST_BYTES,
    Block,
    Buffer,
    Encoding,
    Manifest,
    blocks_of,
    digest,
    digest_at,
)

from .codec import DIFFERENCES, BlockId, Pipeline


def content_hash(block: Buffer) -> bytes:
    """The hash by which blocks are compared."""
    return xxhash.xxh3_128_digest(block)


class Base(Struct, frozen=True):
    """A whole version of one shard, for other versions to refer to."""

    manifest: Manifest
    """The manifest as it is stored."""
    hashes: tuple[bytes, ...]
    """Hash of every block of the image."""

    @property
    def encoding(self) -> Encoding:
        """Encoding in the manifest."""
        assert self.manifest.encoding is not None
        return self.manifest.encoding

    def fits(self, sealed: Manifest, described: object, cut: tuple[int, ...]) -> bool:
        """True when the shard with manifest `sealed` may refer to this version."""
        ours, theirs = self.manifest.facts, sealed.facts
        return (
            (ours.job, ours.run_id, ours.id.generation, ours.shards)
            == (theirs.job, theirs.run_id, theirs.id.generation, theirs.shards)
            and self.manifest.shard == sealed.shard
            and ours.id.version < theirs.id.version
            and (self.encoding.codecs, self.encoding.plain_bytes) == (described, cut)
        )


class Chain(Struct):
    """The base of one shard on one level, and the number of references to it. One thread."""

    base: Base | None = None
    references: int = 0
    """Versions that were written with this base."""

    def base_for_next(self, full_every: int) -> Base | None:
        """Base for the next version; None when it must be whole, as one of `full_every` is."""
        return self.base if self.references < full_every - 1 else None

    def wrote(self, made: Base | None) -> None:
        """Record a written version: a whole one (`made`), or one that refers to the base (None)."""
        if made is None:
            self.references += 1
        else:
            self.base, self.references = made, 0


def cut(image: memoryview, header_bytes: int) -> Iterator[memoryview]:
    """The blocks of an image in memory. Raises FormatError."""
    low = 0
    for block in blocks_of(image, header_bytes):
        yield image[low : low + block.nbytes]
        low += block.nbytes


BlockOf = Callable[[int], Buffer]
"""Returns a plain block of a base, by its number."""


class Encoder:
    """One shard, encoded once. One thread; buffers one block, and with `delta` three more."""

    def __init__(
        self,
        pipeline: Pipeline,
        sealed: bytes,
        base: Base | None = None,
        block_of: BlockOf | None = None,
    ) -> None:
        """`sealed` is the manifest that the shard was sealed with. Blocks that are the same in
        `base` become references to it, if it fits. If the pipeline has `delta`, other blocks may
        become differences to the base's, which `block_of` reads."""
        self._pipeline, self._sealed_bytes, self._base = pipeline, sealed, base
        self._block_of = block_of if pipeline.delta else None
        self._differences: dict[int, int] = {}
        self._sealed = Manifest.decode(sealed)
        self._hashes: list[bytes] = []
        self._lengths: list[int] = []
        self._digests: list[bytes] = []
        self._cut: list[Block] = []

    def stored(self, plain: Iterable[Buffer]) -> Iterator[Buffer]:
        """Bytes to store, block by block; `plain` are all blocks of the image in order.

        A block that was yielded is valid until the next one is asked for. Raises CodecError, and
        FormatError when the blocks are not those of a shard. Raises the errors of `block_of`.
        """
        for index, block in enumerate(plain):
            if index == 0:
                self._start(block)
            if self._pipeline.full_every:
                self._hashes.append(content_hash(block))
                if self._refer(index):
                    continue
            yield self._store(block, index)
        if not self._base or not (0 in self._lengths or self._differences):
            self._base = None  # without a reference it is a whole version
        yield self._store(self._sealed_bytes, len(self._cut))

    def _start(self, header: Buffer) -> None:
        self._cut = blocks_of(header, self._sealed.header_bytes)
        lengths = tuple(block.nbytes for block in self._cut)
        if self._base and not self._base.fits(self._sealed, self._pipeline.description, lengths):
            self._base = None

    def _refer(self, index: int) -> bool:
        """Refer to the base's block, if it is the same; returns True then."""
        if self._base is None or self._base.hashes[index] != self._hashes[index]:
            return False
        self._lengths.append(0)
        self._digests.append(digest_at(self._base.manifest.digests, index))
        return True

    def _store(self, block: Buffer, index: int) -> Buffer:
        size = self._cut[index].item_bytes if index < len(self._cut) else 1
        place = where(self._sealed, index, size)
        if self._base and self._block_of and 0 < index < len(self._cut):
            block = self._shorter(block, index, place)
        stored = self._pipeline.encode(block, place)
        self._lengths.append(len(stored))
        self._digests.append(digest(memoryview(stored)))
        return stored

    def _shorter(self, block: Buffer, index: int, place: BlockId) -> Buffer:
        """The block, or its difference to the base's if that gets shorter."""
        from .difference import difference, item_bytes_of, pays

        assert self._block_of is not None
        size = item_bytes_of(len(block), place.item_bytes)
        changed = difference(block, self._block_of(index), size)
        if not pays(changed, block, self._pipeline.codecs[0], place):
            return block
        self._differences[index] = size
        return changed

    @property
    def manifest(self) -> Manifest:
        """Manifest of the stored shard, once everything was yielded."""
        described = self._pipeline.description
        encoding = Encoding(
            DIFFERENCES + described if self._differences else described,
            tuple(block.nbytes for block in self._cut),
            tuple(self._lengths),
            self._base.manifest.id if self._base else None,
            self._differences,
        )
        return replace(
            self._sealed,
            image_bytes=sum(self._lengths),
            header_bytes=0,
            rank_state_bytes=0,
            digests=b"".join(self._digests),
            encoding=encoding,
        )

    @property
    def made(self) -> Base | None:
        """This version as a base for later ones; None when it refers to a base itself."""
        return None if self._base else Base(self.manifest, tuple(self._hashes))


def where(sealed: Manifest, index: int, item_bytes: int = 1) -> BlockId:
    """The identity of a block of this shard."""
    facts, id_ = sealed.facts, sealed.facts.id
    version = (facts.job, facts.run_id, id_.generation, id_.version)
    return BlockId(*version, sealed.shard, facts.shards, index, item_bytes)


Plain = Callable[[], Iterator[Buffer]]
"""The blocks of an image, from the first one at every call."""


Read = Callable[[int, int], bytes]
"""`read(offset, nbytes)`: a range of a stored shard; shorter where it ends. Any thread."""
OpenOther = Callable[[ShardKey], tuple[Manifest, Read]]
"""Opens the same shard of another version on the same level."""


class Decoder:
    """One encoded shard. Any thread may ask for blocks; each call holds one in memory."""

    def __init__(self, manifest: Manifest, read: Read, open_other: OpenOther) -> None:
        """Read the sealed manifest, which also proves that codecs and keys are the right ones.

        Raises the errors of `read` and `open_other`; CodecError; CorruptShardError or FormatError
        when the stored bytes do not match the manifests.
        """
        self._manifest, self._read = manifest, read
        self.encoding = _encoding_of(manifest)
        self._pipeline = Pipeline.of_description(self.encoding.codecs)
        self._base = self._open_base(open_other)
        self.sealed_bytes = bytes(self._block(len(self.encoding.plain_bytes)))
        """The manifest that the shard was sealed with."""
        self.sealed = Manifest.decode(self.sealed_bytes)
        total = self.encoding.plain_offsets[-1]
        if (self.sealed.key, self.sealed.facts.run_id, self.sealed.image_bytes) != (
            manifest.key,
            manifest.facts.run_id,
            total,
        ):
            raise CorruptShardError(f"{manifest.key} has the sealed manifest of another shard")

    @property
    def hides(self) -> bool:
        """True when the shard is encrypted."""
        return self._pipeline.hides

    def _open_base(self, open_other: OpenOther) -> Decoder | None:
        key = self._manifest.key
        other = self.encoding.base_of(key)
        if other is None:
            return None
        base, read = open_other(other)
        theirs = _encoding_of(base)
        if (base.key, base.facts.run_id, theirs.base) != (other, self._manifest.facts.run_id, None):
            raise FormatError(f"{key} refers to {other}, which cannot be its base")
        if theirs.plain_bytes != self.encoding.plain_bytes:
            raise FormatError(f"{key} refers to {other}, which has blocks of other lengths")
        try:
            return Decoder(base, read, open_other)
        except CorruptShardError as error:
            raise self._refers_to(error) from error

    def _refers_to(self, error: Exception) -> CorruptShardError:
        base = self.encoding.base_of(self._manifest.key)
        return CorruptShardError(f"{self._manifest.key} refers to {base}: {error}")

    def block(self, index: int) -> Buffer:
        """One block of the image. Raises as the constructor does."""
        if self._base is not None and not self.encoding.stored_bytes[index]:
            if self._base._digest(index) != self._digest(index):
                raise CorruptShardError(f"block {index} of {self._base._manifest.key} was replaced")
            block = self._of_base(self._base, index)
        else:
            block = self._block(index)
        nbytes = self.encoding.plain_bytes[index]
        if len(block) != nbytes:
            raise CorruptShardError(
                f"block {index} of {self._manifest.key} has {len(block)} bytes, not {nbytes}"
            )
        size = self.encoding.differences.get(index)
        if self._base is not None and size is not None:
            from .difference import undone

            block = undone(block, self._of_base(self._base, index), size)
        return block

    def _of_base(self, base: Decoder, index: int) -> Buffer:
        try:
            return base.block(index)
        except CorruptShardError as error:
            raise self._refers_to(error) from error

    def blocks(self) -> Iterator[Buffer]:
        """All blocks of the image, in order."""
        return (self.block(index) for index in range(len(self.encoding.plain_bytes)))

    def bring(self, low: int, high: int, into: memoryview) -> None:
        """Put bytes `[low, high)` of the image, and the rest of their blocks, into `into`, which
        has the size of the image."""
        starts = self.encoding.plain_offsets
        for index in range(bisect_right(starts, low) - 1, len(starts) - 1):
            if starts[index] >= high:
                break
            into[starts[index] : starts[index + 1]] = self.block(index)

    def _block(self, index: int) -> Buffer:
        """A block stored in this shard; the one after the image's blocks is the sealed manifest."""
        stored = stored_block(self._manifest, self.encoding, self._read, index)
        return self._pipeline.decode(stored, where(self._manifest, index))

    def _digest(self, index: int) -> bytes:
        return digest_at(self._manifest.digests, index)


def check_stored(manifest: Manifest, read: Read) -> int:
    """Compare the stored bytes of an encoded shard with their digests; returns their number. This
    needs neither codecs nor keys, and does not prove that decoding would succeed.

    Raises the errors of `read`; CorruptShardError and FormatError.
    """
    encoding = _encoding_of(manifest)
    for index, nbytes in enumerate(encoding.stored_bytes):
        if nbytes:  # else it is stored in another version, which has its own digests
            stored_block(manifest, encoding, read, index)
    return manifest.image_bytes


def stored_block(manifest: Manifest, encoding: Encoding, read: Read, index: int) -> bytes:
    """One block as it is stored. Raises as `check_stored`."""
    start, nbytes = encoding.offsets[index], encoding.stored_bytes[index]
    stored = read(start, nbytes)
    if len(stored) != nbytes:
        raise CorruptShardError(f"{manifest.key} is truncated: no bytes at {start + len(stored)}")
    if digest(stored) != digest_at(manifest.digests, index):
        raise CorruptShardError(
            f"stored bytes {start} to {start + nbytes} of {manifest.key} differ from their checksum"
        )
    return stored


def _encoding_of(manifest: Manifest) -> Encoding:
    if manifest.encoding is None:
        raise FormatError(f"{manifest.key} is not encoded")
    count = len(manifest.encoding.stored_bytes)
    if len(manifest.digests) != count * DIGEST_BYTES:
        raise FormatError(f"{manifest.key} has {len(manifest.digests)} bytes of digests")
    return manifest.encoding
