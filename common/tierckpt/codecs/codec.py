"""The interface of a codec: a reversible operation on every block of a shard.

A codec knows nothing of files, levels or other blocks, and keeps nothing between calls. So one
instance serves any number of shards and threads, a block can be read without its neighbours, and
memory stays bounded by a few blocks. (Filters in sequence over chunks are HDF5's idea.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tierckpt.errors import TierckptError
from tierckpt.format.encoding import Buffer, Parameter


class CodecError(TierckptError):
    """A codec cannot work: its package or its key is missing, or is another one."""


@dataclass(frozen=True)
class BlockId:
    """Identity of a block. No two blocks of a job agree in all fields but the last."""

    job: str
    run_id: str
    generation: int
    version: int
    shard: int
    shards: int
    index: int
    """Number of the block in the shard."""
    item_bytes: int = 1
    """Size of the numbers in the block (of most of them). Known only when encoding."""

    def as_bytes(self) -> bytes:
        """Everything but `item_bytes`, for codecs that bind a block to its place."""
        place = (self.job, self.run_id, self.generation, self.version, self.shard, self.shards)
        return json.dumps([*place, self.index], separators=(",", ":")).encode()


class Codec(Protocol):
    """A codec's class is called with the user's parameters as keywords. To read the blocks of
    another instance, it is called with that instance's `parameters`.

    Any thread may call it, several at once. Long work should release the GIL.
    `testing.CodecConformance` checks this contract.
    """

    name: str
    """Name in the settings and in manifests."""
    most_extra_bytes: int
    """The result of `encode` is at most this much longer than its input."""
    hides: bool
    """True when the result of `encode` reveals nothing of the content."""

    def parameters(self) -> Mapping[str, Parameter]:
        """Parameters that a reader needs. Manifests show them to anybody: no secrets."""
        ...

    def encode(self, block: Buffer, where: BlockId) -> Buffer:
        """Bytes to store for a block; at least one. `block` is the caller's and not kept.

        Raises CodecError.
        """
        ...

    def decode(self, block: Buffer, where: BlockId) -> Buffer:
        """The exact inverse of `encode`.

        Raises CorruptShardError when it detects that `block` is not a result of `encode`; the
        shard's own checksums find the rest later. Raises CodecError. The result must have a bounded
        length, whatever the input.
        """
        ...
