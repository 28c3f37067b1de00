"""How an image is cut into blocks: the header, then the blocks that its manifest has digests of.

Pure and light: `shardfile` knows everything of a header, and numpy; the agent needs only lengths.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from tierckpt.codecs.codec import Buffer
from tierckpt.errors import FormatError

ITEM_COLUMN, OFFSET_COLUMN = 4, 8
"""Of a row of the header's table of pieces."""
ITEM_BYTES = (1, 2, 4, 8, 16)


class Block(NamedTuple):
    """One block of an image."""

    nbytes: int
    item_bytes: int
    """Size of the numbers at its beginning."""


def blocks_of(header: Buffer, header_bytes: int) -> list[Block]:
    """All blocks of the shard with this header, which is the first; item sizes are hints.

    Raises FormatError.
    """
    try:
        view = memoryview(header)[:header_bytes]
        length = int.from_bytes(view[:8], "little")
        metadata = json.loads(bytes(view[8 : 8 + length]))["__metadata__"]
        rows = [(row[OFFSET_COLUMN], row[ITEM_COLUMN]) for row in json.loads(metadata["pieces"])]
        lengths = unrun(json.loads(metadata["blocks"]))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FormatError(f"not a shard header: {error!r}") from error
    begins = [begin for begin, _ in rows]
    found = [Block(header_bytes, 1)]
    for low, nbytes in zip(accumulate(lengths, initial=0), lengths, strict=False):
        number = bisect_right(begins, low) - 1
        size = rows[number][1] if number >= 0 else 1
        found.append(Block(nbytes, size if size in ITEM_BYTES else 1))
    return found


def runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """Run lengths: `(count, value)`."""
    return [(len(list(same)), value) for value, same in groupby(values)]


def unrun(pairs: Sequence[Sequence[int]]) -> list[int]:
    """The inverse of `runs`."""
    return [value for count, value in pairs for _ in range(count)]
