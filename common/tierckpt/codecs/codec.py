"""What a codec is: something done to every block of a shard on its way to a level, and undone.

A codec is told nothing of files, levels or other blocks, and keeps nothing between calls. So one
instance serves any number of shards and threads, a block can be read without its neighbours, and
memory stays bounded by a few blocks. (Filters in a row over chunks are HDF5's idea.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tierckpt.errors import TierckptError
from tierckpt.format.encoding import Buffer, Parameter


class CodecError(TierckptError):
    """A codec cannot do its work: its package, or its key, is missing or is another one."""


@dataclass(frozen=True)
class BlockId:
    """Which block it is. No two blocks that a job ever stores agree in everything but the last."""

    job: str
    run_id: str
    generation: int
    version: int
    shard: int
    shards: int
    index: int
    """Number of the block in the shard."""
    item_bytes: int = 1
    """Size of the numbers in the block (of most of them). Known when encoding only."""

    def as_bytes(self) -> bytes:
        """Everything but `item_bytes`, for those who bind a block to its place."""
        place = (self.job, self.run_id, self.generation, self.version, self.shard, self.shards)
        return json.dumps([*place, self.index], separators=(",", ":")).encode()


class Codec(Protocol):
    """A class of these is called with the parameters that the user gave, by name, as keywords; and
    with those of `parameters`, to read what another instance wrote.

    Any thread may call it, several at once. Work that takes long should let go of the GIL.
    `testing.CodecConformance` checks what is said here.
    """

    name: str
    """As in the settings and in manifests."""
    most_extra_bytes: int
    """What `encode` returns is at most so much longer than what it was given."""
    hides: bool
    """True when nobody can learn anything of the content from what `encode` returns."""

    def parameters(self) -> Mapping[str, Parameter]:
        """What a reader must know. Goes into manifests, which anybody may read: no secrets."""
        ...

    def encode(self, block: Buffer, where: BlockId) -> Buffer:
        """What is to be stored; at least one byte. `block` is the caller's and not kept.

        Raises CodecError.
        """
        ...

    def decode(self, block: Buffer, where: BlockId) -> Buffer:
        """The inverse, to the byte.

        Raises CorruptShardError when `block` is not what `encode` made, where that can be told;
        what gets by is found later, by the shard's own checksums. Raises CodecError. What it
        returns must not grow beyond all bounds, whatever it is given.
        """
        ...
