"""The page: figures, tables and sentences of one job, or of two side by side, as one HTML file.

Matplotlib draws the figures. A figure's function returns None if there is nothing to draw.
"""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import chain
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from msgspec import Struct

from tierckpt._text import counted, size_text
from tierckpt._version import __version__
from tierckpt.agent.processor import USAGE_OF_AGENT as AGENT_NAME
from tierckpt.core.levels import RANK
from tierckpt.events import Record
from tierckpt.goodput.account import (
    CATEGORIES,
    NOT_RUNNING,
    RESTART,
    category_lines,
    conclusions,
    run_lines,
)
from tierckpt.lineage.history import Branch, branches_of, job_text
from tierckpt.tracing.timeline import (
    Interval,
    Span,
    TimelineError,
    length,
    overlap,
    rows_of_step,
    size_buckets,
    step_of,
    summarize,
    typical_version,
    union,
)
from tierckpt.watch.drawing import clock
from tierckpt.watch.drawing import span as time_text

from .sources import Copy, Job, Usage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "Draw",
    "allreduces",
    "cores",
    "costs",
    "mean_cores",
    "newest_versions",
    "one_step",
    "page",
    "restarts",
    "share_scales",
    "time_of_runs",
]


WIDTH_INCHES, HALF_INCHES, ROW_INCHES = 9.0, 6.2, 0.3
"""Width of a figure, of one beside another, and height of a row."""
MAX_ROWS = 40
"""Of more runs, the last ones are drawn."""
MAX_POINTS = 1500
"""Of more versions on a level, every second, third and so on is drawn."""
MAX_RANKS_DRAWN = 4
MAX_SECONDS = 20.0
"""Of the cores in use, this much is drawn."""
UNITS_SECONDS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0))
BREAK_SHARE = 0.02
"""Width of a time in which the job was not running, whatever its length."""
SHARED_X, SHARED_Y = "shared-x", "shared-y"
"""Ids of axes: jobs side by side have a scale in common."""
LEVEL_COLORS = {"memory": "#4c78a8", "local": "#f58518", "peer": "#54a24b", "persistent": "#b279a2"}
STEP_COLORS = {
    "boundary": ("boundary", "#54a24b"),
    "allreduce": ("allreduce (pale: until its data moves)", "#4c78a8"),
    "copy": ("copy", "#f58518"),
    "tree": ("copy of the rank's own state", "#eeca3b"),
    "barrier": ("barrier: wait for the last copies", "#e02020"),
    "update": ("update of the weights", "#9d9d9d"),
}
RANK_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
TRAINERS, AGENT = "#4c78a8", "#f58518"
SHADES = {"copied to memory": "#54a24b", "written by the agent": "#eeca3b"}
Draw = Callable[[Job], Figure | None]


def _new_figure(height: float, *rows: float) -> tuple[Figure, list[Axes]]:
    """A figure of that height in inches, with an axis for each of `rows`, their relative heights.
    matplotlib's settings have its width."""
    figure = Figure(layout="constrained")
    figure.set_figheight(height)
    axes = figure.subplots(len(rows) or 1, 1, height_ratios=rows or (1,), squeeze=False)
    found = [*axes[:, 0]]
    for axis in found:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    return figure, found


def _legend(figure: Figure, patches: dict[str, str], lines: Iterable[Artist] = ()) -> None:
    """Add a legend below everything: names with their colours, and lines."""
    handles = [*(Patch(color=colour, label=name) for name, colour in patches.items()), *lines]
    columns = 3 if figure.get_figwidth() >= WIDTH_INCHES else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)


