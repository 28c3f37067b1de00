"""The manifest: the small record, written last, that alone makes a shard exist (see FORMAT.md).

Pure: plain values in and out. The same bytes seal a slot in memory and commit a file on disk, so
whoever finds a shard, anywhere, learns the same things of it.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, fields

import xxhash

from tierckpt.errors import FormatError

from . import checksummed_json
from .encoding import Encoding
from .ids import Lineage, ShardKey, VersionId

DIGEST_BYTES = 8
ITERATION_COUNTS = ("calls", "steps")


@dataclass(frozen=True)
class Manifest:
    """What is known of one shard of one version."""

    job: str
    version: int
    """Completed optimizer steps."""
    generation: int
    run_id: str
    """Random name of the job's run, the same on all ranks: generations alone can meet again when
    lives did not see each other's nodes."""
    lineage: Lineage
    """This generation and its ancestors, and the versions they started from."""
    iteration: int
    """The number that `restore()` returns; `iteration_counts` says of what."""
    shard: int
    shards: int
    image_bytes: int
    header_bytes: int
    rank_state_bytes: int
    """Used bytes of the rank-state entry; the rest of it is zero padding."""
    digests: bytes
    """xxh3_64 of the header, then of every block: DIGEST_BYTES each, little endian."""
    created_seconds: float
    """Unix time of the seal."""
    metric: float | None = None
    """What the user measured at the boundary, a number; in the manifest of shard 0 only."""
    complete: VersionId | None = None
    """The newest version that was known to be on all ranks' disks when this one was taken."""
    iteration_counts: str = "calls"
    """`calls` of `step()` by the user's loop, or optimizer `steps`, where the loop calls no
    boundaries."""
    suspect: str = ""
    """Ranks were known to differ in what all should have alike when this version was taken: in
    what, in words."""
    encoding: Encoding | None = None
    """Set when codecs have changed the shard. Then `image_bytes` and `digests` are of what is
    stored, the other lengths are 0, and the manifest that it was sealed with is in there."""

    @property
    def id(self) -> VersionId:
        """Generation and version."""
        return VersionId(self.generation, self.version)

    @property
    def key(self) -> ShardKey:
        """The shard's name."""
        return ShardKey(self.id, self.shard, self.shards)

    @property
    def data_blocks(self) -> int:
        """How many blocks have a checksum, the header aside."""
        return len(self.digests) // DIGEST_BYTES - 1

    def encode(self) -> bytes:
        """A line of JSON, and a line with its xxh3_128."""
        fields_ = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.metric is None:
            del fields_["metric"]
        if not self.suspect:
            del fields_["suspect"]
        if self.complete is None:
            del fields_["complete"]
        else:
            fields_["complete"] = (self.complete.generation, self.complete.version)
        if self.encoding is None:
            del fields_["encoding"]
        else:
            fields_["encoding"] = self.encoding.as_json()
        fields_["digests"] = base64.b64encode(self.digests).decode()
        head = checksummed_json.head_of("manifest")
        return checksummed_json.with_check(
            json.dumps({**head, **fields_}, separators=(",", ":")).encode()
        )

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """The inverse of `encode`.

        Raises CorruptShardError when the bytes do not carry their own checksum, FormatError when
        they are intact but not ours or of a newer major version.
        """
        text = checksummed_json.checked(data, "manifest")
        try:
            values = json.loads(text)
            checksummed_json.check_head(values, "manifest", "manifest")
            values["digests"] = base64.b64decode(values["digests"])
            values["lineage"] = tuple((int(g), int(v)) for g, v in values["lineage"])
            encoding = values.pop("encoding", None)
            values["encoding"] = None if encoding is None else Encoding.of_json(encoding)
            metric = values.pop("metric", None)
            values["metric"] = None if metric is None else float(metric)
            if values["iteration_counts"] not in ITERATION_COUNTS:
                raise ValueError(f"iteration_counts is {values['iteration_counts']!r}")
            values["suspect"] = str(values.get("suspect", ""))
            complete = values.pop("complete", None)
            values["complete"] = None if complete is None else VersionId(*map(int, complete))
            return Manifest(**{f.name: values[f.name] for f in fields(Manifest)})
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"not a manifest: {error!r}") from error


def digest(data: memoryview | bytes) -> bytes:
    """Checksum of one block."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(DIGEST_BYTES, "little")


def digest_at(digests: bytes, index: int) -> bytes:
    """One of a row of checksums."""
    return digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
