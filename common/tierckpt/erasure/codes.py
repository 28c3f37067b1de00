"""The bytes that belong together: shards cut into segments, rows of segments, and their parity.

Pure. A *code* protects the *members* of a group, numbered 0 to n - 1 on a ring. Each member's shard
is cut into k *segments* of equal length; the last may be short or empty, and its missing bytes
count as zeros, which are neither stored nor sent. There are n *rows*. A row is one code word: k
data segments of k members, and m parity segments that m other members store. Losing any m members
takes at most m segments from each row, and any k of a row's k + m restore the others.

    row r:   data s     is segment s of member r - 1 - s       s = 0 ... k - 1     (mod n)
             parity p   is stored by member r + p              p = 0 ... m - 1     (mod n)

So row r cuts the ring at r: data lies before, parity after. Example, n = 4, k = 2, m = 2, member by
member (`d0 @1` is data segment 0, of row 1):

    member 0            member 1            member 2            member 3
    d0 @1   d1 @2       d0 @2   d1 @3       d0 @3   d1 @0       d0 @0   d1 @1
    p0 @0   p1 @3       p0 @1   p1 @0       p0 @2   p1 @1       p0 @3   p1 @2

Each member stores m parity segments: m / k of a shard, wherever it is on the ring, as in RAID with
rotated parity (Patterson, Gibson and Katz, 1988), and as SCR does (Moody et al., 2010) with XOR
(k = n - 1, m = 1). A ring may be longer than k + m: the code is still the one that was asked for,
and many losses of more than m members are survived, too. Partner copies are the same with k = 1:
the segment is the shard, and "parity" p of row r is a copy of member r - 1's shard (see `gf256`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tierckpt.format.ids import PAGE_BYTES, round_up

from .gf256 import MOST_SYMBOLS


@dataclass(frozen=True, order=True)
class Segment:
    """Segment `index` of a member's shard, or of its parity."""

    member: int
    parity: bool
    index: int

    def __str__(self) -> str:
        return f"{'parity' if self.parity else 'segment'} {self.index} of member {self.member}"


@dataclass(frozen=True)
class Code:
    """`k` data and `m` parity segments a row, on a ring of `n` members.

    Raises ValueError for numbers that give no code.
    """

    n: int
    k: int
    m: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not (self.k >= 1 and self.m >= 1 and self.k + self.m <= min(self.n, MOST_SYMBOLS)):
            raise ValueError(
                f"k={self.k}, m={self.m}, n={self.n}: k and m must be 1 or more, and k + m at most "
                f"n, and at most {MOST_SYMBOLS}, the number of elements of the field"
            )

    def row(self, row: int) -> tuple[Segment, ...]:
        """The row's code word: its data, in the order of their columns, and then its parities."""
        data = [Segment((row - 1 - s) % self.n, False, s) for s in range(self.k)]
        parity = [Segment((row + p) % self.n, True, p) for p in range(self.m)]
        return (*data, *parity)

    def row_of(self, segment: Segment) -> int:
        """The one row that contains the segment."""
        if segment.parity:
            return (segment.member - segment.index) % self.n
        return (segment.member + 1 + segment.index) % self.n


@dataclass(frozen=True)
class Stripes:
    """A code over shards of given lengths; gives the length of every segment.

    `shard_bytes` holds the length of every member's shard, in the order of the ring.
    """

    code: Code
    shard_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the lengths. Raises ValueError unless there is one for every member."""
        if len(self.shard_bytes) != self.code.n or min(self.shard_bytes) < 0:
            raise ValueError(f"{self.code} takes {self.code.n} lengths: got {self.shard_bytes}")

    @cached_property
    def segment_bytes(self) -> int:
        """Distance between segments in shard and parity: k of them hold the longest shard.

        A multiple of PAGE_BYTES, so that parity, and segments of shards, suit O_DIRECT.
        """
        return round_up(-(-max(self.shard_bytes) // self.code.k), PAGE_BYTES)

    @property
    def parity_bytes(self) -> int:
        """Length of the parity that every member stores for the others."""
        return self.code.m * self.segment_bytes

    def offset(self, segment: Segment) -> int:
        """Offset of the segment in its member's shard, or parity."""
        return segment.index * self.segment_bytes

    def extent(self, segment: Segment) -> int:
        """Length of the segment in bytes; the rest up to segment_bytes counts as zeros.

        A data segment ends with its shard. A parity segment is as long as the longest data segment
        of its row, so a partner copy is as long as the shard.
        """
        if segment.parity:
            row = self.code.row(self.code.row_of(segment))
            return max(self.extent(s) for s in row[: self.code.k])
        left = self.shard_bytes[segment.member] - self.offset(segment)
        return min(max(left, 0), self.segment_bytes)

    def windows(self, window_bytes: int) -> Iterator[tuple[int, int]]:
        """Cut the segments into windows: ranges [low, high) counted from a segment's beginning.

        All rows go through the same windows in step, so buffers hold windows, never segments.
        """
        if window_bytes < 1:
            raise ValueError(f"window_bytes is {window_bytes}; it must be 1 or more")
        longest = min(max(self.shard_bytes), self.segment_bytes)
        for low in range(0, longest, window_bytes):
            yield low, min(low + window_bytes, longest)

    def range_of(self, segment: Segment, window: tuple[int, int]) -> tuple[int, int]:
        """The window of the segment as a range of its member's shard or parity; may be empty."""
        low, high = (self.offset(segment) + min(w, self.extent(segment)) for w in window)
        return low, high
