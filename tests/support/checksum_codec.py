"""The shortest possible codec, as a user would write it. It puts a checksum before a block."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from tierckpt.codecs import BlockId
from tierckpt.errors import CorruptShardError
from tierckpt.format import Buffer, Parameter


class Checksum:
    """Puts the xxh3_64 of a block before it."""

    name = "checksum"
    most_extra_bytes = 8
    hides = False

    def parameters(self) -> Mapping[str, Parameter]:
        """This codec has no parameters."""
        return {}

    def encode(self, block: Buffer, where: BlockId) -> Buffer:
        """Encode a block as `Codec.encode` specifies."""
        return b"".join((xxhash.xxh3_64_digest(block), block))

    def decode(self, block: Buffer, where: BlockId) -> Buffer:
        """Decode a block as `Codec.decode` specifies."""
        content = memoryview(block)[8:]
        if xxhash.xxh3_64_digest(content) != bytes(block[:8]):
            raise CorruptShardError(f"block {where.index} differs from the checksum in it")
        return content
