"""Erasure codes: which bytes belong together, their coefficients, and who sends which segment to
whom.

Pure: plans are plain values, and numbers are single ones; `kernels` does the same for megabytes.

*The code.* A code protects the *members* of a group, numbered 0 to n - 1 on a ring. Each member's
shard is cut into k *segments* of equal length; the last may be short or empty, and its missing
bytes count as zeros, which are neither stored nor sent. There are n *rows*. A row is one code
word: k data segments of k members, and m parity segments that m other members store. Losing any m
members takes at most m segments from each row, and any k of a row's k + m restore the others.

    row r:   data s     is segment s of member r - 1 - s       s = 0 ... k - 1     (mod n)
             parity p   is stored by member r + p              p = 0 ... m - 1     (mod n)

So row r cuts the ring at r: data lies before, parity after. Example, n = 4, k = 2, m = 2, member
by member (`d0 @1` is data segment 0, of row 1):

    member 0            member 1            member 2            member 3
    d0 @1   d1 @2       d0 @2   d1 @3       d0 @3   d1 @0       d0 @0   d1 @1
    p0 @0   p1 @3       p0 @1   p1 @0       p0 @2   p1 @1       p0 @3   p1 @2

Each member stores m parity segments: m / k of a shard, wherever it is on the ring, as in RAID with
rotated parity (Patterson, Gibson and Katz, 1988), and as SCR does (Moody et al., 2010) with XOR (k
= n - 1, m = 1). A ring may be longer than k + m: the code is still the one that was asked for, and
many losses of more than m members are survived, too. Partner copies are the same with k = 1: the
segment is the shard, and "parity" p of row r is a copy of member r - 1's shard.

*The field* is GF(2^8). Addition is XOR; multiplication is that of polynomials modulo x^8 + x^4 +
x^3 + x^2 + 1 (0x11d), as in ISA-L.

*The coefficients* are those of a Cauchy Reed-Solomon code (Blömer et al., 1995), the one code of
all schemes: parity `p` of data `d_0 ... d_(k-1)` is the sum of `coefficient(p, s) * d_s`, and any
k of the k + m symbols determine the rest. Its rows and columns are scaled so that the first of
each is all ones. This keeps the property, and makes one parity plain XOR, one datum plain copying,
and the repair of one shard as cheap as XOR under any scheme. A coefficient depends on its row and
column only, not on k or m.

*The messages*, to encode and to rebuild: a *task* computes segments of one row from k others. They
are collected at the task's *collector*, a member that already has one of the k: it receives the
other k - 1, multiplies, and sends every result to the member that stores it. Encoding is the case
in which all parity is missing.

*The cost.* Messages must connect all k + m members of a row, so a row takes at least k + m - 1
messages as long as bytes at different offsets are not mixed; this plan reaches that minimum.
(Without a collector all data would go to each of m parities, in k * m messages.) Encoding has n
rows, and every member collects one. So each member sends, and receives, k + m - 1 segments, which
are (k + m - 1) / k shards. For XOR this is exactly one shard, as in SCR's pipelined reduction, but
without a chain of n - 1 steps. The work is even as well: each member multiplies one shard of data.

To rebuild, survivors collect, again with the fewest messages. A lost member then receives only its
own k + m segments. The survivors share the rows about evenly, and receive k - 1 segments for each
row that they collect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from msgspec import Struct

from tierckpt.errors import RestoreError
from tierckpt.format.ids import PAGE_BYTES, round_up

POLYNOMIAL = 0x11D

MAX_SYMBOLS = 256
"""Limit of k + m: the code needs one distinct element of the field for each symbol."""

Matrix = tuple[tuple[int, ...], ...]
"""A row for every output, a column for every source."""


def _powers_of_two() -> list[int]:
    """2^0, 2^1, ... for two cycles: 2 generates the field, and a sum of logarithms needs no mod."""
    powers, value = [], 1
    for _ in range(2 * 255):
        powers.append(value)
        value <<= 1
        if value > 255:
            value ^= POLYNOMIAL
    return powers


_EXP = _powers_of_two()
_LOG = {value: exponent for exponent, value in enumerate(_EXP[:255])}


def multiply(a: int, b: int) -> int:
    """Product of two elements, 0 to 255."""
    return _EXP[_LOG[a] + _LOG[b]] if a and b else 0


def inverse(a: int) -> int:
    """The element with product 1 with `a`. Raises ZeroDivisionError for 0."""
    if not a:
        raise ZeroDivisionError("0 has no inverse")
    return _EXP[255 - _LOG[a]]


def coefficient(parity: int, datum: int) -> int:
    """Factor of datum number `datum` in parity number `parity`; never 0.

    1 / (x + y) with x = 255 - parity and y = datum is a Cauchy matrix as long as no x equals a y,
    so for up to MAX_SYMBOLS symbols. The factor (x + y_0) (x_0 + y) / (x_0 + y_0) scales rows and
    columns so that the first ones are all ones.
    """
    scale = multiply(multiply(255 ^ parity, 255 ^ datum), inverse(255))
    return multiply(scale, inverse(255 ^ parity ^ datum))


def invert(matrix: Sequence[Sequence[int]]) -> Matrix:
    """Inverse of a square matrix, by Gauss-Jordan. Raises ZeroDivisionError if there is none."""
    size = len(matrix)
    rows = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((r for r in range(column, size) if rows[r][column]), column)
        rows[column], rows[pivot] = rows[pivot], rows[column]
        factor = inverse(rows[column][column])
        rows[column] = [multiply(factor, value) for value in rows[column]]
        for other in range(size):
            if other != column and rows[other][column]:
                rows[other] = _add_scaled(rows[other], rows[other][column], rows[column])
    return tuple(tuple(row[size:]) for row in rows)


def decoding(k: int, known: Sequence[int], wanted: Sequence[int]) -> Matrix:
    """The matrix that computes the `wanted` symbols of a code word from `k` `known` ones.

    Symbols 0 to k - 1 are the data, the parities follow. Columns are in the order of `known`. With
    all data known and parities wanted, this is the encoding matrix. It solves only one equation for
    each missing datum (at most m), so its cost stays small for large k.
    """
    if len(set(known)) != k or len(known) != k:
        raise ValueError(f"a code word of {k} data takes {k} known symbols, not {list(known)}")
    missing = [s for s in range(k) if s not in known]
    checks = [symbol - k for symbol in known if symbol >= k]
    solved = invert([[coefficient(p, s) for s in missing] for p in checks])
    data: dict[int, list[int]] = {s: [int(s == c) for c in known] for s in range(k) if s in known}
    for s, weights in zip(missing, solved, strict=True):
        # The parities, minus the contributions of the known data, through the inverse.
        row = [0] * k
        for p, weight in zip(checks, weights, strict=True):
            part = [coefficient(p, c) if c < k else int(c == k + p) for c in known]
            row = _add_scaled(row, weight, part)
        data[s] = row
    return tuple(tuple(data[w] if w < k else _parity(w - k, data)) for w in wanted)


def _parity(parity: int, data: dict[int, list[int]]) -> list[int]:
    row = [0] * len(data)
    for s, datum in data.items():
        row = _add_scaled(row, coefficient(parity, s), datum)
    return row


def _add_scaled(row: Sequence[int], factor: int, other: Sequence[int]) -> list[int]:
    return [a ^ multiply(factor, b) for a, b in zip(row, other, strict=True)]


class Segment(Struct, frozen=True, order=True):
    """Segment `index` of a member's shard, or of its parity."""

    member: int
    parity: bool
    index: int

    def __str__(self) -> str:
        return f"{'parity' if self.parity else 'segment'} {self.index} of member {self.member}"


