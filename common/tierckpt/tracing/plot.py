"""A picture of one step: every layer's allreduce, with the layer's copies right below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .spans import Span, Timeline, TimelineError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 16
MOST_RANKS = 4
WIDTH_INCHES, ROW_INCHES, DPI = 9.0, 0.2, 200
"""At a width of 900 pixels, text of 9 points has its usual size in a browser."""
COLOURS = {
    "boundary": "#54a24b",
    "allreduce": "#4c78a8",
    "copy": "#f58518",
    "tree": "#eeca3b",
    "barrier": "#e02020",
    "update": "#9d9d9d",
}


TREE_ROW = "each rank's own state"
"""The row of the rank tree, which belongs to no layer."""


def plot(timeline: Timeline, path: Path, version: int | None, ranks: Sequence[int]) -> int:
    """Draw the step after the boundary of `version` (default: a typical one); returns its version.

    Args:
        ranks: ranks to draw, one below the other; empty: the first few.

    Raises TimelineError if matplotlib is missing, if there is nothing to draw, or if the file
    cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TimelineError(
            "drawing needs matplotlib, which is not installed: pip install 'tierckpt[plot]'"
        ) from error
    chosen = list(ranks) or timeline.ranks()[:MOST_RANKS]
    version = typical_version(timeline, chosen) if version is None else version
    steps = [step_of(timeline, rank, version) for rank in chosen]
    rows = row_names([s for step in steps for s in step])
    tall_inches = 0.7 + len(chosen) * (0.4 + ROW_INCHES * len(set(rows.values())))
    figure = Figure(figsize=(WIDTH_INCHES, tall_inches), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    for axis, rank, step in zip(axes, chosen, steps, strict=True):
        _draw(axis, step, rows)
        axis.set_title(f"rank {rank}", fontsize=9, loc="left")
    axes[-1].set_xlim(*_reach(steps))
    axes[-1].set_xlabel(f"ms since the boundary of v{version}", fontsize=9)
    _legend(figure, axes[0])
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise TimelineError(f"cannot write the picture {path}: {error}") from error
    return version


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


def _draw(axis: Axes, step: Sequence[Span], rows: dict[str, str]) -> None:
    zero = step[0].begin_us
    names = list(dict.fromkeys(rows.values()))
    for span in step[1:]:
        begin, width = (span.begin_us - zero) / 1e3, span.us / 1e3
        colour = COLOURS[span.kind]
        if span.kind in ("barrier", "update"):
            _band(axis, begin, width, colour)
            continue
        shift = -0.4 if span.kind == "allreduce" else 0.02
        waited = (span.latency_us - span.us) / 1e3
        for row in dict.fromkeys(rows[layer] for layer in span.layers):
            place = (names.index(row) + shift, 0.38)
            axis.broken_barh(
                [(begin - waited, waited)], place, color=colour, alpha=0.3, linewidth=0
            )
            axis.broken_barh([(begin, width)], place, color=colour, linewidth=0.3)
    _band(axis, 0, step[0].us / 1e3, COLOURS["boundary"])
    axis.set_yticks(range(len(names)), [_short(n) for n in names], fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", linewidth=0.3)
    axis.set_axisbelow(True)


def _reach(steps: Sequence[Sequence[Span]]) -> tuple[float, float]:
    """The x range: a little before the boundary, and the visible start of the last update."""
    ends = [max(s.end_us for s in step if s.kind != "update") - step[0].begin_us for step in steps]
    return -0.02 * max(ends) / 1e3, 1.06 * max(ends) / 1e3


def _band(axis: Axes, begin_ms: float, width_ms: float, colour: str) -> None:
    """A band over all rows; its edge is visible even if it is short."""
    axis.axvspan(begin_ms, begin_ms + width_ms, color=colour, alpha=0.25, linewidth=0)
    if colour != COLOURS["update"]:  # an update begins where the barrier ends
        axis.axvline(begin_ms, color=colour, linewidth=1.5)


def _short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]


def _legend(figure: Any, axis: Axes) -> None:
    from matplotlib.patches import Patch

    shown = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=shown, loc="upper right", ncols=len(shown), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
