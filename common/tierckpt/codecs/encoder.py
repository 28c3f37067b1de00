"""Encoding of a shard: plain blocks in, stored blocks out, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from tierckpt.format.encoding import Block, Buffer, Encoding, blocks_of
from tierckpt.format.manifest import Manifest, digest, digest_at

from .codec import BlockId
from .delta import Base, content_hash
from .pipeline import DIFFERENCES, Pipeline


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
                self._begin(block)
            if self._pipeline.full_every:
                self._hashes.append(content_hash(block))
                if self._refer(index):
                    continue
            yield self._store(block, index)
        if not self._base or not (0 in self._lengths or self._differences):
            self._base = None  # without a reference it is a whole version
        yield self._store(self._sealed_bytes, len(self._cut))

    def _begin(self, header: Buffer) -> None:
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
