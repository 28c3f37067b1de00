"""Layout: the bytes of tensors that a rank copies, and their places in its shard.

Pure: plain values in and out, no torch, no I/O. Striping every tensor over all ranks balances the
work in time as well as in total: whichever layer's gradients are being reduced, each rank has 1/N
of that layer to copy.

Words: a *piece* is a contiguous flat range of one tensor, counted in elements in memory order. A
*block* is a contiguous byte range of the shard, copied and hashed at once: a part of one
large piece, or several small ones side by side.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from math import prod
from typing import NamedTuple

from msgspec import Struct

UNIT_BYTES = 16 * 1024
"""A tensor is divided in multiples of this; a smaller one goes to one rank whole."""

BLOCK_BYTES = 512 * 1024
"""Copy and checksum granularity: a block is hashed while it is still in the core's own cache."""


FIXED = ("model/", "buffer/")
"""Prefixes of names of tensors that exist before any restore; optimizer state is created and
dropped."""


def path_of(name: str) -> tuple[str, str]:
    """(parameter, key) of the optimizer state with the name `label/parameter/key`."""
    first, last = name.index("/"), name.rindex("/")
    return name[first + 1 : last], name[last + 1 :]


def parameter_of(name: str) -> str:
    """The parameter or buffer that the tensor `name` belongs to."""
    return name.split("/", 1)[1] if name.startswith(FIXED) else path_of(name)[0]


class TensorSpec(NamedTuple):
    """The properties of a tensor that are needed to divide it and to create it again."""

    name: str
    dtype: str
    """torch's name without the prefix, e.g. `bfloat16`."""
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    """Strides in elements when the memory order is not row-major, else None."""
    itemsize_bytes: int
    device: str = "cpu"
    """Device *type* the tensor lived on (`cpu`, `cuda`): optimizers keep some state on the host."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.itemsize_bytes


class Placement(IntEnum):
    """Distribution of a tensor over ranks; its number is in the headers of shards."""

    REPLICATED = 0
    """All ranks have equal values: each stores its stripe, copied any time before the next step."""
    PER_RANK = 1
    """Every rank has values of its own and stores them all, copied at the boundary."""


REPLICATED, PER_RANK = Placement


class Piece(NamedTuple):
    """Elements `[start, stop)` of `spec`, at byte `offset` of the shard's data section."""

    spec: TensorSpec
    start: int
    stop: int
    offset: int
    placement: Placement
    """Placement of the tensor."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return (self.stop - self.start) * self.spec.itemsize_bytes

    @property
    def whole(self) -> bool:
        """True when the piece is all of its tensor."""
        return self.stop - self.start == self.spec.numel


class Block(Struct, frozen=True):
    """Bytes `[offset, offset + nbytes)` of the data section.

    `parts` are `(piece index, first element, last element + 1)`, relative to the piece's start.
    """

    offset: int
    nbytes: int
    parts: tuple[tuple[int, int, int], ...]
    placement: Placement
    """Placement of all parts."""


class Layout(Struct, frozen=True):
    """One rank's shard without the header, see `plan_layout`."""

    rank: int
    ranks: int
    pieces: tuple[Piece, ...]
    blocks: tuple[Block, ...]
    nbytes: int
    """Bytes of all pieces; the rank-state blob and its padding follow them."""


