"""Manifest: the small record, written last, that alone makes a shard exist (see FORMAT.md).

Pure: plain values in and out. The same bytes seal a slot in memory and commit a file on disk, so
all levels give a reader the same information about a shard.

`Encoding` is the part of a manifest that describes a shard stored through codecs. `verify_shard`
finds out whether a shard's bytes match its manifest; a copy counts as stored only after that.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import xxhash
from msgspec import Struct, field

from tierckpt._text import error_text
from tierckpt.errors import CorruptShardError, FormatError

from . import records
from .ids import ShardKey, VersionId
from .layout import BLOCK_BYTES
from .records import VersionFacts
from .shard_file import decode_header, item_sizes, metadata_of, runs, unrun

__all__ = ["check", "digests_of", "parity_blocks", "verify_shard"]


class Encoding(Struct, frozen=True, dict=True):
    """Instructions to restore the image of an encoded shard. Lengths and digests of its manifest
    are those of the stored bytes; the manifest of the sealed shard is the last stored block."""

    codecs: Description
    plain_bytes: tuple[int, ...]
    """Length of every block of the image, in order."""
    stored_bytes: tuple[int, ...]
    """Length of every stored block, and of the sealed manifest's. 0: the block of the same number
    in `base`; without a base, a block of no bytes."""
    base: VersionId | None = None
    """The version of unchanged blocks: of the same run, shard and cut, and itself complete."""
    differences: Mapping[int, int] = field(default_factory=dict)
    """Numbers of the blocks that are stored as differences to those of `base`, each with the size
    of its integers."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each stored block; and the end of the last one."""
        return tuple(accumulate(self.stored_bytes, initial=0))

    @cached_property
    def plain_offsets(self) -> tuple[int, ...]:
        """Offset of each block of the image; and the end of the image."""
        return tuple(accumulate(self.plain_bytes, initial=0))

    def base_of(self, key: ShardKey) -> ShardKey | None:
        """Return the shard that `key`, encoded like this, refers to; None without a base."""
        return None if self.base is None else ShardKey(self.base, key.shard, key.shards)

    def as_json(self) -> dict[str, Any]:
        """Return the manifest's field."""
        lengths = array("I", self.stored_bytes)
        if sys.byteorder == "big":
            lengths.byteswap()
        values = {
            "codecs": self.codecs,
            "blocks": runs(self.plain_bytes),
            "lengths": base64.b64encode(lengths.tobytes()).decode(),
            "base": None if self.base is None else [self.base.generation, self.base.version],
        }
        if self.differences:
            sizes = [self.differences.get(number, 0) for number in range(len(self.plain_bytes))]
            values["differences"] = runs(sizes)
        return values

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> Encoding:
        """Read the field that `as_json` made. Raises ValueError, KeyError or TypeError."""
        lengths = array("I")
        lengths.frombytes(base64.b64decode(values["lengths"]))
        if sys.byteorder == "big":
            lengths.byteswap()
        base = values["base"]
        sizes = unrun(values.get("differences", ()))
        made = Encoding(
            tuple((str(name), dict(parameters)) for name, parameters in values["codecs"]),
            tuple(int(n) for n in unrun(values["blocks"])),
            tuple(lengths),
            None if base is None else VersionId(int(base[0]), int(base[1])),
            {number: size for number, size in enumerate(sizes) if size},
        )
        if len(made.stored_bytes) != len(made.plain_bytes) + 1 or not made.stored_bytes[-1]:
            raise ValueError(f"{len(made.stored_bytes)} lengths for {len(made.plain_bytes)} blocks")
        if made.base is None and any(
            plain and not stored
            for plain, stored in zip(made.plain_bytes, made.stored_bytes, strict=False)
        ):
            raise ValueError("blocks refer to another version, but no base is named")
        if made.differences and (made.base is None or len(sizes) != len(made.plain_bytes)):
            raise ValueError("blocks are differences to another version, which is not named")
        if not set(made.differences.values()) <= set(INTEGER_BYTES):
            raise ValueError(f"differences have {sorted({*made.differences.values()})} bytes")
        return made


Buffer = bytes | bytearray | memoryview
Parameter = str | int | float
Description = tuple[tuple[str, dict[str, Parameter]], ...]
"""Names of codecs and their public parameters, in order."""


ITEM_BYTES = (1, 2, 4, 8, 16)
INTEGER_BYTES = ITEM_BYTES[:4]


class Block(NamedTuple):
    """One block of an image."""

    nbytes: int
    item_bytes: int
    """Size of the numbers at the start of the block."""


def blocks_of(header: Buffer, header_bytes: int) -> list[Block]:
    """Return all blocks of a shard with this header, the header first; item sizes are hints.

    Raises FormatError.
    """
    try:
        view = memoryview(header)[:header_bytes]
        length = int.from_bytes(view[:8], "little")
        metadata = metadata_of(bytes(view[8 : 8 + length]).decode())
        rows = item_sizes(metadata["pieces"])
        lengths = unrun(json.loads(metadata["blocks"]))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FormatError(f"not a shard header: {error_text(error)}") from error
    starts = [start for start, _ in rows]
    found = [Block(header_bytes, 1)]
    for low, nbytes in zip(accumulate(lengths, initial=0), lengths, strict=False):
        number = bisect_right(starts, low) - 1
        size = rows[number][1] if number >= 0 else 1
        found.append(Block(nbytes, size if size in ITEM_BYTES else 1))
    return found


