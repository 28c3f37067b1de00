"""Frames: the bytes of a journal, and the names of its files (see FORMAT.md). Pure.

A journal file is a sequence of frames. Each has a head of fixed length, a manifest, zeros up to a
page, and the image of a shard, so that images can be written past the page cache. Some `STEP`
frames and the `BOUNDARY` frame after them are one record: the gradients of the optimizer steps of
one iteration, and the small state after it.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import xxhash

from tierckpt.errors import CorruptShardError
from tierckpt.format.ids import PAGE_BYTES, ShardKey, VersionId, round_up

STEP, BOUNDARY = 0, 1
"""Kinds of frames."""
SUFFIX = ".journal"
HEAD_BYTES = 64
_MAGIC = b"tierjrn1"
_FIELDS = struct.Struct("<8s6Q")
_CHECK = struct.Struct("<Q")
_NAME = re.compile(
    rf"(?P<stem>.+)\.by(?P<writer>\d{{6,}})(\.copy(?P<keeper>\d{{5,}}))?{re.escape(SUFFIX)}"
)
ITSELF = -1
"""In place of a keeper: the rank of the shard wrote the file."""


@dataclass(frozen=True)
class FrameHead:
    """The head of a frame."""

    kind: int
    after: VersionId
    """The version or record that this frame's record follows."""
    digest: int
    """xxh3_64 of this rank's stripes of parameters and optimizer state after the record; 0 in a
    `STEP` frame."""
    manifest_bytes: int
    image_bytes: int

    @property
    def frame_bytes(self) -> int:
        """Length of the frame."""
        return self.image_offset + self.image_bytes

    @property
    def image_offset(self) -> int:
        """Offset of the image in the frame."""
        return round_up(HEAD_BYTES + self.manifest_bytes, PAGE_BYTES)

    def encode(self) -> bytes:
        """The head's bytes, with their xxh3_64 at the end."""
        lengths = self.manifest_bytes, self.image_bytes
        text = _FIELDS.pack(_MAGIC, self.kind, *self.after, self.digest, *lengths)
        return text + _CHECK.pack(xxhash.xxh3_64_intdigest(text))

    @staticmethod
    def decode(data: bytes | memoryview) -> FrameHead:
        """Read the bytes that `encode` made. Raises CorruptShardError for any others."""
        text = bytes(data[: _FIELDS.size])
        check = bytes(data[_FIELDS.size : HEAD_BYTES])
        if len(check) < _CHECK.size or check != _CHECK.pack(xxhash.xxh3_64_intdigest(text)):
            raise CorruptShardError("the head of a frame is truncated or damaged")
        magic, kind, generation, version, digest, manifest_bytes, image_bytes = _FIELDS.unpack(text)
        if magic != _MAGIC or kind not in (STEP, BOUNDARY):
            raise CorruptShardError(f"a frame of an unknown kind ({magic!r}, {kind})")
        after = VersionId(generation, version)
        return FrameHead(kind, after, digest, manifest_bytes, image_bytes)


@dataclass(frozen=True, order=True)
class SegmentName:
    """The name of a journal file: one rank's records between two versions on local."""

    base: ShardKey
    """The rank's shard of the version before the first record, or the record before it."""
    writer: int
    """Generation of the run that writes the file."""
    keeper: int = ITSELF
    """The rank that writes this copy of another rank's journal."""

    def __str__(self) -> str:
        copy = "" if self.keeper == ITSELF else f".copy{self.keeper:05d}"
        return f"{self.base.stem}.by{self.writer:06d}{copy}{SUFFIX}"

    @property
    def rank(self) -> int:
        """The rank that writes the file."""
        return self.base.shard if self.keeper == ITSELF else self.keeper

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        """Read a name; None if it is another kind of name."""
        match = _NAME.fullmatch(name)
        base = ShardKey.parse(match["stem"]) if match else None
        if match is None or base is None:
            return None
        return cls(base, int(match["writer"]), int(match["keeper"] or ITSELF))


__all__ = ["BOUNDARY", "HEAD_BYTES", "ITSELF", "STEP", "SUFFIX", "FrameHead", "SegmentName"]