def stripes(specs: Iterable[TensorSpec], rank: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield, tensor by tensor, the elements `[start, stop)` of rank `rank`.

    Greedy levelling: every rank gets the same number of whole units; the remaining units go to the
    least loaded ranks, one each, and the tail to the next. So at any prefix of the list the loads
    of two ranks differ by at most one unit.
    """
    if ranks == 1:
        yield from ((0, spec.numel) for spec in specs)
        return
    order, loads = list(range(ranks)), [0] * ranks
    """Ranks, the least loaded first, and their bytes beyond those that every rank got."""
    for spec in specs:
        numel, item = spec.numel, spec.itemsize_bytes
        unit = UNIT_BYTES // item
        units, tail = divmod(numel, unit)
        base, extra = divmod(units, ranks)
        # The tail can only end the tensor, so its owner's range is the last one.
        place, owner = order.index(rank), extra
        if place < owner:
            start, count = place * (base + 1) * unit, (base + 1) * unit
        elif place == owner:
            start, count = numel - base * unit - tail, base * unit + tail
        else:
            start, count = (extra + (place - 1) * base) * unit, base * unit
        yield start, start + count
        if extra:  # with a unit more they are the most loaded ones
            order = order[extra:] + order[:extra]
            loads = loads[extra:] + [load + unit * item for load in loads[:extra]]
        if tail:
            load, least = loads.pop(0) + tail * item, order.pop(0)
            at = bisect(loads, load)
            loads.insert(at, load)
            order.insert(at, least)


def plan_layout(
    striped: Sequence[TensorSpec], own: Sequence[TensorSpec], rank: int, ranks: int
) -> Layout:
    """Lay out rank `rank`'s shard: its stripe of `striped`, and all of `own`.

    The same specs in the same order always give the same layout. Pieces are ordered by falling
    item size, so that each is aligned to its own items without holes (safetensors allows none).
    Within a size and device, pieces that fill blocks come first, and small ones are packed after.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not in a job of {ranks} rank(s)")
    alike: dict[tuple[int, Placement, str, bool], list[tuple[TensorSpec, int, int]]] = {}

    def choose(spec: TensorSpec, start: int, stop: int, placement: Placement) -> None:
        item_bytes = spec.itemsize_bytes
        small = (stop - start) * item_bytes < BLOCK_BYTES // 2
        kind = -item_bytes, placement, spec.device, small
        alike.setdefault(kind, []).append((spec, start, stop))

    for spec, (start, stop) in zip(striped, stripes(striped, rank, ranks), strict=True):
        # An empty tensor must also have a place: with the rank that owns its (empty) tail.
        if stop > start or (spec.numel == 0 and rank == 0):
            choose(spec, start, stop, REPLICATED)
    for spec in own:
        choose(spec, 0, spec.numel, PER_RANK)
    pieces: list[Piece] = []
    offset = 0
    for kind in sorted(alike):
        for spec, start, stop in alike[kind]:
            pieces.append(Piece(spec, start, stop, offset, kind[1]))
            offset += (stop - start) * spec.itemsize_bytes
    return Layout(rank, ranks, tuple(pieces), tuple(_cut_blocks(pieces)), offset)


def _apart(one: Piece, other: Piece) -> bool:
    """True when two pieces cannot share a block: copied at other times, or from other devices."""
    return one.placement != other.placement or one.spec.device != other.spec.device


def _cut_blocks(pieces: Sequence[Piece]) -> Iterator[Block]:
    """Cover all pieces with blocks, in file order, none larger than BLOCK_BYTES."""
    pack: list[tuple[int, int, int]] = []
    pack_start = pack_bytes = 0

    def packed(placement: Placement) -> Block:
        return Block(pack_start, pack_bytes, tuple(pack), placement)

    for index, piece in enumerate(pieces):
        spec, start, stop, offset, _ = piece
        size = (stop - start) * spec.itemsize_bytes
        if pack and (pack_bytes + size > BLOCK_BYTES or _apart(pieces[index - 1], piece)):
            yield packed(pieces[index - 1].placement)
            pack = []
        if size < BLOCK_BYTES // 2:
            if not pack:
                pack_start, pack_bytes = offset, 0
            pack.append((index, 0, stop - start))
            pack_bytes += size
            continue
        if pack:
            yield packed(piece.placement)
            pack = []
        step = BLOCK_BYTES // piece.spec.itemsize_bytes
        count = piece.stop - piece.start
        for low in range(0, count, step):
            high = min(low + step, count)
            yield Block(
                piece.offset + low * piece.spec.itemsize_bytes,
                (high - low) * piece.spec.itemsize_bytes,
                ((index, low, high),),
                piece.placement,
            )
    if pack:
        yield packed(pieces[-1].placement)
