"""Incremental versions: an unchanged block refers to the block of an earlier, whole version.

Frozen layers and embeddings then cost nothing after their first version. A version refers to at
most one other, and that one to none. So a read opens at most two files, retention follows one
reference only, and a damaged file affects the versions that refer to it and no others.

Blocks are compared by their xxh3_128, which the writer keeps in memory. So a restarted writer
begins with a whole version, and nothing on a level reveals which blocks are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from tierckpt.format.encoding import Buffer, Encoding
from tierckpt.format.manifest import Manifest


def content_hash(block: Buffer) -> bytes:
    """The hash by which blocks are compared."""
    return xxhash.xxh3_128_digest(block)


@dataclass(frozen=True)
class Base:
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


@dataclass
class Chain:
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