def _log_times(axis: Axes, label: str) -> None:
    """A logarithmic scale of times."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: time_text(value)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_gid(SHARED_Y)
    axis.set_ylabel(label)
    axis.grid(axis="y", linewidth=0.3)


class _Clock:
    """Turns Unix times into positions on the axis of the job's time, on which times without the job
    are cut short."""

    def __init__(self, job: Job) -> None:
        runs = job.account.runs if job.account else []
        parts = [part for run in runs for part in run.parts]
        times = [copy.at for copy in job.copies]
        self.start = runs[0].start if runs else times[0]
        self.end = runs[-1].end if runs else times[-1]
        elapsed = job.account.elapsed_seconds if job.account else self.end - self.start
        self.gap = BREAK_SHARE * elapsed
        self.cuts = [
            (part.start, part.seconds)
            for part in parts
            if part.category == NOT_RUNNING and part.seconds > self.gap
        ]
        self.unit, self.size = _unit(elapsed)

    def at(self, seconds: float) -> float:
        """The position, in units of the axis."""
        cut = sum(
            min(max(seconds - start, 0.0), long) * (1 - self.gap / long)
            for start, long in self.cuts
        )
        return (seconds - self.start - cut) / self.size

    def draw(self, axis: Axes) -> None:
        """Label the axis, and mark what was cut."""
        for start, long in self.cuts:
            axis.axvspan(
                self.at(start), self.at(start + long), color="#e4e4e4", hatch="//", zorder=0
            )
        axis.set_xlim(0, 1.01 * self.at(self.end))
        axis.set_xlabel(f"time of the job ({self.unit})")


def _unit(seconds: float) -> tuple[str, float]:
    return next((unit for unit in UNITS_SECONDS if seconds >= 3 * unit[1]), UNITS_SECONDS[-1])


# --- goodput -------------------------------------------------------------------------------------


def time_of_runs(job: Job) -> Figure | None:
    """A bar of time for each run, from the failure before it on, and all shares in one bar."""
    if job.account is None:
        return None
    drawn = job.account.runs[-MAX_ROWS:]
    height = 0.6 + ROW_INCHES * len(drawn)
    figure, (runs, whole) = _new_figure(height + 1.9, height, 0.8)
    clock, seconds = _Clock(job), job.account.seconds
    elapsed = job.account.elapsed_seconds or 1.0
    for row, run in enumerate(drawn):
        for part in run.parts:
            if part.category != NOT_RUNNING:
                start = clock.at(part.start)
                width, colour = part.seconds / clock.size, CATEGORIES[part.category].colour
                runs.barh(row, width, left=start, color=colour, height=0.75)
    clock.draw(runs)
    runs.set_yticks(range(len(drawn)), [f"run {run.number}" for run in drawn])
    runs.invert_yaxis()
    at = 0.0
    shown = [name for name in CATEGORIES if seconds[name] > 0]
    for name in shown:
        share = 100 * seconds[name] / elapsed
        whole.barh(0, share, left=at, color=CATEGORIES[name].colour, height=0.75)
        if share >= 5:
            whole.text(at + share / 2, 0, f"{share:.0f} %", ha="center", va="center")
        at += share
    whole.set_xlim(0, 100)
    whole.set_yticks([0], ["all"])
    whole.set_xlabel(f"share of {time_text(elapsed)} (%)")
    _legend(figure, {CATEGORIES[name].title: CATEGORIES[name].colour for name in shown})
    return figure


def restarts(job: Job) -> Figure | None:
    """The parts of each restart after a failure, from the failure to the first step."""
    names = ("lost", *RESTART, "first_step")
    again = [run for run in job.account.runs if run.after_failure] if job.account else []
    if not again:
        return None
    again = again[-MAX_ROWS:]
    figure, (axis,) = _new_figure(1.5 + ROW_INCHES * len(again))
    shown = list[str]()
    for row, run in enumerate(again):
        at, seconds = 0.0, {**run.seconds, "lost": 0.0}
        for name in names:
            if seconds[name] > 0:
                colour = CATEGORIES[name].colour
                axis.barh(row, seconds[name], left=at, color=colour, height=0.75)
                at, shown = at + seconds[name], [*shown, name]
        axis.text(at, row, f" {time_text(at)}", va="center")
    axis.set_yticks(range(len(again)), [f"before run {run.number}" for run in again])
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_gid(SHARED_X)
    axis.set_xlabel("from the failure to the end of the first step (s)")
    _legend(figure, {CATEGORIES[n].title: CATEGORIES[n].colour for n in names if n in shown})
    return figure


# --- levels --------------------------------------------------------------------------------------


def _by_level(job: Job) -> dict[str, list[Copy]]:
    names = sorted({copy.level for copy in job.copies}, key=lambda name: RANK.get(name, 9))
    found = {name: [copy for copy in job.copies if copy.level == name] for name in names}
    return {name: copies[:: -(-len(copies) // MAX_POINTS)] for name, copies in found.items()}


def newest_versions(job: Job) -> Figure | None:
    """The newest version on each level over time; below it, versions that a level did not get."""
    if not job.copies:
        return None
    figure, (axis,) = _new_figure(3.2)
    clock, levels = _Clock(job), _by_level(job)
    for width, (name, copies) in zip((6, 4, 2.5, 1.2), levels.items(), strict=False):
        at = [clock.at(copy.at) for copy in copies]
        versions, colour = [copy.version for copy in copies], LEVEL_COLORS.get(name, "black")
        at, versions = [*at, clock.at(clock.end)], [*versions, versions[-1]]
        axis.step(at, versions, where="post", color=colour, linewidth=width, alpha=0.8)
    marks = []
    for kind, marker in (("skipped", "x"), ("failed", "D"), ("drifted", "s")):
        these = [event for event in job.incidents if event["name"] == kind][-MAX_POINTS:]
        if these:
            at = [clock.at(event["time_seconds"]) for event in these]
            versions = [event["version"] for event in these]
            marks += axis.plot(at, versions, marker, color="#d1495b", markersize=5, label=kind)
    clock.draw(axis)
    axis.set_ylabel("newest version (steps)")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(axis="y", linewidth=0.3)
    _legend(figure, {name: LEVEL_COLORS.get(name, "black") for name in levels}, marks)
    return figure


def costs(job: Job) -> Figure | None:
    """What each copy cost: in memory the stall and the copying, elsewhere the write."""
    if not any(copy.seconds > 0 for copy in job.copies):
        return None
    figure, (axis,) = _new_figure(3.2)
    clock = _Clock(job)
    lines = list[Any]()
    for name, copies in _by_level(job).items():
        colour = LEVEL_COLORS.get(name, "black")
        at = [clock.at(copy.at) for copy in copies]
        what = "stall of the training" if name == "memory" else "write, beside the training"
        spent = [copy.seconds or math.nan for copy in copies]
        lines += axis.plot(at, spent, "o", ms=3, color=colour, label=f"{name}: {what}")
        if any(copy.background_seconds for copy in copies):
            spent = [copy.background_seconds or math.nan for copy in copies]
            label = f"{name}: copy, beside the training"
            lines += axis.plot(at, spent, "+", ms=5, color=colour, alpha=0.6, label=label)
    clock.draw(axis)
    _log_times(axis, "time of the slowest rank")
    _legend(figure, {}, lines)
    return figure


# --- traces --------------------------------------------------------------------------------------


def allreduces(job: Job) -> Figure | None:
    """Mean, shortest and longest time of an allreduce by size, for the first ranks."""
    if job.timeline is None or not job.timeline.of("allreduce"):
        return None
    ranks = job.timeline.ranks()[:MAX_RANKS_DRAWN]
    found = {rank: [*size_buckets(job.timeline.communication(rank))] for rank in ranks}
    sizes = {b.upto_bytes: b.size for buckets in found.values() for b in buckets}
    figure, (axis,) = _new_figure(3.0)
    for place, buckets in enumerate(found.values()):
        at = [sorted(sizes).index(b.upto_bytes) + (place + 1) / (len(ranks) + 1) for b in buckets]
        times = [
            (b.latency.min_us / 1e6, b.latency.avg_us / 1e6, b.latency.max_us / 1e6)
            for b in buckets
        ]
        least, mean, most = ([*each] for each in zip(*times, strict=True))
        axis.vlines(at, least, most, color=RANK_COLORS[place], linewidth=3, alpha=0.4)
        axis.plot(at, mean, "o", color=RANK_COLORS[place])
    axis.set_xticks([n + 0.5 for n in range(len(sizes))], [sizes[size] for size in sorted(sizes)])
    axis.set_xlim(0, len(sizes))
    axis.set_xlabel("size of the message")
    _log_times(axis, "from launch to end")
    _legend(figure, {f"rank {rank}": RANK_COLORS[place] for place, rank in enumerate(ranks)})
    return figure


def one_step(job: Job) -> Figure | None:
    """A step of median duration: each layer's allreduce, with the layer's copies right below it."""
    if job.timeline is None:
        return None
    ranks = job.timeline.ranks()[:MAX_RANKS_DRAWN]
    try:
        version = typical_version(job.timeline, ranks)
        steps = [step_of(job.timeline, rank, version) for rank in ranks]
    except TimelineError:
        return None
    rows = rows_of_step([*chain.from_iterable(steps)])
    height = 0.4 + 0.2 * len(set(rows.values()))
    figure, axes = _new_figure(1.3 + height * len(ranks), *([height] * len(ranks)))
    ends = [max(s.end_us for s in step if s.kind != "update") - step[0].start_us for step in steps]
    for axis, rank, step in zip(axes, ranks, steps, strict=True):
        _draw_step(axis, step, rows)
        axis.set_title(f"rank {rank}, the step after v{version}", loc="left")
        axis.set_xlim(-0.02 * max(ends) / 1e3, 1.06 * max(ends) / 1e3)
    axes[-1].set_xlabel("time since the boundary (ms)")
    kinds = {span.kind for span in chain.from_iterable(steps)}
    _legend(figure, {name: colour for kind, (name, colour) in STEP_COLORS.items() if kind in kinds})
    return figure


def _draw_step(axis: Axes, step: Sequence[Span], rows: dict[str, str]) -> None:
    zero = step[0].start_us
    names = list(dict.fromkeys(rows.values()))
    for span in step:
        start, width, colour = (
            (span.start_us - zero) / 1e3,
            span.us / 1e3,
            STEP_COLORS[span.kind][1],
        )
        if span.kind in ("boundary", "barrier", "update"):
            axis.axvspan(start, start + width, color=colour, alpha=0.25, linewidth=0)
            if span.kind != "update":  # an update starts where the barrier ends
                axis.axvline(start, color=colour, linewidth=1.5)
            continue
        shift = -0.4 if span.kind == "allreduce" else 0.02
        waited = (span.latency_us - span.us) / 1e3
        for row in dict.fromkeys(rows[layer] for layer in span.layers):
            place = (names.index(row) + shift, 0.38)
            if waited > 0:
                axis.broken_barh([(start - waited, waited)], place, color=colour, alpha=0.3, lw=0)
            axis.broken_barh([(start, width)], place, color=colour, lw=0.3)
    axis.set_yticks(range(len(names)), [n if len(n) <= 28 else "…" + n[-27:] for n in names])
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(axis="x", linewidth=0.3)


# --- cores in use --------------------------------------------------------------------------------


def cores(job: Job) -> Figure | None:
    """Cores in use by the trainers and the agent of a node, and when a version was under way."""
    found = traced_usage(job)
    if not found:
        return None
    zero = found[0].at - found[0].seconds
    found = [each for each in found if each.at < zero + MAX_SECONDS]
    figure, (axis,) = _new_figure(3.2)
    edges = [each.at - zero for each in found]
    shades = versions_under_way(job)
    for name, intervals in shades.items():
        for start, end in intervals:
            left, right = max(start / 1e6 - zero, 0.0), min(end / 1e6 - zero, edges[-1])
            if left < right:
                axis.axvspan(left, right, color=SHADES[name], alpha=0.35, linewidth=0)
    trainers = [_trainers(each) for each in found]
    agent = [each.cores.get(AGENT_NAME, 0.0) for each in found]
    total = [sum(both) for both in zip(trainers, agent, strict=True)]
    axis.fill_between(edges, trainers, step="pre", color=TRAINERS, alpha=0.75, linewidth=0)
    axis.fill_between(edges, trainers, total, step="pre", color=AGENT, linewidth=0)
    axis.set_xlim(0, edges[-1])
    axis.set_ylim(0)
    axis.set_gid(SHARED_Y)
    axis.set_xlabel("time since the start of the trace (s)")
    axis.set_ylabel("cores in use")
    bands = {f"a version is {name}": SHADES[name] for name in shades}
    _legend(figure, {"trainers": TRAINERS, "agent": AGENT, **bands})
    return figure


def _trainers(usage: Usage) -> float:
    return sum(each for name, each in usage.cores.items() if name != AGENT_NAME)


def traced_usage(job: Job) -> list[Usage]:
    """The samples of the newest run that has some, during its traced steps."""
    if job.timeline is None or not job.usage:
        return []
    starts = [span.start_us for span in job.timeline.of("begin", rank=min(job.timeline.ranks()))]
    for start, until in zip(reversed(starts), [float("inf"), *reversed(starts)], strict=False):
        steps = [s for s in job.timeline.of("boundary", from_us=start) if s.start_us < until]
        if steps:
            first, last = steps[0].start_us / 1e6, max(step.end_us for step in steps) / 1e6
            found = [each for each in job.usage if first < each.at <= last]
            if len(found) > 1:
                return found
    return []


def versions_under_way(job: Job) -> dict[str, list[Interval]]:
    """When a version was under way, in microseconds of Unix time, by what was done with it."""
    assert job.timeline is not None
    copied, written = list[Interval](), list[Interval]()
    for rank in job.timeline.ranks():
        seals = {span.version: span.end_us for span in job.timeline.of("seal", rank=rank)}
        for span in job.timeline.of("boundary", rank=rank):
            if seals.get(span.version, 0) > span.start_us:
                copied.append((span.start_us, seals[span.version]))
        agent = job.timeline.of("write", "commit", rank=rank)
        written += [(span.start_us, span.end_us) for span in agent]
    both = {"copied to memory": union(copied), "written by the agent": union(written)}
    return {name: intervals for name, intervals in both.items() if intervals}


def mean_cores(job: Job) -> list[tuple[str, ...]]:
    """Mean cores in use with and without a version, titles first; empty without samples."""
    found = traced_usage(job)
    if not found:
        return []
    under_way = versions_under_way(job)
    covers = {f"a version is {name}": cover for name, cover in under_way.items()}
    busy = union(chain.from_iterable(under_way.values()))
    lines: list[tuple[str, ...]] = [
        ("while", "share of the time", "cores of the trainers", "of the agent")
    ]
    for text, cover in {**covers, "no version is under way": busy}.items():
        weights = []
        for each in found:
            whole = [(round(1e6 * (each.at - each.seconds)), round(1e6 * each.at))]
            inside = overlap(whole, cover)
            weights.append(inside if text in covers else length(whole) - inside)
        if total := sum(weights):
            both = zip(found, weights, strict=True)
            means = [(_trainers(u) * w, u.cores.get(AGENT_NAME, 0.0) * w) for u, w in both]
            trainers, agent = (sum(each) / total for each in zip(*means, strict=True))
            share = total / sum(1e6 * each.seconds for each in found)
            lines.append((text, f"{100 * share:.0f} %", f"{trainers:.2f}", f"{agent:.2f}"))
    return lines


def share_scales(figures: Sequence[Figure]) -> None:
    """Give the figures of several jobs common scales, where they are marked."""
    for number in (SHARED_X, SHARED_Y):
        axes = [axis for figure in figures for axis in figure.axes if axis.get_gid() == number]
        get, put = ("get_xlim", "set_xlim") if number == SHARED_X else ("get_ylim", "set_ylim")
        limits = [getattr(axis, get)() for axis in axes]
        for axis in axes:
            getattr(axis, put)(min(low for low, _ in limits), max(high for _, high in limits))


FONTS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "tierckpt",
    "text.parse_math": False,
}
NEW_LINE = "\n"
MAX_INCIDENTS = 40
MAX_RANKS = 16
Lines = Sequence[Sequence[str]]
"""A table, titles first."""
STYLE = """
body { font: 15px/1.45 Verdana, "DejaVu Sans", sans-serif; color: #222; margin: 2em auto;
       max-width: 62em; padding: 0 1em }
