"""Outline: what every rank has to know of a version before the first byte of it is loaded.

A header names each piece of its shard. Of all shards together that is tensors times ranks, more
than one rank of a large job can hold. Whether a version fits takes much less: each tensor once, as
told by the shard that has its first element, and that no element is missing. The header itself
comes along with its shard's bytes, and goes with them.

Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from .layout import PER_RANK, REPLICATED, Piece, TensorSpec
from .shard_file import ShardHeader


@dataclass(frozen=True)
class ShardSummary:
    """One shard's, as who read it tells it all ranks. Its size goes with the number of tensors that
    begin in it, so that of all shards together does not grow with tensors times ranks."""

    header_bytes: int
    data_bytes: int
    begun: tuple[TensorSpec, ...]
    """Striped tensors whose first element is in this shard."""
    evidence: int
    """Sum over its striped pieces: elements times the tensor's `_weight`."""
    structure: dict[str, Any] | None
    """Of the optimizers; shard 0's alone."""

    @staticmethod
    def of(shard: int, header: ShardHeader) -> ShardSummary:
        """What is told of a shard."""
        striped = list(_replicated(header))
        return ShardSummary(
            header.header_bytes,
            header.data_bytes,
            tuple(piece.spec for piece in striped if piece.start == 0),
            sum((p.stop - p.start) * _weight(p.spec.name) for p in striped),
            None if shard else header.structure,
        )

    @property
    def nbytes(self) -> int:
        """Of header and data."""
        return self.header_bytes + self.data_bytes


@dataclass(frozen=True)
class RankState:
    """What a rank takes from one shard alone: where it was, and what was its own."""

    manifest: bytes
    tree: bytes
    """Encoded, see `tree`."""
    specs: tuple[TensorSpec, ...]
    """Of per-rank tensors."""

    @staticmethod
    def of(manifest: bytes, tree: bytes, header: ShardHeader) -> RankState:
        """Of the shard with that header."""
        return RankState(
            manifest, tree, tuple(p.spec for p in header.pieces if p.placement is PER_RANK)
        )


@dataclass
class VersionSummary:
    """All that a version consists of, for one rank."""

    outlines: Sequence[ShardSummary]
    """By shard."""
    own: RankState
    missing: list[str] = field(default_factory=list)
    """Tensors of which elements are in no shard, in words."""
    specs: dict[str, TensorSpec] = field(init=False)
    """Striped tensors by name."""

    def __post_init__(self) -> None:
        """Put the outlines together."""
        self.specs = {spec.name: spec for each in self.outlines for spec in each.begun}

    @property
    def structure(self) -> dict[str, Any]:
        """Of the optimizers."""
        found = self.outlines[0].structure
        assert found is not None
        return found

    @property
    def nbytes(self) -> int:
        """Of all shards."""
        return sum(each.nbytes for each in self.outlines)

    def whole(self) -> bool:
        """True when every element of every tensor is in some shard.

        By one number a shard: were some missing and others there twice, the sums would be equal
        once in 2**64 times.
        """
        there = sum(each.evidence for each in self.outlines)
        return there == sum(s.numel * _weight(name) for name, s in self.specs.items())


def _replicated(header: ShardHeader) -> Iterator[Piece]:
    return (piece for piece in header.pieces if piece.placement is REPLICATED)


def counts(headers: Iterable[ShardHeader]) -> dict[str, int]:
    """Elements of each striped tensor in these shards."""
    found: dict[str, int] = {}
    for piece in chain.from_iterable(map(_replicated, headers)):
        found[piece.spec.name] = found.get(piece.spec.name, 0) + piece.stop - piece.start
    return found


def lacking(specs: Mapping[str, TensorSpec], everyone: Iterable[Mapping[str, int]]) -> list[str]:
    """What is missing by all readers' `counts`, in words."""
    there: dict[str, int] = {}
    for theirs in everyone:
        for name, count in theirs.items():
            there[name] = there.get(name, 0) + count
    return [
        f"{name}: only {there.get(name, 0)} of {spec.numel} elements are in the shards"
        for name, spec in specs.items()
        if there.get(name, 0) != spec.numel
    ] + [f"{name}: its beginning is in no shard" for name in sorted(there.keys() - specs.keys())]


def _weight(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
