"""A timeline: activities of a rank with start and end, one step of them, and all in numbers. Pure.

All times are microseconds. `cli.trace` prints the summary, and `tierckpt report` shows one
step of the training: every layer's allreduce, and the layer's copies.

A copy is *hidden under communication* while an allreduce is in progress (launched and not done;
or, more strictly, while its data moves, after Horovod's negotiation). It is hidden *under
backward* between the first launch after a boundary and the barrier, and *under computing* between
the boundary and the barrier: weights do not change then, and the training thread does other work.
The time of each copying thread counts separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from tierckpt.errors import TierckptError


class TimelineError(TierckptError):
    """A file cannot be used for a timeline; the text names it, the reason and the remedy."""


class Span(Struct, frozen=True):
    """An activity from `start_us` to `end_us`, Unix time; an instant if the two are equal."""

    kind: str
    """A kind from the table in `tierckpt.tracing.recorder`, or Horovod's `negotiate`."""
    rank: int
    start_us: int
    end_us: int
    name: str = ""
    row: str = "training"
    version: int = -1
    nbytes: int = 0
    layers: tuple[str, ...] = ()
    """Parameters concerned."""
    launched_us: int | None = None
    """The time at which the first rank requested an allreduce, if the span itself starts later."""

    @property
    def us(self) -> int:
        """The duration."""
        return self.end_us - self.start_us

    @property
    def latency_us(self) -> int:
        """The time from the launch to the end."""
        return self.end_us - (self.start_us if self.launched_us is None else self.launched_us)