body.two { max-width: 110em }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; border-bottom: 1px solid #bbb; margin-top: 2em }
h3 { font-size: 1em; margin: 1.4em 0 .3em }
.jobs { display: grid; grid-template-columns: minmax(0, 1fr); gap: 2em }
.two .jobs { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr) }
figure { margin: .5em 0; break-inside: avoid }
figure svg { width: 100%; height: auto }
figcaption, .note { color: #555; font-size: .9em }
table { border-collapse: collapse; font-size: .87em; margin: .6em 0 }
th, td { padding: .15em .8em .15em 0; text-align: left; vertical-align: top }
th { font-weight: 600 } .head th { border-bottom: 1px solid #bbb }
.number { text-align: right; white-space: nowrap }
.wide { overflow-x: auto }
ul { list-style: none; margin: 0; padding-left: .6em; font-size: 14px; overflow-wrap: anywhere }
ul ul { border-left: 2px solid #4c78a8; margin-left: .5em }
li { padding: .12em 0 } ul ul > li::before { content: "─ "; color: #4c78a8; margin-left: -.6em }
summary { cursor: pointer; color: #225 }
.missing { background: #f4f4f4; padding: .8em 1em; color: #444 }
@media print { details::details-content { content-visibility: visible; height: auto }
  body { margin: 0; max-width: none; font-size: 11px } h2, h3 { break-after: avoid } }
"""


class Section(Struct, frozen=True):
    """A part of the page: for each job its figures, and what is below them."""

    title: str
    text: str
    draws: tuple[tuple[str, Draw], ...]
    """Title and drawing of each figure."""
    below: Callable[[Job], Iterable[str]]
    """HTML below the figures of a job."""
    lacks: Callable[[Job], str]
    """Why a job has nothing for this section, and what would help."""


def page(jobs: Sequence[Job]) -> tuple[str, int]:
    """The whole file, and the number of figures in it."""
    several, short = bool(jobs[1:]), {job.name for job in jobs}
    names = [job.name if len(short) == len(jobs) else job.path for job in jobs]
    titles = [f"<h3>{escape(name)}</h3>" if several else "" for name in names]
    width = HALF_INCHES if several else WIDTH_INCHES
    parts = [_beside(titles, [_overview(job) for job in jobs])]
    with rc_context({**FONTS, "figure.figsize": (width, 3)}):
        parts += [_section(section, jobs, titles) for section in SECTIONS]
    text = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<link rel="icon" href="data:,">'
        f"<title>Tierckpt: {escape(' and '.join(names))}</title><style>{STYLE}</style></head>\n"
        f'<body class="{"two" if several else "one"}">'
        f"<h1>Tierckpt: report of {escape(' and '.join(names))}</h1>\n"
        f'<p class="note">Made {time.strftime("%Y-%m-%d %H:%M:%S")} by tierckpt '
        f"{escape(__version__)}.</p>\n{NEW_LINE.join(parts)}\n</body></html>\n"
    )
    return text, text.count("<svg")


def _beside(titles: Sequence[str], parts: Sequence[str]) -> str:
    """What several jobs have, side by side."""
    cells = [f"<div>{each}{part}</div>" for each, part in zip(titles, parts, strict=True)]
    return f'<div class="jobs">{"".join(cells)}</div>'


def _section(section: Section, jobs: Sequence[Job], titles: Sequence[str]) -> str:
    html = [f"<section><h2>{section.title}</h2><p>{section.text}</p>"]
    drawn = [[draw(job) for job in jobs] for _, draw in section.draws]
    below = ["".join(section.below(job)) for job in jobs]
    lacks = {
        place: _missing(section.lacks(job))
        for place, job in enumerate(jobs)
        if not below[place] and not any(row[place] for row in drawn)
    }
    for (title, _), row in zip(section.draws, drawn, strict=True):
        share_scales([figure for figure in row if figure is not None])
        cells = [_figure(title, each) if each else _missing(f"{title}: none") for each in row]
        if any(row):
            html.append(_beside(titles, [lacks.pop(n, cell) for n, cell in enumerate(cells)]))
    below = [lacks.get(place, text) for place, text in enumerate(below)]
    html.append(_beside(titles, below) if any(below) else "")
    return "\n".join([*html, "</section>"])


def _missing(text: str) -> str:
    return f'<p class="missing">{escape(text)}</p>'


def _figure(title: str, figure: Figure) -> str:
    """A figure as SVG inside the page. Names that nothing refers to are left out, as those of
    several figures would be the same."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r' (width|height)="[^"]*pt"', "", svg, count=2)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    label = f'<svg role="img" aria-label="{escape(title)}"'
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{svg.replace('<svg', label, 1)}</figure>"
    )


def _table(lines: Lines, summary: str = "") -> str:
    """A table, folded below its `summary` if there is one."""
    if not lines[1:]:
        return ""
    numbers = {
        column
        for column in range(len(lines[0]))
        if all(re.match(r"^[-+~]?\d[^a-z]*$|^$|^[\d.]+ \w+$", line[column]) for line in lines[1:])
    }

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="number"' if n in numbers else "" for n in range(len(cells))]
        shown = zip(cells, kinds, strict=True)
        head = ' class="head"' if tag == "th" else ""
        return f"<tr{head}>{''.join(f'<{tag}{kind}>{escape(c)}</{tag}>' for c, kind in shown)}</tr>"

    rows = [row(lines[0], "th"), *(row(line, "td") for line in lines[1:])]
    table = f'<div class="wide"><table>{"".join(rows)}</table></div>'
    return f"<details><summary>{escape(summary)}</summary>{table}</details>" if summary else table


def _sentences(texts: Iterable[str]) -> Iterable[str]:
    return [f"<p>{escape(text)}</p>" for text in texts]


def _when(event: Record) -> str:
    return clock(event["time_seconds"], time.time())


# --- the parts -----------------------------------------------------------------------------------


def _overview(job: Job) -> str:
    lines: list[tuple[str, ...]] = [("folder", job.path)]
    view = job.view
    if view is not None:
        state = view.job
        lines.append(("state", f"{state.state} ({state.evidence})"))
        if state.restart is not None:
            levels = " and ".join(state.restart.levels)
            lines.append(("a restart takes", f"v{state.restart.version} from {levels}"))
    if job.account is not None:
        account = job.account
        lines += [
            ("goodput", f"{100 * account.goodput:.1f} % of {time_text(account.elapsed_seconds)}"),
            (
                "runs",
                f"{len(account.runs)}, the last one on {counted(account.runs[-1].world, 'rank')}",
            ),
            ("steps", f"{account.made_steps}, {account.lost_steps} of them made again"),
            ("failures", str(account.failures)),
        ]
    rows = "".join(f"<tr><th>{k}</th><td>{escape(value)}</td></tr>" for k, value in lines)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in dict.fromkeys(job.notes))
    return f"<table>{rows}</table>{notes}"


def _goodput(job: Job) -> Iterable[str]:
    if job.account is not None:
        yield from _sentences(conclusions(job.account))
        yield _table(category_lines(job.account), "The time by category")
        yield _table(run_lines(job.account), "The runs")


def _restarts(job: Job) -> Iterable[str]:
    lines: list[tuple[str, ...]] = [("restore", "at", "version", "from", "parts")]
    for number, event in enumerate(job.restores, 1):
        parts = [f"{name} {time_text(s)}" for name, s in event["seconds"].items() if s > 0]
        lines.append(
            (str(number), _when(event), f"v{event['version']}", event["level"], ", ".join(parts))
        )
    yield _table(lines)


def _history(job: Job) -> Iterable[str]:
    if job.history is not None and job.history.runs:
        yield f"<p>{escape(job_text(job.history))}</p>{_tree(branches_of(job.history, False))}"


def _tree(branches: Sequence[Branch]) -> str:
    lines = [f"<li>{escape(branch.text)}{_tree(branch.below)}</li>" for branch in branches]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _levels(job: Job) -> Iterable[str]:
    lines: list[tuple[str, ...]] = [
        ("level", "versions", "size", "cost, median", "longest", "skipped", "failed")
    ]
    for name in dict.fromkeys(copy.level for copy in job.copies):
        copies = [copy for copy in job.copies if copy.level == name]
        spent = sorted(copy.seconds for copy in copies)
        counts = [str(job.counts[f"{kind} on {name}"]) for kind in ("skipped", "failed")]
        times = [time_text(spent[len(spent) // 2]), time_text(spent[-1])]
        size = size_text(copies[-1].nbytes)
        lines.append((name, str(len(copies)), size, *times, *counts))
    yield _table(lines)


def _drift(job: Job) -> Iterable[str]:
    found = [event for event in job.incidents if event["name"] == "drifted"]
    suspects = job.view.job.suspects if job.view else {}
    lines: list[tuple[str, ...]] = [("version", "at", "finding")]
    for event in found[-MAX_INCIDENTS:]:
        lines.append((f"v{event['version']}", _when(event), event["message"]))
    yield _table(lines)
    yield _table([("suspect version", "reason"), *suspects.items()])
    if not (found or suspects) and not job.events_hint:
        yield from _sentences(["No difference between the replicas was reported."])


def _incidents(job: Job) -> Iterable[str]:
    found = [event for event in job.incidents if event["name"] != "drifted"]
    lines: list[tuple[str, ...]] = [("event", "level", "version", "at", "reason")]
    for event in found[-MAX_INCIDENTS:]:
        what = (
            event["name"],
            event["level"],
            f"v{event['version']}",
            _when(event),
            event["message"],
        )
        lines.append(what)
    yield _table(lines, f"The last {len(lines) - 1} of {len(found)} versions without a copy")


def _allreduces(job: Job) -> Iterable[str]:
    if job.timeline is None:
        return
    found = summarize(job.timeline)
    hidden = found.hidden
    if hidden.copy_us and found.buckets:
        share = 100 * hidden.share(hidden.communication_us)
        whole = 100 * hidden.share(hidden.computing_us)
        yield from _sentences(
            [
                f"{share:.0f} % of the copying was under an allreduce, and {whole:.0f} % between "
                "a boundary and the wait before the next update, where the training computes."
            ]
        )
    lines: list[tuple[str, ...]] = [
        ("rank", "size", "calls", "in all", "mean", "shortest", "longest")
    ]
    for rank in job.timeline.ranks()[:MAX_RANKS]:
        for bucket in size_buckets(job.timeline.communication(rank)):
            times = bucket.latency
            total = times.count * times.avg_us
            each = [time_text(us / 1e6) for us in (total, times.avg_us, times.min_us, times.max_us)]
            lines.append((str(rank), bucket.size, str(times.count), *each))
    yield _table(lines, "The allreduces of each rank by size")


def _cores(job: Job) -> Iterable[str]:
    yield _table(mean_cores(job))


def _lacks_events(job: Job) -> str:
    return job.events_hint or "The events have no such record yet."


def _lacks_allreduces(job: Job) -> str:
    return job.trace_hint or (
        "The trace has no allreduce. Under Horovod its own timeline has them: start the job with "
        "HOROVOD_TIMELINE=FILE, FILE being in the folder of trace_dir, with a name in .json. "
        "On a GPU, and in a job of one process, there are none."
    )


def _lacks_cores(job: Job) -> str:
    return job.trace_hint or (
        "The agent records the cores in use, from the first version on that goes to a level other "
        "than memory; a job with agent='inline' has no such record."
    )


def _lacks_history(job: Job) -> str:
    return f"{job.path} has no versions and no records of runs: give the job's path."


SECTIONS: tuple[Section, ...] = (
    Section(
        "Where the time went",
        "Only training that counted is goodput. A time without the job is cut short.",
        (("Time by run, and the shares of all", time_of_runs),),
        _goodput,
        _lacks_events,
    ),
    Section(
        "Restarts",
        "Each restart after a failure, with its parts, and what was restored.",
        (("Parts of each restart", restarts),),
        _restarts,
        lambda job: job.events_hint or "No run failed, and none restored a version.",
    ),
    Section(
        "History",
        "A run continues where another one ended, goes back to an older version, or is a fork.",
        (),
        _history,
        _lacks_history,
    ),
    Section(
        "Levels",
        "A failure costs the steps since the newest version on the level that survives it.",
        (
            ("Newest version on each level", newest_versions),
            ("Cost of each copy", costs),
        ),
        lambda job: [*_levels(job), *_incidents(job)],
        _lacks_events,
    ),
    Section(
        "Allreduces, and copies under them",
        "From the trace: the first steps of each run.",
        (
            ("Time of an allreduce by its size: mean, shortest and longest", allreduces),
            ("A step of median duration", one_step),
        ),
        _allreduces,
        _lacks_allreduces,
    ),
    Section(
        "Cores in use",
        "A sample every 50 ms, by the agent, during the traced steps. Loader workers are not "
        "counted.",
        (("Cores in use on the node of the first rank, for 20 s at most", cores),),
        _cores,
        _lacks_cores,
    ),
    Section(
        "Replicas",
        "Ranks compare the state that they share. Versions taken while it differed are suspect.",
        (),
        _drift,
        _lacks_events,
    ),
)
