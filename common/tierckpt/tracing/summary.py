"""Summary: a timeline in numbers. Pure; `cli.trace.tables` prints them.

A copy is *hidden under communication* while an allreduce is in progress (launched and not done; or,
more strictly, while its data moves, after Horovod's negotiation). It is hidden *under backward*
between the first launch after a boundary and the barrier, and *under computing* between the
boundary and the barrier: weights do not change then, and the training thread does other work. The
time of each copying thread counts separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .spans import Span, Timeline

SIZE_FACTOR = 4
"""The upper limit of each size bucket is this multiple of the one before."""
SMALLEST_BUCKET_BYTES = 1024

KINDS = ("boundary", "barrier", "slot", "copy", "tree", "seal", "write", "commit", "trace")


@dataclass(frozen=True)
class Stats:
    """Statistics of some durations in microseconds."""

    count: int
    min_us: int
    avg_us: float
    max_us: int

    @staticmethod
    def of(durations_us: Iterable[int]) -> Stats:
        """Compute them; all zero for no durations."""
        durations = list(durations_us)
        if not durations:
            return Stats(0, 0, 0.0, 0)
        return Stats(
            len(durations), min(durations), sum(durations) / len(durations), max(durations)
        )


@dataclass(frozen=True)
class SizeBucket:
    """Allreduces of more than `above_bytes` and at most `upto_bytes`."""

    above_bytes: int
    upto_bytes: int
    latency: Stats
    """From the launch to the end, including the wait for the slowest rank."""
    moving: Stats
    """The part after the negotiation, if there is one."""

    @property
    def size(self) -> str:
        """The sizes, such as `256 KiB to 1 MiB`."""
        return f"{_size_text(self.above_bytes)} to {_size_text(self.upto_bytes)}"


def _size_text(nbytes: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes} {unit}"
        nbytes //= 1024
    return f"{nbytes} GiB"


@dataclass(frozen=True)
class Hidden:
    """Microseconds of copying by all ranks and threads, split by the activity at the same time."""

    copy_us: int = 0
    communication_us: int = 0
    moving_us: int = 0
    backward_us: int = 0
    computing_us: int = 0

    def share(self, part_us: int) -> float:
        """The share of all copying; 0 if there was none."""
        return part_us / self.copy_us if self.copy_us else 0.0


@dataclass(frozen=True)
class Summary:
    """The numbers that the module describes."""

    ranks: int
    steps: int
    """Mean number of boundaries per rank."""
    buckets: tuple[SizeBucket, ...]
    gaps: Stats
    """From the end of a weight update to the start of the next: weights do not change."""
    hidden: Hidden
    durations: dict[str, Stats]
    """By kind of span."""


def summarize(timeline: Timeline) -> Summary:
    """Compute everything."""
    ranks = timeline.ranks()
    boundaries = timeline.of("boundary")
    return Summary(
        ranks=len(ranks),
        steps=round(len(boundaries) / max(1, len(ranks))),
        buckets=tuple(size_buckets(timeline.of("allreduce"))),
        gaps=Stats.of(g for rank in ranks for g in update_gaps(timeline, rank)),
        hidden=_sum(hidden(timeline, rank) for rank in ranks),
        durations={k: Stats.of(s.us for s in timeline.of(k)) for k in KINDS},
    )


def size_buckets(allreduces: Iterable[Span]) -> Iterator[SizeBucket]:
    """The buckets that are not empty, the smallest first."""
    members: dict[int, list[Span]] = {}
    for span in allreduces:
        upto = SMALLEST_BUCKET_BYTES
        while upto < span.nbytes:
            upto *= SIZE_FACTOR
        members.setdefault(upto, []).append(span)
    for upto in sorted(members):
        yield SizeBucket(
            above_bytes=0 if upto == SMALLEST_BUCKET_BYTES else upto // SIZE_FACTOR,
            upto_bytes=upto,
            latency=Stats.of(s.latency_us for s in members[upto]),
            moving=Stats.of(s.us for s in members[upto]),
        )


def update_gaps(timeline: Timeline, rank: int) -> Iterator[int]:
    """Microseconds between weight updates of one rank, within a run."""
    last: int | None = None
    for span in timeline.of("update", "begin", rank=rank):
        if span.kind == "begin":
            last = None
            continue
        if last is not None:
            yield span.begin_us - last
        last = span.end_us


def hidden(timeline: Timeline, rank: int) -> Hidden:
    """Durations under which one rank's copies were hidden."""
    copies = _intervals(timeline.of("copy", "tree", rank=rank))
    moving = timeline.communication(rank)
    backward, computing = windows(timeline, rank)
    return Hidden(
        copy_us=sum(end - begin for begin, end in copies),
        communication_us=overlap(
            copies, union((s.end_us - s.latency_us, s.end_us) for s in moving)
        ),
        moving_us=overlap(copies, union(_intervals(moving))),
        backward_us=overlap(copies, union(backward)),
        computing_us=overlap(copies, union(computing)),
    )


def windows(timeline: Timeline, rank: int) -> tuple[list[Interval], list[Interval]]:
    """For every step that reached its barrier: (backward, as far as seen; boundary to barrier)."""
    backward, computing = [], []
    begin_us: int | None = None
    launch_us: int | None = None
    for span in timeline.of("boundary", "release", "barrier", "begin", rank=rank):
        if span.kind == "barrier" and begin_us is not None:
            computing.append((begin_us, span.begin_us))
            if launch_us is not None:
                backward.append((launch_us, span.begin_us))
        if span.kind == "release":
            launch_us = span.begin_us if launch_us is None else launch_us
        else:
            begin_us = span.end_us if span.kind == "boundary" else None
            launch_us = None
    return backward, computing


def _intervals(spans: Iterable[Span]) -> list[Interval]:
    return [(s.begin_us, s.end_us) for s in spans]


def _sum(parts: Iterable[Hidden]) -> Hidden:
    summands = list(parts)
    return Hidden(
        copy_us=sum(h.copy_us for h in summands),
        communication_us=sum(h.communication_us for h in summands),
        moving_us=sum(h.moving_us for h in summands),
        backward_us=sum(h.backward_us for h in summands),
        computing_us=sum(h.computing_us for h in summands),
    )


Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order, without empty ones. O(n log n)."""
    found: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[0] < i[1]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def intersection(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """The intersection of two unions, as a union; a sweep over both. O(n)."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> int:
    """The total length of a union."""
    return sum(end - begin for begin, end in intervals)


def overlap(intervals: Iterable[Interval], cover: list[Interval]) -> int:
    """The total length of the parts of these intervals under the union `cover`.

    Each interval counts separately: two threads that copy at the same time have copied for twice
    the time.
    """
    return sum(length(intersection([i], cover)) for i in intervals if i[0] < i[1])


def lanes(intervals: list[Interval]) -> list[int]:
    """The lowest free lane for each interval, so that none overlaps another in its lane.

    The intervals must be in order of their start.
    """
    free_from: list[int] = []
    chosen = []
    for begin, end in intervals:
        lane = next((k for k, since in enumerate(free_from) if since <= begin), len(free_from))
        free_from[lane:] = [end, *free_from[lane + 1 :]]
        chosen.append(lane)
    return chosen
