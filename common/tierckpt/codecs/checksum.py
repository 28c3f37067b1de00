"""The module `checksum`: finds damage at its place in the row, rather than at its end.

Every stored block has a checksum anyway, and so has every block of the image: this one is for those
who want a third between two modules, and the shortest example of how a module is written.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from tierckpt.errors import CorruptShardError
from tierckpt.format.encoding import Buffer, Parameter

from .codec import BlockId


class Checksum:
    """Puts the xxh3_64 of a block before it."""

    name = "checksum"
    most_extra_bytes = 8
    hides = False

    def parameters(self) -> Mapping[str, Parameter]:
        """None."""
        return {}

    def encode(self, block: Buffer, where: BlockId) -> Buffer:
        """See `Module.encode`."""
        return b"".join((xxhash.xxh3_64_digest(block), block))

    def decode(self, block: Buffer, where: BlockId) -> Buffer:
        """See `Module.decode`."""
        content = memoryview(block)[8:]
        if xxhash.xxh3_64_digest(content) != bytes(block[:8]):
            raise CorruptShardError(f"block {where.index} differs from the checksum in it")
        return content