DIGEST_BYTES = 8
_JSON = json.JSONEncoder(separators=(",", ":"))
OF_FACTS = {"version": "%d", "iteration": "%d", "metric": "%b", "complete": "[%d,%d]"}
"""The fields of facts that differ between two versions of a run, as bytes are formatted."""
OF_SHARD = {
    "image_bytes": "%d",
    "header_bytes": "%d",
    "rank_state_bytes": "%d",
    "digests": '"%b"',
    "created_seconds": "%a",
}
"""Further fields of a manifest, which follow the others."""
MAX_FRAMES = 64
_frames: dict[tuple[object, ...], bytes] = {}
"""Manifests without these fields. They are encoded once: a version is sealed at each step,
perhaps."""


class Manifest(Struct, frozen=True):
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
        facts, metric, complete = self.facts, self.facts.metric, self.facts.complete
        shown = metric is not None and math.isfinite(metric)
        same = facts.job, facts.run_id, facts.id.generation, facts.shards, facts.lineage
        kind = *same, facts.iteration_counts, shown, complete is None, facts.suspect, self.shard
        frame = _frames.get(kind)
        if frame is None:
            if len(_frames) >= MAX_FRAMES:
                _frames.clear()
            frame = _frames[kind] = self._frame()
        text = frame % (
            facts.id.version,
            facts.iteration,
            *((_JSON.encode(metric).encode(),) if shown else ()),
            *((complete.generation, complete.version) if complete is not None else ()),
            self.image_bytes,
            self.header_bytes,
            self.rank_state_bytes,
            binascii.b2a_base64(self.digests, newline=False),
            self.created_seconds,
        )
        if self.encoding is not None:
            text = text[:-1] + b',"encoding":%b}' % _JSON.encode(self.encoding.as_json()).encode()
        return records.with_check(text)

    def _frame(self) -> bytes:
        """Return the JSON with holes for what differs between two versions of a run."""
        values = {**records.head_of("manifest"), **self.facts.to_json(), "shard": self.shard}
        fields = {
            name: OF_FACTS.get(name) or _JSON.encode(value).replace("%", "%%")
            for name, value in values.items()
        }
        texts = (f'"{name}":{text}' for name, text in {**fields, **OF_SHARD}.items())
        return f"{{{','.join(texts)}}}".encode()

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Read the bytes that `encode` made.

        Raises CorruptShardError when the checksum does not match, FormatError when the bytes are
        intact but are no manifest, or one of a newer major version.
        """
        text, values = records.checked(data, "manifest"), None
        try:
            values = json.loads(text)
            records.check_head(values, "manifest", "manifest")
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
            raise records.misfit(values, "manifest", error) from error


def digest(data: memoryview | bytes) -> bytes:
    """Return the checksum of one block."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(DIGEST_BYTES, "little")


def digest_at(digests: bytes, index: int) -> bytes:
    """Return one checksum of a sequence."""
    return digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def verify_shard(manifest: Manifest, view: memoryview, what: str = "") -> None:
    """Raise CorruptShardError, or FormatError, unless the bytes of `view` are the shard of
    `manifest`. `what` names it in the error."""
    what = what or str(manifest.key)
    head, digests = manifest.header_bytes, manifest.digests
    if len(view) != manifest.image_bytes:
        raise CorruptShardError(f"{what} has {len(view)} bytes, not {manifest.image_bytes}")
    if not view:
        return
    check(view[:head], [head], digests[:DIGEST_BYTES], what)
    header = decode_header(view[:head])
    check(view[head:], header.block_bytes, digests[DIGEST_BYTES:], what)


def parity_blocks(parity_bytes: int) -> list[int]:
    """Return the lengths of the blocks in which parity is hashed; the last may be shorter."""
    return [min(BLOCK_BYTES, parity_bytes - low) for low in range(0, parity_bytes, BLOCK_BYTES)]


def digests_of(view: memoryview, block_bytes: Sequence[int]) -> bytes:
    """Return the blocks' digests, one after the other, as manifests hold them.

    Raises ValueError when the blocks do not cover `view` exactly.
    """
    if sum(block_bytes) != len(view):
        raise ValueError(f"blocks of {sum(block_bytes)} bytes for a view of {len(view)}")
    return b"".join(digest(view[low:high]) for low, high in _ranges(block_bytes))


def check(view: memoryview, block_bytes: Sequence[int], digests: bytes, what: str) -> None:
    """Raise CorruptShardError unless every block of `view` has the digest that `digests` holds.

    `view` must have exactly the blocks' length. `what` names it in the error, which gives the first
    range that differs.
    """
    if len(view) != sum(block_bytes) or len(digests) != DIGEST_BYTES * len(block_bytes):
        raise CorruptShardError(
            f"{what} is {len(view)} bytes long and has {len(digests) // DIGEST_BYTES} digests; it "
            f"should have {sum(block_bytes)} bytes, in {len(block_bytes)} blocks"
        )
    for index, (low, high) in enumerate(_ranges(block_bytes)):
        if digest(view[low:high]) != digest_at(digests, index):
            raise CorruptShardError(f"{what}: bytes {low} to {high} differ from their checksum")


def _ranges(block_bytes: Sequence[int]) -> Iterator[tuple[int, int]]:
    low = 0
    for nbytes in block_bytes:
        yield low, low + nbytes
        low += nbytes
