"""Encoding: the part of a manifest that describes a shard stored through codecs. Pure."""

from __future__ import annotations

import base64
import json
import sys
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from tierckpt._text import in_words
from tierckpt.errors import FormatError

from .ids import ShardKey, VersionId
from .piece_table import item_sizes, metadata_of, runs, unrun


@dataclass(frozen=True)
class Encoding:
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
        raise FormatError(f"not a shard header: {in_words(error)}") from error
    begins = [begin for begin, _ in rows]
    found = [Block(header_bytes, 1)]
    for low, nbytes in zip(accumulate(lengths, initial=0), lengths, strict=False):
        number = bisect_right(begins, low) - 1
        size = rows[number][1] if number >= 0 else 1
        found.append(Block(nbytes, size if size in ITEM_BYTES else 1))
    return found
