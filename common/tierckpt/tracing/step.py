"""One step of the training: every layer's allreduce, and the layer's copies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .spans import Span, Timeline, TimelineError

MOST_ROWS = 16
TREE_ROW = "each rank's own state"
"""The row of the rank tree, which belongs to no layer."""


def typical_version(timeline: Timeline, ranks: Sequence[int]) -> int:
    """The version with the median duration of a step, among those that all of these ranks
    copied."""
    times: dict[int, list[int]] = {}
    for rank in ranks:
        for barrier in timeline.of("barrier", rank=rank):
            begun = timeline.of("boundary", rank=rank, version=barrier.version)
            if begun and timeline.of("copy", rank=rank, version=barrier.version):
                times.setdefault(barrier.version, []).append(barrier.end_us - begun[-1].begin_us)
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
    begin_us, barrier = boundaries[-1].begin_us, barriers[-1]
    updates = [s for s in timeline.of("update", rank=rank) if s.begin_us >= barrier.begin_us]
    end_us = updates[0].end_us if updates else barrier.end_us
    inside = [
        *timeline.of("copy", rank=rank, version=version),
        *(replace(s, layers=(TREE_ROW,)) for s in timeline.of("tree", rank=rank, version=version)),
        *timeline.communication(rank),
        barrier,
        *updates[:1],
    ]
    return [boundaries[-1], *(s for s in inside if begin_us <= s.begin_us < end_us)]


def row_names(spans: Sequence[Span]) -> dict[str, str]:
    """The row of every layer, in the order of the allreduces: modules, and not too many.

    `body.0.weight` and `body.0.bias` share the row `body.0`. If there are too many rows, names are
    shortened further, and the remaining layers share the last row. The rank tree has its own.
    """
    by_time = sorted(spans, key=lambda s: (s.kind != "allreduce", s.begin_us))
    layers = list(dict.fromkeys(n for s in by_time if s.kind != "tree" for n in s.layers))
    deepest = max((layer.count(".") for layer in layers), default=0)
    for depth in range(deepest, 0, -1):
        rows = {n: ".".join(n.split(".")[:-1][:depth]) or n for n in layers}
        if len(set(rows.values())) <= MOST_ROWS:
            break
    else:
        rows = {n: n.split(".")[0] for n in layers}
    kept = list(dict.fromkeys(rows.values()))[: MOST_ROWS - 1]
    few = len(set(rows.values())) <= MOST_ROWS
    shown = {n: row if few or row in kept else "others" for n, row in rows.items()}
    return shown | {n: n for s in spans if s.kind == "tree" for n in s.layers}
