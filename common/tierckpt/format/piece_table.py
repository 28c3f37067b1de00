"""Piece table: the pieces of a shard, as text in its header.

Pure. A model has few kinds of tensors (types and shapes) and many tensors, so the table has the
kinds once, and columns: a name and the number of a kind for each piece. Offsets follow from the
order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from operator import add
from typing import Any

from .layout import Piece, Placement, TensorSpec

_JSON, _DECODER = json.JSONEncoder(separators=(",", ":")), json.JSONDecoder()


def encode_table(pieces: Sequence[Piece]) -> str:
    """Return the text for these pieces, which follow each other without holes."""
    kinds: dict[Any, int] = {}
    numbers = [kinds.setdefault((*piece.spec[1:], piece.placement), len(kinds)) for piece in pieces]
    parts = [
        (number, piece.start, piece.stop) for number, piece in enumerate(pieces) if not piece.whole
    ]
    names = [piece.spec.name for piece in pieces]
    return _JSON.encode({"kinds": [*kinds], "names": names, "kind": numbers, "parts": parts})


def decode_table(text: str) -> tuple[Piece, ...]:
    """Return the pieces. Raises ValueError, KeyError, TypeError or IndexError."""
    table = json.loads(text)
    kinds = [_Kind(*row) for row in table["kinds"]]
    of_piece = [kinds[number] for number in table["kind"]]
    specs = [
        TensorSpec(str(name), *kind.spec)
        for name, kind in zip(table["names"], of_piece, strict=True)
    ]
    starts, stops = [0] * len(specs), [kind.numel for kind in of_piece]
    for number, start, stop in table["parts"]:
        starts[number], stops[number] = int(start), int(stop)
    offsets = _offsets(table, of_piece)
    placements = [kind.placement for kind in of_piece]
    return tuple(map(Piece, specs, starts, stops, offsets, placements))


def item_sizes(text: str) -> list[tuple[int, int]]:
    """Return the offset of each piece, and the size of its items. Raises as `decode_table`."""
    table = json.loads(text)
    kinds = [_Kind(*row) for row in table["kinds"]]
    of_piece = [kinds[number] for number in table["kind"]]
    sizes = [kind.itemsize_bytes for kind in of_piece]
    return list(zip(_offsets(table, of_piece), sizes, strict=False))


METADATA = '{"__metadata__":'
"""Begin of a shard's header."""


def metadata_of(header: str) -> dict[str, str]:
    """Return the metadata of a shard's header, which come first in it; the entries after them are
    for other programs. Raises ValueError, KeyError or TypeError."""
    if header.startswith(METADATA + "{"):
        found = _DECODER.raw_decode(header, len(METADATA))[0]
    else:  # with spaces, or in another order
        found = json.loads(header)["__metadata__"]
    if not isinstance(found, dict):
        raise TypeError("the metadata are no object")
    return found


class _Kind:
    """A row of `kinds`."""

    def __init__(
        self,
        dtype: Any,
        shape: Any,
        stride: Any,
        itemsize_bytes: Any,
        device: Any,
        placement: Any,
    ) -> None:
        self.itemsize_bytes, self.placement = int(itemsize_bytes), Placement(int(placement))
        strides = None if stride is None else tuple(stride)
        self.spec = str(dtype), tuple(shape), strides, self.itemsize_bytes, str(device)
        whole = TensorSpec("", *self.spec)
        self.numel, self.nbytes = whole.numel, whole.nbytes


def _offsets(table: Any, of_piece: Sequence[_Kind]) -> list[int]:
    """Begins of the pieces, and the end of the last one."""
    sizes = [kind.nbytes for kind in of_piece]
    for number, start, stop in table["parts"]:
        sizes[number] = (int(stop) - int(start)) * of_piece[number].itemsize_bytes
    return [*accumulate(sizes, add, initial=0)]


def runs(values: Iterable[int]) -> list[tuple[int, int]]:
    """Encode run lengths: `(count, value)`."""
    return [(len(list(same)), value) for value, same in groupby(values)]


def unrun(pairs: Sequence[Sequence[int]]) -> list[int]:
    """Decode the pairs that `runs` made."""
    return [value for count, value in pairs for _ in range(count)]


__all__ = ["METADATA", "decode_table", "encode_table", "item_sizes", "metadata_of", "runs", "unrun"]
