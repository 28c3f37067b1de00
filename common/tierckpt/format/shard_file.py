"""Shard file: a safetensors header, then the data of one rank's layout (see FORMAT.md).

Pure: builds and parses headers, does no I/O. A shard is a plain safetensors file, so any tool can
open it. Values for which safetensors has no field (the full shape of a tensor of which this is a
piece, its strides, block lengths) are in the header's `__metadata__`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as _quoted
from types import MappingProxyType
from typing import Any

from tierckpt._text import in_words
from tierckpt.errors import FormatError

from .ids import FORMAT_MAJOR, FORMAT_MINOR, PAGE_BYTES, check_version, round_up
from .layout import BLOCK_BYTES, Layout, Piece
from .piece_table import METADATA, decode_table, encode_table, metadata_of, runs, unrun

RANK_STATE = "rank_state"
"""Name of the entry that holds the rank's own small state, an encoded tree (see `tree`)."""

MODEL = "model/"
"""Prefix of parameters' entries."""

_JSON = json.JSONEncoder(separators=(",", ":"))
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
    trained: dict[str, int] = field(default_factory=dict)
    """By the names of parameters with a piece here: 1 if it required a gradient, plus 2 if it did
    when the job attached."""

    @property
    def tree_offset(self) -> int:
        """Offset of the encoded rank tree in the file."""
        return self.header_bytes + sum(p.nbytes for p in self.pieces)


def encode_header(
    layout: Layout,
    rank_state_bytes: int,
    structure: Mapping[str, object],
    tied: Mapping[str, str] = MappingProxyType({}),
    trained: Mapping[str, int] = MappingProxyType({}),
) -> tuple[bytes, int]:
    """Return the header for `layout` with room for `rank_state_bytes`, and the data's length.
    `trained`: see `ShardHeader`; empty if that is unknown.

    Both are multiples of PAGE_BYTES: safetensors pads its header with spaces, and the room for
    the rank state fills the rest of the data's last page.
    """
    data_bytes = round_up(layout.nbytes + rank_state_bytes, PAGE_BYTES)
    rank_state = {
        "dtype": "U8",
        "shape": [data_bytes - layout.nbytes],
        "data_offsets": [layout.nbytes, data_bytes],
    }
    blocks = [b.nbytes for b in layout.blocks] + rank_state_blocks(data_bytes - layout.nbytes)
    metadata = {
        "format": "tierckpt-shard",
        "format_version": f"{FORMAT_MAJOR}.{FORMAT_MINOR}",
        "pieces": encode_table(layout.pieces),
        "blocks": _JSON.encode(runs(blocks)),
        "structure": _JSON.encode(structure),
        **({"tied": _JSON.encode(tied)} if tied else {}),
        **({"trained": _JSON.encode(_flags(layout.pieces, trained))} if trained else {}),
    }
    entries = [*_entries(layout.pieces), f"{_quoted(RANK_STATE)}:{_JSON.encode(rank_state)}"]
    text = f"{METADATA}{_JSON.encode(metadata)},{','.join(entries)}}}".encode()
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
        metadata = metadata_of(bytes(image[8 : 8 + length]).decode())
        check_version(metadata["format_version"], "shard")
        pieces = decode_table(metadata["pieces"])
        structure = json.loads(metadata["structure"])
        tied = dict(json.loads(metadata.get("tied", "{}")))
        blocks = tuple(unrun(json.loads(metadata["blocks"])))
        flags = unrun(json.loads(metadata.get("trained", "[]")))
        trained = dict(zip(_parameters(pieces), flags, strict=False))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FormatError(f"not a shard header: {in_words(error)}") from error
    return ShardHeader(pieces, blocks, 8 + length, sum(blocks), structure, tied, trained)


def _flags(pieces: Iterable[Piece], trained: Mapping[str, int]) -> list[Any]:
    return runs(trained[name] for name in _parameters(pieces))


def _parameters(pieces: Iterable[Piece]) -> Iterator[str]:
    return (piece.spec.name for piece in pieces if piece.spec.name.startswith(MODEL))


def _entries(pieces: Iterable[Piece]) -> Iterator[str]:
    """Return safetensors entries, as JSON: name and value."""
    heads: dict[Any, str] = {}
    """By the kind of a whole tensor, its value without the offsets."""
    for piece in pieces:
        spec, low, high = piece.spec, piece.offset, piece.offset + piece.nbytes
        if not piece.whole:
            name, head = f"{spec.name}[{piece.start}:{piece.stop}]", _head(piece)
        elif (known := heads.get(spec[1:4])) is not None:
            name, head = spec.name, known
        else:
            name, head = spec.name, heads.setdefault(spec[1:4], _head(piece))
        yield f"{_quoted(name)}:{head}[{low},{high}]}}"


def _head(piece: Piece) -> str:
    spec, count = piece.spec, piece.stop - piece.start
    code = _SAFETENSORS_DTYPE.get(spec.dtype)
    shape = list(spec.shape) if piece.whole and spec.stride is None else [count]
    if code is None:  # stored as raw bytes; the table has the true type
        code, shape = "U8", [piece.nbytes]
    return f'{{"dtype":"{code}","shape":{_JSON.encode(shape)},"data_offsets":'
