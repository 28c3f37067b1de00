"""Replica check, the pure part: what is hashed when, how digests are compared, and who is odd.

The replicated state (parameters and optimizer state that all ranks have alike) is a row of tensors
in an order that only structure decides. It is cut into *units*, and these are dealt to so many
*slices*, a round of which is all of the state. At each boundary all ranks hash the same slice.

A digest of a slice is a positive integer below 2^62; NONE, which is less than any, says that a rank
has none. All ranks agree if and only if the minimum of the digests is the complement of the minimum
of their complements: a minimum is all that ballots can do.
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
"""Hashed at once; small enough for a core's own cache."""
UNIT_OVERHEAD_BYTES = 16 * 1024
"""What it takes to come to a unit, in bytes that could be hashed meanwhile: slices of many small
tensors are no slower than others."""
LOOK_BYTES = 1024 * 1024
"""Of a look, overhead included, at least; as long as that is not all of the state."""
NONE = 0
"""In place of a digest: this rank has none, so nothing is compared on any."""
BUCKETS = 64
"""What ranks tell each other of a slice that differs: so many digests, whatever its size."""
BUCKETS_OPENED = 2
"""So many of the buckets that differ are looked into, to name tensors."""
_BITS = 62


class Unit(NamedTuple):
    """Bytes `[low, high)` of a tensor, by its number, in memory order."""

    tensor: int
    low: int
    high: int


def cut(
    sizes_bytes: Sequence[int], slices: int, units_bytes: Sequence[int] = ()
) -> list[list[Unit]]:
    """Deal tensors of these sizes, in units of at most `units_bytes` of each, to so many slices;
    each byte is in one. Some slices are empty where there are fewer units."""
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
        # By the middle of each: so the last slice is no longer than the first.
        dealt[min((before + cost // 2) * slices // total, slices - 1)].append(unit)
        before += cost
    return dealt


def stride_of(sizes_bytes: Sequence[int], slices: int) -> int:
    """At every so many boundaries as many slices are looked at, as one: where a slice is little, to
    come to it takes longer than to hash it. A divisor of `slices`."""
    each = (sum(sizes_bytes) + len(sizes_bytes) * UNIT_OVERHEAD_BYTES) // slices
    wanted = LOOK_BYTES // (each + 1)
    return max(n for n in range(1, slices + 1) if slices % n == 0 and n <= max(wanted, 1))


def fold(head: Sequence[int], digests: Sequence[int]) -> int:
    """One digest of a slice's; `head` tells what they are of. Never NONE."""
    values = struct.pack(f"<{len(head) + len(digests)}Q", *head, *digests)
    return (xxhash.xxh3_64_intdigest(values) >> (64 - _BITS)) | 1


def as_vote(digest: int) -> tuple[int, int]:
    """What is voted, so that the minima tell whether all agree."""
    return (digest, ~digest) if digest > NONE else (NONE, NONE)


def agree(least: int, least_complement: int) -> bool | None:
    """By the minima over all ranks of what `as_vote` returned; None where a rank had no digest."""
    return None if least <= NONE else least == ~least_complement


def buckets_of(count: int) -> list[range]:
    """So many values in at most BUCKETS runs, in order."""
    size = -(-count // BUCKETS) or 1
    return [range(low, min(low + size, count)) for low in range(0, count, size)]


def fold_runs(values: Sequence[int], runs: Sequence[range]) -> list[int]:
    """A digest of each run of the values; runs may reach beyond them, as other ranks have more."""
    return [fold((), values[run.start : run.stop]) for run in runs]


def unlike(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """Where the ranks' rows, all as long as the longest, differ; a missing value differs, too."""
    longest = max(map(len, rows), default=0)
    padded = [[*row, *[None] * (longest - len(row))] for row in rows]
    return [i for i, column in enumerate(zip(*padded, strict=True)) if len(set(column)) > 1]


def odd_ranks(column: Sequence[Hashable]) -> tuple[int, ...] | None:
    """Ranks whose value is not the one that more than half of them have; None without such."""
    (value, count), *_ = Counter(column).most_common(1)
    if 2 * count <= len(column):
        return None
    return tuple(rank for rank, each in enumerate(column) if each != value)


@dataclass(frozen=True)
class Finding:
    """What differs. Alike on all ranks."""

    names: tuple[str, ...]
    """Tensors, as entries of a shard are called; the first of those that differ."""
    odd: tuple[int, ...] | None
    """Ranks that differ from the majority; None where there is none."""
    ranks: int
    version: int
    """At whose boundary it was seen: the first."""
    clean: int | None = None
    """The newest version that is known to be alike on all ranks; None if none is in this run."""
    more: bool = False
    """There are other tensors, which were not looked at."""
    structure: tuple[str, ...] = field(default=())
    """Of tensors that ranks do not have alike by name, type or shape: what each rank has."""
    apart: bool = False
    """Ranks made as many steps at different iterations, and cannot be asked what differs."""

    def who(self) -> str:
        """Which ranks, in words."""
        if self.odd is None:
            if self.ranks == 2:
                return "rank 0 and rank 1 differ"
            return f"the {self.ranks} ranks differ, and no value is that of more than half of them"
        noun, verb = ("rank", "differs") if len(self.odd) == 1 else ("ranks", "differ")
        return f"{noun} {some(self.odd, 8)} {verb} from the other {self.ranks - len(self.odd)}"

    def what(self) -> str:
        """Which tensors on which ranks, in words; short enough for a mark."""
        if self.apart:
            return (
                "ranks made the same number of optimizer steps in different iterations (some rank "
                "skipped a step that others made), and what they have differs"
            )
        if self.structure:
            return f"ranks have different tensors ({some(self.structure, 4, '; ')})"
        others = " and others" if self.more else ""
        return f"{some(self.names, 4)}{others}: {self.who()}"

    def text(self) -> str:
        """What, and since when."""
        since = "" if self.clean is None else f"; at v{self.clean} all were alike"
        return f"{self.what()}. First seen at v{self.version}{since}"


def find(
    names: Sequence[str], columns: Sequence[tuple[str, Sequence[Hashable]]]
) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """(tensors that differ, ranks that are odd) from `columns`: a tensor's name, and every rank's
    digest of a unit of it. `names` tells the order."""
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
