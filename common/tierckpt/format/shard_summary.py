"""Shard summary: the facts that every rank needs about a version before its first byte is loaded.

A header names each piece of its shard. For all shards together that is tensors times ranks, more
than one rank of a large job can hold. To decide whether a version fits, much less is enough: each
tensor once, from the shard that has its first element, and proof that no element is missing. The
header itself comes with its shard's bytes, and is dropped with them.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

import xxhash

from .layout import PER_RANK, REPLICATED, Piece, TensorSpec
from .shard_file import ShardHeader


@dataclass(frozen=True)
class ShardSummary:
    """The summary of one shard, which its reader sends to all ranks. Its size depends on the number
    of tensors that start in it, so the sum over all shards does not grow with tensors times ranks.
    """

    header_bytes: int
    data_bytes: int
    begun: tuple[TensorSpec, ...]
    """Striped tensors whose first element is in this shard."""
    evidence: int
    """Sum over its striped pieces: elements times the tensor's `_weight`."""
    structure: dict[str, Any] | None
    """Structure of the optimizers; in shard 0's summary only."""
    trained: Mapping[str, int] = field(default_factory=dict)
    """See `ShardHeader.trained`, of the parameters among `begun`."""

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
            {p.spec.name: header.trained[p.spec.name] for p in striped if _begins(p, header)},
        )

    @property
    def nbytes(self) -> int:
        """Size of header and data."""
        return self.header_bytes + self.data_bytes


@dataclass(frozen=True)
class RankState:
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


@dataclass
class VersionSummary:
    """The content of a version, for one rank."""

    outlines: Sequence[ShardSummary]
    """Summaries by shard."""
    own: RankState
    missing: list[str] = field(default_factory=list)
    """Tensors with elements that are in no shard, in words."""
    specs: dict[str, TensorSpec] = field(init=False)
    """Striped tensors by name."""

    def __post_init__(self) -> None:
        """Collect the striped tensors of all shards."""
        self.specs = {spec.name: spec for each in self.outlines for spec in each.begun}

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


def _begins(piece: Piece, header: ShardHeader) -> bool:
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
    """Return the missing elements by all readers' `counts`, in words."""
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
