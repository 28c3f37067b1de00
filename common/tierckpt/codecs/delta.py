"""Incremental versions: blocks that did not change are those of an earlier, whole version.

Frozen layers and embeddings then cost nothing after their first time. A version refers to one
other, which refers to none: what is read is never more than two files deep, retention has to look
one step only, and a damaged file harms the versions that refer to it and no others.

Blocks are compared by their xxh3_128, kept in memory by whoever writes them. So a writer that was
started anew begins with a whole version, and nothing on a level tells which blocks are alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from tierckpt.format.encoding import Buffer, Encoding
from tierckpt.format.manifest import Manifest


def content_hash(block: Buffer) -> bytes:
    """What blocks are compared by."""
    return xxhash.xxh3_128_digest(block)


@dataclass(frozen=True)
class Base:
    """A whole version of one shard, to refer to."""

    manifest: Manifest
    """As it is stored."""
    hashes: tuple[bytes, ...]
    """Of every block of its image."""

    @property
    def encoding(self) -> Encoding:
        """Of its manifest."""
        assert self.manifest.encoding is not None
        return self.manifest.encoding

    def fits(self, sealed: Manifest, described: object, cut: tuple[int, ...]) -> bool:
        """True when the shard that was sealed may refer to it."""
        ours, theirs = self.manifest.facts, sealed.facts
        return (
            (ours.job, ours.run_id, ours.id.generation, ours.shards)
            == (theirs.job, theirs.run_id, theirs.id.generation, theirs.shards)
            and self.manifest.shard == sealed.shard
            and ours.id.version < theirs.id.version
            and (self.encoding.codecs, self.encoding.plain_bytes) == (described, cut)
        )


@dataclass
class Chain:
    """Of one shard on one level: the base, and how many versions refer to it. One thread."""

    base: Base | None = None
    references: int = 0
    """Versions that were written with this base."""

    def base_for_next(self, full_every: int) -> Base | None:
        """What the next version may refer to, if of so many one is to be whole; None: it is."""
        return self.base if self.references < full_every - 1 else None

    def wrote(self, made: Base | None) -> None:
        """A version was written: a whole one (`made`), or one that refers to the base (None)."""
        if made is None:
            self.references += 1
        else:
            self.base, self.references = made, 0
