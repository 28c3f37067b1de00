"""Shard file: a safetensors header, then the data of one rank's layout (see FORMAT.md).

Pure: builds and parses headers, does no I/O. A shard is a plain safetensors file, so any tool can
open it. Values for which safetensors has no field (the full shape of a tensor of which this is a
piece, its strides, block lengths) are in the header's `__metadata__`.

The pieces of a shard are a table in the header. A model has few kinds of tensors (types and
shapes) and many tensors, so the table has the kinds once, and columns: a name and the number of a
kind for each piece. Offsets follow from the order.

A summary has the facts that every rank needs about a version before its first byte is loaded.
Headers of all shards together are tensors times ranks, more than one rank of a large job can hold.
To decide whether a version fits, much less is enough: each tensor once, from the shard that has
its first element, and proof that no element is missing. The header itself comes with its shard's
bytes, and is dropped with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, groupby
from json.encoder import encode_basestring_ascii as _quoted
from operator import add
from types import MappingProxyType
from typing import Any

import xxhash
from msgspec import Struct, field

from tierckpt._text import error_text
from tierckpt.errors import FormatError

from .ids import FORMAT_MAJOR, FORMAT_MINOR, PAGE_BYTES, check_version, round_up
from .layout import BLOCK_BYTES, PER_RANK, REPLICATED, Layout, Piece, Placement, TensorSpec

__all__ = ["METADATA", "decode_table", "encode_table", "item_sizes", "metadata_of", "runs", "unrun"]


_TABLE_JSON, _TABLE_DECODER = json.JSONEncoder(separators=(",", ":")), json.JSONDecoder()


def encode_table(pieces: Sequence[Piece]) -> str:
    """Return the text for these pieces, which follow each other without holes."""
    kinds: dict[Any, int] = {}
    numbers = [kinds.setdefault((*piece.spec[1:], piece.placement), len(kinds)) for piece in pieces]
    parts = [
        (number, piece.start, piece.stop) for number, piece in enumerate(pieces) if not piece.whole
    ]
    names = [piece.spec.name for piece in pieces]
    return _TABLE_JSON.encode({"kinds": [*kinds], "names": names, "kind": numbers, "parts": parts})


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
"""Start of a shard's header."""


def metadata_of(header: str) -> dict[str, str]:
    """Return the metadata of a shard's header, which come first in it; the entries after them are
    for other programs. Raises ValueError, KeyError or TypeError."""
    if header.startswith(METADATA + "{"):
        found = _TABLE_DECODER.raw_decode(header, len(METADATA))[0]
    else:  # with spaces, or in another order
        found = json.loads(header)["__metadata__"]
    if not isinstance(found, dict):
        raise TypeError("the metadata are no object")
    return found


class _Kind:
    """A row of the kinds of tensors."""

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
    """Starts of the pieces, and the end of the last one."""
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


class ShardHeader(Struct, frozen=True):
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
    `trained`: see `ShardHeader`; empty if unknown.

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
        raise FormatError(f"not a shard header: {error_text(error)}") from error
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


class ShardSummary(Struct, frozen=True):
    """The summary of one shard, which its reader sends to all ranks. Its size depends on the number
    of tensors that start in it, so the sum over all shards does not grow with tensors times ranks.
    """

    header_bytes: int
    data_bytes: int
    starting: tuple[TensorSpec, ...]
    """Striped tensors with their first element in this shard."""
    evidence: int
    """Sum over its striped pieces: elements times the tensor's `_weight`."""
    structure: dict[str, Any] | None
    """Structure of the optimizers; in shard 0's summary only."""
    trained: Mapping[str, int] = field(default_factory=dict)
    """See `ShardHeader.trained`, of the parameters among `starting`."""

    @staticmethod
    def of(shard: int, header: ShardHeader) -> ShardSummary:
        """Make the summary of a shard."""
        striped = list(_replicated(header))
        return ShardSummary(
            header.header_bytes,
            header.data_bytes,
            tuple(piece.spec for piece in striped if piece.start == 0),
            sum((p.stop - p.start) * _weight(p.spec.name) for p in striped),
            None if shard else header.structure,
            {p.spec.name: header.trained[p.spec.name] for p in striped if _starts_in(p, header)},
        )

    @property
    def nbytes(self) -> int:
        """Size of header and data."""
        return self.header_bytes + self.data_bytes


