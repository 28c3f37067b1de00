"""The codec `zstd`: lossless compression of numbers, byte planes first.

Floating-point numbers hardly compress as they are: their low bytes are noise. So all first bytes
are gathered, then all second bytes and so on (Blosc calls this shuffling). The high bytes, which
hold sign and exponent, then compress well. A block that does not get smaller is stored as it is.

numpy is imported here, so only agents that compress pay for it.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from tierckpt.errors import CorruptShardError
from tierckpt.format.manifest import Buffer, Parameter

from .codec import BlockId, CodecError

AS_IT_IS = 0
"""First byte of an uncompressed block; else the first byte is the size of the numbers."""
MAX_BLOCK_BYTES = 1 << 31
"""Limit of a decompressed block: a damaged length must not allocate more than that."""


class Zstd:
    """`level` is Zstandard's: 1 to 22 from fast to small; negative ones are faster still."""

    name = "zstd"
    most_extra_bytes = 1
    hides = False

    def __init__(self, level: int = 1) -> None:
        try:
            self._zstd: Any = importlib.import_module("zstandard")
        except ImportError as error:
            raise CodecError(
                f"the codec zstd needs a package that is not installed ({error}); run: pip "
                "install 'tierckpt[compression]'"
            ) from error
        lowest, highest = -100, self._zstd.MAX_COMPRESSION_LEVEL
        if type(level) is not int or not lowest <= level <= highest:
            raise CodecError(f"zstd level={level}: levels are whole, {lowest} to {highest}")
        self.level = level
        self._mine = threading.local()

    def parameters(self) -> Mapping[str, Parameter]:
        """The level; a reader does not need it, but may show it."""
        return {"level": self.level}

    def encode(self, block: Buffer, where: BlockId) -> Buffer:
        """Compress one block, see `Codec.encode`."""
        coder = getattr(self._mine, "compressor", None)
        if coder is None:  # one thread for each compressor
            coder = self._mine.compressor = self._zstd.ZstdCompressor(level=self.level)
        size = where.item_bytes if len(block) % where.item_bytes == 0 else 1
        packed = coder.compress(gather_planes(block, size))
        if len(packed) >= len(block):
            return b"".join((bytes([AS_IT_IS]), block))
        return b"".join((bytes([size]), packed))

    def decode(self, block: Buffer, where: BlockId) -> Buffer:
        """Decompress one block, see `Codec.decode`."""
        view = memoryview(block)
        if view[0] == AS_IT_IS:
            return view[1:]
        coder = getattr(self._mine, "decompressor", None)
        if coder is None:
            coder = self._mine.decompressor = self._zstd.ZstdDecompressor()
        try:
            expected = self._zstd.frame_content_size(view[1:])
            if not 0 <= expected <= MAX_BLOCK_BYTES:
                raise CorruptShardError(f"block {where.index} claims to have {expected} bytes")
            plain = coder.decompress(view[1:])
        except self._zstd.ZstdError as error:
            raise CorruptShardError(f"block {where.index} is no zstd frame: {error}") from error
        return scatter_planes(plain, view[0])


def gather_planes(block: Buffer, item_bytes: int) -> Buffer:
    """All first bytes of the items, then all second bytes, and so on."""
    if item_bytes == 1 or not len(block):
        return block
    items = np.frombuffer(block, np.uint8).reshape(-1, item_bytes)
    return np.ascontiguousarray(items.T).data.cast("B")


def scatter_planes(planes: Buffer, item_bytes: int) -> Buffer:
    """The inverse of `gather_planes`. Raises CorruptShardError when it cannot."""
    if item_bytes == 1:
        return planes
    if len(planes) % item_bytes:
        raise CorruptShardError(f"{len(planes)} bytes are no items of {item_bytes}")
    rows = np.frombuffer(planes, np.uint8).reshape(item_bytes, -1)
    items = np.empty((rows.shape[1], item_bytes), np.uint8)
    for number, row in enumerate(rows):  # twice as fast as a transposed copy, this way round
        items[:, number] = row
    return items.data.cast("B")
