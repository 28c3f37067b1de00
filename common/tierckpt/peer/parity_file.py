"""The parity file and its manifest: what a member stores for the others (see FORMAT.md).

A parity file is valid by itself as soon as it is committed, whatever became of the other members'.
Its manifest holds digests of its own bytes, and the manifests of all the shards that it was made
from: enough to know what it can rebuild, and to prove what was rebuilt. So no commit is agreed on
with anybody; a restart takes the parities that are there.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property

from tierckpt.erasure.codes import Code, Stripes
from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.block_digests import check, parity_blocks
from tierckpt.format.ids import Lineage, ParityKey, VersionId
from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.format.manifest import DIGEST_BYTES, Manifest, digest, digest_at
from tierckpt.format.version_records import seal, unseal
from tierckpt.storage.local.store import Draft

Read = Callable[[int, memoryview], None]
"""`read(offset, into)`: fill `into` from byte `offset` of a shard or parity on, or raise."""


@dataclass(frozen=True)
class ParityManifest:
    """What is known of one parity file."""

    job: str
    life: str
    version: int
    generation: int
    shard: int
    """Number of the shard that it lies beside."""
    shards: int
    lineage: Lineage
    k: int
    m: int
    group: tuple[int, ...]
    """The members' shard numbers, in the order of the ring."""
    segment_bytes: int
    image_bytes: int
    digests: bytes
    """xxh3_64 of every block of BLOCK_BYTES, the last being what is left."""
    members: tuple[str, ...]
    """The encoded manifest of each member's shard, in the order of the ring."""
    created_seconds: float

    @staticmethod
    def of(shards: Sequence[Manifest], code: Code, member: int, digests: bytes) -> ParityManifest:
        """The manifest of what `member` stores; `shards` are the members', on the ring."""
        own = shards[member]
        stripes = Stripes(code, tuple(shard.image_bytes for shard in shards))
        return ParityManifest(
            own.job,
            own.life,
            own.version,
            own.generation,
            own.shard,
            own.shards,
            own.lineage,
            code.k,
            code.m,
            tuple(shard.shard for shard in shards),
            stripes.segment_bytes,
            stripes.parity_bytes,
            digests,
            tuple(shard.encode().decode() for shard in shards),
            time.time(),
        )

    @property
    def key(self) -> ParityKey:
        """The parity's name."""
        return ParityKey(VersionId(self.generation, self.version), self.shard, self.shards)

    @property
    def member(self) -> int:
        """Where on the ring it lies."""
        return self.group.index(self.shard)

    @cached_property
    def manifests(self) -> tuple[Manifest, ...]:
        """The members' shards, on the ring."""
        return tuple(Manifest.decode(text.encode()) for text in self.members)

    @cached_property
    def stripes(self) -> Stripes:
        """The code, over the members' shards."""
        code = Code(len(self.group), self.k, self.m)
        return Stripes(code, tuple(shard.image_bytes for shard in self.manifests))

    def encode(self) -> bytes:
        """A line of JSON, and a line with its xxh3_128."""
        return seal("parity", {**asdict(self), "digests": base64.b64encode(self.digests).decode()})

    @staticmethod
    def decode(data: bytes) -> ParityManifest:
        """The inverse of `encode`.

        Raises CorruptShardError when the bytes do not carry their own checksum, FormatError when
        they are intact but not ours, of a newer major version, or at odds with themselves.
        """
        values = unseal("parity", data)
        try:
            values["digests"] = base64.b64decode(values["digests"])
            values["lineage"] = tuple((int(g), int(v)) for g, v in values["lineage"])
            values["group"], values["members"] = tuple(values["group"]), tuple(values["members"])
            made = ParityManifest(**{f.name: values[f.name] for f in fields(ParityManifest)})
            made._check()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"not a parity manifest: {error!r}") from error
        return made

    def _check(self) -> None:
        for number, shard in zip(self.group, self.manifests, strict=True):
            theirs = (shard.shard, shard.life, shard.id, shard.shards)
            if theirs != (number, self.life, self.key.id, self.shards):
                raise ValueError(f"{shard.key} of life {shard.life} is no member of {self.key}")
        found = (self.segment_bytes, self.image_bytes, len(self.digests))
        length = self.stripes.parity_bytes
        blocks = DIGEST_BYTES * len(parity_blocks(length))
        if self.shard not in self.group or found != (self.stripes.segment_bytes, length, blocks):
            raise ValueError(f"lengths {found} do not follow from the members' shards")


class ParityWriter:
    """Writes parity window by window, in any order of segments, and digests it meanwhile.

    Blocks are counted from the beginning of the file, windows from that of a segment, so a block
    may come in parts. A part is put aside: two for each segment at most.
    """

    def __init__(self, draft: Draft, nbytes: int) -> None:
        """`draft` is the caller's; `nbytes` is the length of the whole."""
        self._draft, self._nbytes = draft, nbytes
        self._digests: dict[int, bytes] = {}
        self._parts: dict[int, tuple[bytearray, list[int]]] = {}

    def write(self, data: memoryview, offset: int) -> None:
        """Put `data` at `offset`; every byte of the file comes exactly once. Raises OSError."""
        self._draft.write(data, offset)
        for block in range(offset // BLOCK_BYTES, -(-(offset + len(data)) // BLOCK_BYTES)):
            low, high = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._nbytes)
            first, last = max(low, offset), min(high, offset + len(data))
            part = data[first - offset : last - offset]
            if len(part) < high - low:
                whole, missing = self._parts.setdefault(
                    block, (bytearray(high - low), [high - low])
                )
                whole[first - low : last - low] = part
                missing[0] -= len(part)
                if missing[0]:
                    continue
                del self._parts[block]
                part = memoryview(whole)
            self._digests[block] = digest(part)

    def digests(self) -> bytes:
        """Of all blocks, once all is written."""
        blocks = len(parity_blocks(self._nbytes))
        assert len(self._digests) == blocks, "a plan covers the file"
        return b"".join(self._digests[block] for block in range(blocks))


def check_parity(
    record: ParityManifest, read: Read, segments: Collection[int] | None = None
) -> int:
    """Read the parity once, and raise CorruptShardError unless it is what `record` says.

    Of `segments` alone, by number, where these are given: the blocks that they lie in. Returns the
    bytes read. To be done by whoever holds it, before it counts as there. Holds one block.
    """
    block, read_bytes = memoryview(bytearray(BLOCK_BYTES)), 0
    for index, nbytes in enumerate(parity_blocks(record.image_bytes)):
        low = index * BLOCK_BYTES
        inside = range(low // record.segment_bytes, -(-(low + nbytes) // record.segment_bytes))
        if segments is not None and not any(s in segments for s in inside):
            continue
        read_bytes += nbytes
        view = block[:nbytes]
        try:
            read(low, view)
        except EOFError as error:
            raise CorruptShardError(f"{record.key} is truncated: {error}") from error
        check(view, [nbytes], digest_at(record.digests, index), f"{record.key} from byte {low} on")
    return read_bytes
