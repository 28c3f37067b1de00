"""Shard file: a safetensors header, then the data of one rank's layout (see FORMAT.md).

Pure: builds and parses headers, does no I/O. A shard is a plain safetensors file, so any tool can
open it. Values for which safetensors has no field (the full shape of a tensor of which this is a
piece, its strides, block lengths) are in the header's `__metadata__`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tierckpt.errors import FormatError

from .encoding import runs, unrun
from .ids import FORMAT_MAJOR, FORMAT_MINOR, PAGE_BYTES, check_version, round_up
from .layout import BLOCK_BYTES, Layout, Piece, Placement, TensorSpec

RANK_STATE = "rank_state"
"""Name of the entry that holds the rank's own small state, an encoded tree (see `tree`)."""

_SAFETENSORS_DTYPE = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    # Not F8_E8M0: safetensors has it, but its loader for torch does not and rejects the whole file.
}


@dataclass(frozen=True)
class ShardHeader:
    """The content of a shard's header."""

    pieces: tuple[Piece, ...]
    block_bytes: tuple[int, ...]
    """Length of every block, in file order; they cover the data section without a gap."""
    header_bytes: int
    """Offset of the data section in the file."""
    data_bytes: int
    structure: dict[str, Any]
    """Optimizer classes and the members of their param groups."""
    tied: dict[str, str] = field(default_factory=dict)
    """Additional names of parameters and buffers, with the name that each is stored under."""

    @property
    def tree_offset(self) -> int:
        """Offset of the encoded rank tree in the file."""
        return self.header_bytes + sum(p.nbytes for p in self.pieces)


def encode_header(
    layout: Layout,
    rank_state_bytes: int,
    structure: Mapping[str, object],
    tied: Mapping[str, str] = MappingProxyType({}),
) -> tuple[bytes, int]:
    """Return the header for `layout` with room for `rank_state_bytes`, and the data's length.

    Both are multiples of PAGE_BYTES: safetensors pads its header with spaces, and the room for
    the rank state fills the rest of the data's last page.
    """
    data_bytes = round_up(layout.nbytes + rank_state_bytes, PAGE_BYTES)
    entries = dict(map(_entry, layout.pieces))
    entries[RANK_STATE] = {
        "dtype": "U8",
        "shape": [data_bytes - layout.nbytes],
        "data_offsets": [layout.nbytes, data_bytes],
    }
    blocks = [b.nbytes for b in layout.blocks] + rank_state_blocks(data_bytes - layout.nbytes)
    metadata = {
        "format": "tierckpt-shard",
        "format_version": f"{FORMAT_MAJOR}.{FORMAT_MINOR}",
        "pieces": json.dumps(list(map(_encode_piece, layout.pieces)), separators=(",", ":")),
        "blocks": json.dumps(runs(blocks), separators=(",", ":")),
        "structure": json.dumps(structure, separators=(",", ":")),
        **({"tied": json.dumps(tied, separators=(",", ":"))} if tied else {}),
    }
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text = text.ljust(round_up(8 + len(text), PAGE_BYTES) - 8)
    return len(text).to_bytes(8, "little") + text, data_bytes


def rank_state_blocks(nbytes: int) -> list[int]:
    """Return the lengths of the blocks of a rank state with this length, padding included."""
    whole, rest = divmod(nbytes, BLOCK_BYTES)
    return [BLOCK_BYTES] * whole + [rest] * bool(rest)


def decode_header(image: memoryview | bytes) -> ShardHeader:
    """Parse the header at the start of `image`.

    Raises FormatError when the bytes are no shard header. Call it on verified bytes only.
    """
    try:
        length = int.from_bytes(bytes(image[:8]), "little")
        if not 0 < length <= len(image) - 8:
            raise ValueError(f"header length {length} in a file of {len(image)} bytes")
        header = json.loads(bytes(image[8 : 8 + length]))
        metadata = header["__metadata__"]
        check_version(metadata["format_version"], "shard")
        pieces = tuple(_decode_piece(row) for row in json.loads(metadata["pieces"]))
        structure = json.loads(metadata["structure"])
        tied = dict(json.loads(metadata.get("tied", "{}")))
        blocks = tuple(unrun(json.loads(metadata["blocks"])))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FormatError(f"not a shard header: {error!r}") from error
    return ShardHeader(pieces, blocks, 8 + length, sum(blocks), structure, tied)


def _entry(piece: Piece) -> tuple[str, object]:
    """Return a safetensors entry: name and value."""
    spec, count = piece.spec, piece.stop - piece.start
    name = spec.name if piece.whole else f"{spec.name}[{piece.start}:{piece.stop}]"
    code = _SAFETENSORS_DTYPE.get(spec.dtype)
    shape = list(spec.shape) if piece.whole and spec.stride is None else [count]
    if code is None:  # stored as raw bytes; the table has the true type
        code, shape = "U8", [piece.nbytes]
    offsets = [piece.offset, piece.offset + piece.nbytes]
    return name, {"dtype": code, "shape": shape, "data_offsets": offsets}


def _encode_piece(piece: Piece) -> list[object]:
    """Return the values for which safetensors has no field; see FORMAT.md."""
    spec = piece.spec
    return [
        spec.name,
        spec.dtype,
        list(spec.shape),
        list(spec.stride) if spec.stride is not None else None,
        spec.itemsize_bytes,
        spec.device,
        piece.start,
        piece.stop,
        piece.offset,
        int(piece.placement),
    ]


def _decode_piece(row: list[object]) -> Piece:
    name, dtype, shape, stride, itemsize, device, start, stop, offset, placement = row
    spec = TensorSpec(
        name=str(name),
        dtype=str(dtype),
        shape=tuple(shape),  # type: ignore[arg-type]
        stride=None if stride is None else tuple(stride),  # type: ignore[arg-type]
        itemsize_bytes=int(itemsize),  # type: ignore[call-overload]
        device=str(device),
    )
    bounds = (int(start), int(stop), int(offset))  # type: ignore[call-overload]
    return Piece(spec, *bounds, Placement(int(placement)))  # type: ignore[call-overload]