class Timeline(Struct):
    """Spans of all ranks."""

    notes: list[str] = field(default_factory=list)
    """Notes for the reader about the origin of the timeline."""
    _spans: dict[tuple[int, str], list[Span]] = field(default_factory=dict)
    """By rank and kind, in order of their start."""

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans."""
        for span in spans:
            self._spans.setdefault((span.rank, span.kind), []).append(span)
        for members in self._spans.values():
            members.sort(key=_order)

    def of(
        self, *kinds: str, rank: int | None = None, version: int | None = None, from_us: int = 0
    ) -> list[Span]:
        """Spans of some kinds (default: all) in order of their start.

        Optionally of one rank or version only, and only those that start at `from_us` or later.
        """
        found = [
            span
            for (of_rank, kind), spans in self._spans.items()
            if rank in (None, of_rank) and (not kinds or kind in kinds)
            for span in spans
            if version in (None, span.version) and span.start_us >= from_us
        ]
        return sorted(found, key=_order)

    def ranks(self) -> list[int]:
        """All ranks, in order."""
        return sorted({rank for rank, _ in self._spans})

    def communication(self, rank: int) -> list[Span]:
        """A rank's allreduces, each launched when this very rank requested it.

        Horovod's timeline is rank 0's, with the allreduces of all ranks: a rank without its own
        gets those. The time of a rank's request is in its own trace. Horovod's timeline has only
        the first rank's request, which may come before this rank has finished the step before.
        """
        with_any = [r for r, kind in self._spans if kind == "allreduce"]
        source = rank if rank in with_any else min(with_any, default=rank)
        requests: dict[str, list[int]] = {}
        for release in self.of("release", rank=rank):
            for layer in release.layers:
                requests.setdefault(layer, []).append(release.start_us)
        return [_as_requested(span, requests) for span in self.of("allreduce", rank=source)]


def _as_requested(span: Span, requests: dict[str, list[int]]) -> Span:
    """The span with the last request before its end as its launch, at the latest at its own start:
    requests are noted after they were made, sometimes too late."""
    times = [t for layer in span.layers for t in requests.get(layer, ()) if t <= span.end_us]
    if span.launched_us is None or not times:
        return span
    return replace(span, launched_us=min(max(span.launched_us, max(times)), span.start_us))


def _order(span: Span) -> tuple[int, int]:
    """Longer spans come first: they contain the others."""
    return (span.start_us, -span.end_us)


SIZE_FACTOR = 4
"""The upper limit of each size bucket is this multiple of the one before."""
SMALLEST_BUCKET_BYTES = 1024

KINDS = ("boundary", "barrier", "slot", "copy", "tree", "seal", "write", "commit", "trace")


class Stats(Struct, frozen=True):
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


class SizeBucket(Struct, frozen=True):
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


class Hidden(Struct, frozen=True):
    """Microseconds of copying by all ranks and threads, split by the activity at the same time."""

    copy_us: int = 0
    communication_us: int = 0
    moving_us: int = 0
    backward_us: int = 0
    computing_us: int = 0

    def share(self, part_us: int) -> float:
        """The share of all copying; 0 if there was none."""
        return part_us / self.copy_us if self.copy_us else 0.0


class Summary(Struct, frozen=True):
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
            yield span.start_us - last
        last = span.end_us


def hidden(timeline: Timeline, rank: int) -> Hidden:
    """Durations under which one rank's copies were hidden."""
    copies = _intervals(timeline.of("copy", "tree", rank=rank))
    moving = timeline.communication(rank)
    backward, computing = windows(timeline, rank)
    return Hidden(
        copy_us=sum(end - start for start, end in copies),
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
    start_us: int | None = None
    launch_us: int | None = None
    for span in timeline.of("boundary", "release", "barrier", "begin", rank=rank):
        if span.kind == "barrier" and start_us is not None:
            computing.append((start_us, span.start_us))
            if launch_us is not None:
                backward.append((launch_us, span.start_us))
        if span.kind == "release":
            launch_us = span.start_us if launch_us is None else launch_us
        else:
            start_us = span.end_us if span.kind == "boundary" else None
            launch_us = None
    return backward, computing


def _intervals(spans: Iterable[Span]) -> list[Interval]:
    return [(s.start_us, s.end_us) for s in spans]


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
    for start, end in sorted(i for i in intervals if i[0] < i[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def intersection(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """The intersection of two unions, as a union; a sweep over both. O(n)."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> int:
    """The total length of a union."""
    return sum(end - start for start, end in intervals)


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
    for start, end in intervals:
        lane = next((k for k, since in enumerate(free_from) if since <= start), len(free_from))
        free_from[lane:] = [end, *free_from[lane + 1 :]]
        chosen.append(lane)
    return chosen


MAX_ROWS = 16
TREE_ROW = "each rank's own state"
"""The row of the rank tree, which belongs to no layer."""


def typical_version(timeline: Timeline, ranks: Sequence[int]) -> int:
    """The version with the median duration of a step, among those that all of these ranks
    copied."""
    times: dict[int, list[int]] = {}
    for rank in ranks:
        for barrier in timeline.of("barrier", rank=rank):
            taken = timeline.of("boundary", rank=rank, version=barrier.version)
            if taken and timeline.of("copy", rank=rank, version=barrier.version):
                times.setdefault(barrier.version, []).append(barrier.end_us - taken[-1].start_us)
    whole = sorted((max(t), v) for v, t in times.items() if len(t) >= len(ranks))
    if not whole:
        raise TimelineError(
            f"no version was copied by all of the ranks {', '.join(map(str, ranks))} during the "
            "recording; give the traces of ranks that ran together"
        )
    return whole[len(whole) // 2][1]


def step_of(timeline: Timeline, rank: int, version: int) -> list[Span]:
    """One rank's spans from the boundary of `version` to the end of the update after it.

    The first span is the boundary. Raises TimelineError if the rank did not record them.
    """
    boundaries = timeline.of("boundary", rank=rank, version=version)
    barriers = timeline.of("barrier", rank=rank, version=version)
    if not boundaries or not barriers:
        recorded = [s.version for s in timeline.of("barrier", rank=rank)]
        there = f"v{min(recorded)} to v{max(recorded)}" if recorded else "no version at all"
        raise TimelineError(f"rank {rank} recorded no copy of v{version}; it recorded {there}")
    # those of the newest run, if several took the version
    start_us, barrier = boundaries[-1].start_us, barriers[-1]
    updates = [s for s in timeline.of("update", rank=rank) if s.start_us >= barrier.start_us]
    end_us = updates[0].end_us if updates else barrier.end_us
    inside = [
        *timeline.of("copy", rank=rank, version=version),
        *(replace(s, layers=(TREE_ROW,)) for s in timeline.of("tree", rank=rank, version=version)),
        *timeline.communication(rank),
        barrier,
        *updates[:1],
    ]
    return [boundaries[-1], *(s for s in inside if start_us <= s.start_us < end_us)]


def rows_of_step(spans: Sequence[Span]) -> dict[str, str]:
    """The row of every layer, in the order of the allreduces: modules, and not too many.

    `body.0.weight` and `body.0.bias` share the row `body.0`. If there are too many rows, names are
    shortened further, and the remaining layers share the last row. The rank tree has its own.
    """
    by_time = sorted(spans, key=lambda s: (s.kind != "allreduce", s.start_us))
    layers = list(dict.fromkeys(n for s in by_time if s.kind != "tree" for n in s.layers))
    deepest = max((layer.count(".") for layer in layers), default=0)
    for depth in range(deepest, 0, -1):
        rows = {n: ".".join(n.split(".")[:-1][:depth]) or n for n in layers}
        if len(set(rows.values())) <= MAX_ROWS:
            break
    else:
        rows = {n: n.split(".")[0] for n in layers}
    kept = list(dict.fromkeys(rows.values()))[: MAX_ROWS - 1]
    few = len(set(rows.values())) <= MAX_ROWS
    shown = {n: row if few or row in kept else "others" for n, row in rows.items()}
    return shown | {n: n for s in spans if s.kind == "tree" for n in s.layers}