class RankState(Struct, frozen=True):
    """The state that a rank takes from one shard alone: its position and its own values."""

    manifest: bytes
    tree: bytes
    """Encoded tree, see `tree`, without the files at its end."""
    specs: tuple[TensorSpec, ...]
    """Specs of per-rank tensors."""
    trained: Mapping[str, int] = field(default_factory=dict)
    """As in `ShardSummary`, of the per-rank parameters."""
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Files at the end of the tree: the range of each in the shard, by name."""

    @staticmethod
    def of(
        manifest: bytes,
        tree: bytes,
        header: ShardHeader,
        files: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> RankState:
        """Make the state from the shard with that header. `files`: ranges in the whole tree."""
        specs = tuple(p.spec for p in header.pieces if p.placement is PER_RANK)
        at = header.tree_offset
        there = {name: (at + low, at + high) for name, (low, high) in files.items()}
        trained = {s.name: header.trained[s.name] for s in specs if s.name in header.trained}
        return RankState(manifest, tree, specs, trained, there)


class VersionSummary(Struct):
    """The content of a version, for one rank."""

    outlines: Sequence[ShardSummary]
    """Summaries by shard."""
    own: RankState
    missing: list[str] = field(default_factory=list)
    """Tensors with elements in no shard, as text."""
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    """Striped tensors by name."""

    def __post_init__(self) -> None:
        """Collect the striped tensors of all shards."""
        self.specs = {spec.name: spec for each in self.outlines for spec in each.starting}

    @property
    def trained(self) -> dict[str, int]:
        """See `ShardHeader.trained`; empty for versions without that."""
        found = {name: flag for each in self.outlines for name, flag in each.trained.items()}
        return {**found, **self.own.trained}

    @property
    def structure(self) -> dict[str, Any]:
        """Structure of the optimizers."""
        found = self.outlines[0].structure
        assert found is not None
        return found

    @property
    def nbytes(self) -> int:
        """Size of all shards."""
        return sum(each.nbytes for each in self.outlines)

    def whole(self) -> bool:
        """True when every element of every tensor is in a shard.

        Compares one number per shard: if some elements were missing and others there twice, the
        sums would be equal with a probability of 2**-64.
        """
        there = sum(each.evidence for each in self.outlines)
        return there == sum(s.numel * _weight(name) for name, s in self.specs.items())


def _starts_in(piece: Piece, header: ShardHeader) -> bool:
    return piece.start == 0 and piece.spec.name in header.trained


def _replicated(header: ShardHeader) -> Iterator[Piece]:
    return (piece for piece in header.pieces if piece.placement is REPLICATED)


def counts(headers: Iterable[ShardHeader]) -> dict[str, int]:
    """Count the elements of each striped tensor in these shards."""
    found: dict[str, int] = {}
    for piece in chain.from_iterable(map(_replicated, headers)):
        found[piece.spec.name] = found.get(piece.spec.name, 0) + piece.stop - piece.start
    return found


def lacking(specs: Mapping[str, TensorSpec], readers: Iterable[Mapping[str, int]]) -> list[str]:
    """Return the missing elements by all readers' `counts`, as text."""
    there: dict[str, int] = {}
    for theirs in readers:
        for name, count in theirs.items():
            there[name] = there.get(name, 0) + count
    return [
        f"{name}: only {there.get(name, 0)} of {spec.numel} elements are in the shards"
        for name, spec in specs.items()
        if there.get(name, 0) != spec.numel
    ] + [f"{name}: no shard has its first element" for name in sorted(there.keys() - specs.keys())]


def _weight(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())