class Code(Struct, frozen=True):
    """`k` data and `m` parity segments a row, on a ring of `n` members.

    Raises ValueError for numbers that give no code.
    """

    n: int
    k: int
    m: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not (self.k >= 1 and self.m >= 1 and self.k + self.m <= min(self.n, MAX_SYMBOLS)):
            raise ValueError(
                f"k={self.k}, m={self.m}, n={self.n}: k and m must be 1 or more, and k + m at most "
                f"n, and at most {MAX_SYMBOLS}, the number of elements of the field"
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


class Stripes(Struct, frozen=True, dict=True):
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
        """Cut the segments into windows: ranges [low, high) counted from a segment's start.

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


class Task(Struct, frozen=True):
    """Compute `outputs` as `matrix` times `sources`, at the member `collector`."""

    row: int
    collector: int
    sources: tuple[Segment, ...]
    outputs: tuple[Segment, ...]
    matrix: Matrix


class Round(Struct, frozen=True):
    """Segments that a member sends and receives at the same time.

    In a round every member sends to the one at a fixed distance after it on the ring, and receives
    from the one at the same distance before it: no member receives from two at a time.
    """

    to: int
    sends: tuple[Segment, ...]
    source: int
    receives: tuple[Segment, ...]


class MemberPlan(Struct, frozen=True):
    """Work of one member in every window: `gather`, then `tasks`, then `scatter`, in order.

    A member owns the segments that it stores. It needs a window of a segment received in `gather`
    until the task is done, and a window made for another member until it was sent. So it needs at
    most k - 1 + m buffers of one window for every task it collects, and holds no more. A second set
    of buffers allows the next window to be gathered at the same time.

    Segment and window identify a message, and `Stripes.range_of` gives its length. An empty message
    is not sent: its receiver knows its length. All members go through all windows.
    """

    gather: tuple[Round, ...]
    tasks: tuple[Task, ...]
    scatter: tuple[Round, ...]


def plan_encode(code: Code) -> tuple[Task, ...]:
    """The tasks that compute all parity."""
    return plan_rebuild(code, (), range(code.n))


def plan_rebuild(
    code: Code,
    lost_shards: Iterable[int],
    lost_parities: Iterable[int],
    restore_parities: bool = True,
) -> tuple[Task, ...]:
    """The tasks that restore the losses: any `m` members, and more where the rows allow it.

    A lost node is in both lists, a damaged file in one. With `restore_parities` False only the
    shards are restored, at less cost: a restart waits for these. The rest can follow, with the
    shards no longer lost. The number of a lost member stands for its replacement, spare or
    survivor. Every member computes the same plan from the same lists.

    Raises RestoreError when a shard (or parity, if asked for) cannot be restored; nothing is
    planned then. Raises ValueError when a member is not on the ring.
    """
    lost = {False: frozenset(lost_shards), True: frozenset(lost_parities)}
    if unknown := sorted((lost[False] | lost[True]) - set(range(code.n))):
        raise ValueError(f"members {unknown} are not on a ring of {code.n}")
    loads = [0] * code.n
    tasks = []
    for row in range(code.n):
        word = code.row(row)
        known = [i for i, segment in enumerate(word) if segment.member not in lost[segment.parity]]
        wanted = [
            i
            for i, segment in enumerate(word)
            if i not in known and (restore_parities or not segment.parity)
        ]
        if not wanted:
            continue
        if len(known) < code.k:
            raise RestoreError(_too_many(code, word, known, lost))
        # Data first, then low parities: XOR alone then restores a single loss.
        known = known[: code.k]
        sources = tuple(word[i] for i in known)
        collector = min((s.member for s in sources), key=lambda member: loads[member])
        loads[collector] += 1
        outputs = tuple(word[i] for i in wanted)
        tasks.append(Task(row, collector, sources, outputs, decoding(code.k, known, wanted)))
    return tuple(tasks)


def _too_many(
    code: Code, word: tuple[Segment, ...], known: list[int], lost: dict[bool, frozenset[int]]
) -> str:
    gone = ", ".join(str(segment) for i, segment in enumerate(word) if i not in known)
    members = ", ".join(str(m) for m in sorted(lost[False] | lost[True]))
    return (
        f"the group cannot be rebuilt from its peers: of its {code.n} members {members} lost data, "
        f"and {code.k}+{code.m} survives any {code.m}. A row takes {code.k} segments, and of "
        f"these {code.k + code.m} only {len(known)} are left; lost are {gone}. Use another level, "
        "or an older version"
    )


def transfers(task: Task) -> Iterator[tuple[bool, int, int, Segment]]:
    """Every message of a task: (is it a result, sender, receiver, segment)."""
    for segment in task.sources:
        if segment.member != task.collector:
            yield False, segment.member, task.collector, segment
    for segment in task.outputs:
        if segment.member != task.collector:
            yield True, task.collector, segment.member, segment


def plan_member(code: Code, tasks: Iterable[Task], member: int) -> MemberPlan:
    """The share that `member` has in `tasks`."""
    tasks = tuple(tasks)
    sends: dict[tuple[bool, int], list[Segment]] = {}
    receives: dict[tuple[bool, int], list[Segment]] = {}
    for task in tasks:
        for after, sender, receiver, segment in transfers(task):
            slot = (after, (receiver - sender) % code.n)
            if sender == member:
                sends.setdefault(slot, []).append(segment)
            elif receiver == member:
                receives.setdefault(slot, []).append(segment)

    def rounds(after: bool) -> tuple[Round, ...]:
        return tuple(
            Round(
                to=(member + slot[1]) % code.n,
                sends=tuple(sends.get(slot, ())),
                source=(member - slot[1]) % code.n,
                receives=tuple(receives.get(slot, ())),
            )
            for slot in sorted(sends.keys() | receives.keys())
            if slot[0] == after
        )

    own = tuple(task for task in tasks if task.collector == member)
    return MemberPlan(rounds(False), own, rounds(True))
