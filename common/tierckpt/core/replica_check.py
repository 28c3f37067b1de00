"""Replica check, the pure part: slices to hash, comparison of digests, and the ranks that differ.

The replicated state (parameters and optimizer state that are equal on all ranks) is a list of
tensors in an order that depends on structure alone. It is cut into *units*, which are dealt to
*slices*; one round of slices covers all of the state. At each boundary all ranks hash one slice.

A digest of a slice is a positive integer below 2^62; NONE, which is smaller than all digests, means
that a rank has none. All ranks agree if and only if the minimum of the digests is the complement of
the minimum of their complements. A minimum is the only operation that ballots have.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from tierckpt._text import some

UNIT_BYTES = 512 * 1024
"""Bytes hashed at once; small enough for a core's own cache."""
UNIT_OVERHEAD_BYTES = 16 * 1024
"""Cost of a unit besides its bytes, as bytes that could be hashed in that time. With it, slices of
many small tensors take no longer than others."""
LOOK_BYTES = 1024 * 1024
"""Least bytes of a look, overhead included, unless the whole state is smaller."""
NONE = 0
"""Used in place of a digest: this rank has none, so no rank's digests are compared."""
BUCKETS = 64
"""Number of digests that ranks exchange about a slice that differs, whatever its size."""
BUCKETS_OPENED = 2
"""Number of differing buckets that are opened to name tensors."""
_BITS = 62


class Unit(NamedTuple):
    """Bytes `[low, high)` of a tensor, by its number, in memory order."""

    tensor: int
    low: int
    high: int


def cut(
    sizes_bytes: Sequence[int], slices: int, units_bytes: Sequence[int] = ()
) -> list[list[Unit]]:
    """Deal tensors of these sizes to `slices` lists, in units of at most `units_bytes` each.

    Each byte is in one list. Some lists are empty where there are fewer units."""
    most = units_bytes or [UNIT_BYTES] * len(sizes_bytes)
    units = [
        Unit(tensor, low, min(low + step, size))
        for tensor, (size, step) in enumerate(zip(sizes_bytes, most, strict=True))
        for low in range(0, size, step)
    ]
    costs = [unit.high - unit.low + UNIT_OVERHEAD_BYTES for unit in units]
    total, before = sum(costs), 0
    dealt: list[list[Unit]] = [[] for _ in range(slices)]
    for unit, cost in zip(units, costs, strict=True):
        # The middle of each unit decides, so the last slice is no longer than the first.
        dealt[min((before + cost // 2) * slices // total, slices - 1)].append(unit)
        before += cost
    return dealt


def stride_of(sizes_bytes: Sequence[int], slices: int) -> int:
    """Return the number of boundaries after which as many slices are hashed together.

    For small slices the start of a look takes longer than the hash. A divisor of `slices`."""
    each = (sum(sizes_bytes) + len(sizes_bytes) * UNIT_OVERHEAD_BYTES) // slices
    wanted = LOOK_BYTES // (each + 1)
    return max(n for n in range(1, slices + 1) if slices % n == 0 and n <= max(wanted, 1))


def fold(head: Sequence[int], digests: Sequence[int]) -> int:
    """Return one digest of a slice's digests; `head` identifies the slice. Never NONE."""
    values = struct.pack(f"<{len(head) + len(digests)}Q", *head, *digests)
    return (xxhash.xxh3_64_intdigest(values) >> (64 - _BITS)) | 1


def as_vote(digest: int) -> tuple[int, int]:
    """Return the two integers whose minima show whether all ranks agree."""
    return (digest, ~digest) if digest > NONE else (NONE, NONE)


def agree(least: int, least_complement: int) -> bool | None:
    """Return whether all ranks agree, by the minima of `as_vote`; None if a rank had no digest."""
    return None if least <= NONE else least == ~least_complement


def buckets_of(count: int) -> list[range]:
    """Divide `count` values into at most BUCKETS runs, in order."""
    size = -(-count // BUCKETS) or 1
    return [range(low, min(low + size, count)) for low in range(0, count, size)]


def fold_runs(values: Sequence[int], runs: Sequence[range]) -> list[int]:
    """Return a digest of each run of the values; runs may be longer than this rank's values."""
    return [fold((), values[run.start : run.stop]) for run in runs]


def unlike(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """Return the positions where the ranks' rows differ; a missing value also differs."""
    longest = max(map(len, rows), default=0)
    padded = [[*row, *[None] * (longest - len(row))] for row in rows]
    return [i for i, column in enumerate(zip(*padded, strict=True)) if len(set(column)) > 1]


def odd_ranks(column: Sequence[Hashable]) -> tuple[int, ...] | None:
    """Return the ranks that differ from more than half of all; None without such a majority."""
    (value, count), *_ = Counter(column).most_common(1)
    if 2 * count <= len(column):
        return None
    return tuple(rank for rank, each in enumerate(column) if each != value)


@dataclass(frozen=True)
class Finding:
    """A difference between replicas. Equal on all ranks."""

    names: tuple[str, ...]
    """Tensors that differ, by their names in a shard; the first of them."""
    odd: tuple[int, ...] | None
    """Ranks that differ from the majority; None where there is no majority."""
    ranks: int
    version: int
    """The boundary where the difference was first seen."""
    clean: int | None = None
    """The newest version known to be equal on all ranks; None if there is none in this run."""
    more: bool = False
    """More tensors may differ; they were not compared."""
    structure: tuple[str, ...] = field(default=())
    """For tensors whose name, type or shape differs between ranks: each rank's version."""
    apart: bool = False
    """Ranks made as many steps at different iterations, and cannot be asked what differs."""

    def who(self) -> str:
        """The ranks that differ, in words."""
        if self.odd is None:
            if self.ranks == 2:
                return "rank 0 and rank 1 differ"
            return f"the {self.ranks} ranks differ, and no value is that of more than half of them"
        noun, verb = ("rank", "differs") if len(self.odd) == 1 else ("ranks", "differ")
        return f"{noun} {some(self.odd, 8)} {verb} from the other {self.ranks - len(self.odd)}"

    def what(self) -> str:
        """The tensors and ranks that differ, in words; short enough for a mark."""
        if self.apart:
            return (
                "ranks made the same number of optimizer steps in different iterations (some rank "
                "skipped a step that others made), and their states differ"
            )
        if self.structure:
            return f"ranks have different tensors ({some(self.structure, 4, '; ')})"
        others = " and others" if self.more else ""
        return f"{some(self.names, 4)}{others}: {self.who()}"

    def text(self) -> str:
        """The difference in words, and since when it is there."""
        since = "" if self.clean is None else f"; at v{self.clean} all ranks were equal"
        return f"{self.what()}. First seen at v{self.version}{since}"


def find(
    names: Sequence[str], columns: Sequence[tuple[str, Sequence[Hashable]]]
) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """Return (tensors that differ, ranks that differ from the majority).

    `columns` has a tensor's name and every rank's digest of one of its units. `names` has the order
    of tensors."""
    found: dict[str, tuple[int, ...] | None] = {}
    for name, column in columns:
        if len(set(column)) > 1:
            odd = odd_ranks(column)
            before = found.get(name, ())
            found[name] = None if odd is None or before is None else (*before, *odd)
    order = [name for name in dict.fromkeys(names) if name in found]
    if any(found[name] is None for name in order):
        return tuple(order), None
    return tuple(order), tuple(sorted({rank for name in order for rank in found[name] or ()}))


__all__ = ["Finding", "Unit", "agree", "as_vote", "cut", "find", "fold", "odd_ranks"]
