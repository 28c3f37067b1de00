"""Manifest: the small record, written last, that alone makes a shard exist (see FORMAT.md).

Pure: plain values in and out. The same bytes seal a slot in memory and commit a file on disk, so
all levels give a reader the same information about a shard.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

import xxhash

from . import checksummed_json
from .encoding import Encoding
from .facts import VersionFacts
from .ids import ShardKey, VersionId

DIGEST_BYTES = 8
_JSON = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True)
class Manifest:
    """The description of one shard of one version."""

    facts: VersionFacts
    shard: int
    image_bytes: int
    header_bytes: int
    rank_state_bytes: int
    """Used bytes of the rank-state entry; the rest of it is zero padding."""
    digests: bytes
    """xxh3_64 of the header, then of every block: DIGEST_BYTES each, little endian."""
    created_seconds: float
    """Unix time of the seal."""
    encoding: Encoding | None = None
    """Set when codecs have changed the shard. Then `image_bytes` and `digests` describe the stored
    bytes, the other lengths are 0, and the stored bytes include the manifest of the seal."""

    @property
    def id(self) -> VersionId:
        """Generation and version."""
        return self.facts.id

    @property
    def key(self) -> ShardKey:
        """The shard's name."""
        return self.facts.key(self.shard)

    @property
    def data_blocks(self) -> int:
        """Number of blocks with a checksum, without the header."""
        return len(self.digests) // DIGEST_BYTES - 1

    def encode(self) -> bytes:
        """Return a line of JSON, and a line with its xxh3_128."""
        values = {
            **checksummed_json.head_of("manifest"),
            **self.facts.to_json(),
            "shard": self.shard,
            "image_bytes": self.image_bytes,
            "header_bytes": self.header_bytes,
            "rank_state_bytes": self.rank_state_bytes,
            "digests": base64.b64encode(self.digests).decode(),
            "created_seconds": self.created_seconds,
        }
        if self.encoding is not None:
            values["encoding"] = self.encoding.as_json()
        return checksummed_json.with_check(_JSON.encode(values).encode())

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Read the bytes that `encode` made.

        Raises CorruptShardError when the checksum does not match, FormatError when the bytes are
        intact but are no manifest, or one of a newer major version.
        """
        text, values = checksummed_json.checked(data, "manifest"), None
        try:
            values = json.loads(text)
            checksummed_json.check_head(values, "manifest", "manifest")
            encoding = values.get("encoding")
            return Manifest(
                facts=VersionFacts.from_json(values),
                shard=values["shard"],
                image_bytes=values["image_bytes"],
                header_bytes=values["header_bytes"],
                rank_state_bytes=values["rank_state_bytes"],
                digests=base64.b64decode(values["digests"]),
                created_seconds=values["created_seconds"],
                encoding=None if encoding is None else Encoding.of_json(encoding),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise checksummed_json.misfit(values, "manifest", error) from error


def digest(data: memoryview | bytes) -> bytes:
    """Return the checksum of one block."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(DIGEST_BYTES, "little")


def digest_at(digests: bytes, index: int) -> bytes:
    """Return one checksum of a sequence."""
    return digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
