"""Figures of one job, drawn with matplotlib. Without anything to draw a function returns None."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from tierckpt.agent.usage import AGENT as AGENT_NAME
from tierckpt.core.levels import RANK
from tierckpt.goodput.categories import CATEGORIES, NOT_RUNNING, RESTART
from tierckpt.tracing.spans import Span, TimelineError
from tierckpt.tracing.step import row_names, step_of, typical_version
from tierckpt.tracing.summary import Interval, length, overlap, size_buckets, union
from tierckpt.watch.drawing import span as time_text

from .sources import Copy, Job, Usage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES, HALF_INCHES, ROW_INCHES = 9.0, 6.2, 0.3
"""Width of a figure, of one beside another, and height of a row."""
MOST_ROWS = 40
"""Of more runs, the last ones are drawn."""
MOST_POINTS = 1500
"""Of more versions on a level, every second, third and so on is drawn."""
MOST_RANKS = 4
MOST_SECONDS = 20.0
"""Of the cores in use, this much is drawn."""
UNITS_SECONDS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0))
BREAK_SHARE = 0.02
"""Width of a time in which the job was not running, whatever its length."""
SHARED_X, SHARED_Y = "shared-x", "shared-y"
"""Ids of axes: jobs side by side have a scale in common."""
LEVELS = {"memory": "#4c78a8", "local": "#f58518", "peer": "#54a24b", "persistent": "#b279a2"}
STEP = {
    "boundary": ("boundary", "#54a24b"),
    "allreduce": ("allreduce (pale: until its data moves)", "#4c78a8"),
    "copy": ("copy", "#f58518"),
    "tree": ("copy of the rank's own state", "#eeca3b"),
    "barrier": ("barrier: wait for the last copies", "#e02020"),
    "update": ("update of the weights", "#9d9d9d"),
}
RANKS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
TRAINERS, AGENT = "#4c78a8", "#f58518"
SHADES = {"copied to memory": "#54a24b", "written by the agent": "#eeca3b"}
Draw = Callable[[Job], Figure | None]


def _figure(height: float, *rows: float) -> tuple[Figure, list[Axes]]:
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
        self.begin = runs[0].begin if runs else times[0]
        self.end = runs[-1].end if runs else times[-1]
        elapsed = job.account.elapsed_seconds if job.account else self.end - self.begin
        self.gap = BREAK_SHARE * elapsed
        self.cuts = [
            (part.begin, part.seconds)
            for part in parts
            if part.category == NOT_RUNNING and part.seconds > self.gap
        ]
        self.unit, self.size = _unit(elapsed)

    def at(self, seconds: float) -> float:
        """The position, in units of the axis."""
        cut = sum(
            min(max(seconds - begin, 0.0), long) * (1 - self.gap / long)
            for begin, long in self.cuts
        )
        return (seconds - self.begin - cut) / self.size

    def draw(self, axis: Axes) -> None:
        """Label the axis, and mark what was cut."""
        for begin, long in self.cuts:
            axis.axvspan(
                self.at(begin), self.at(begin + long), color="#e4e4e4", hatch="//", zorder=0
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
    drawn = job.account.runs[-MOST_ROWS:]
    height = 0.6 + ROW_INCHES * len(drawn)
    figure, (runs, whole) = _figure(height + 1.9, height, 0.8)
    clock, seconds = _Clock(job), job.account.seconds
    elapsed = job.account.elapsed_seconds or 1.0
    for row, run in enumerate(drawn):
        for part in run.parts:
            if part.category != NOT_RUNNING:
                begin = clock.at(part.begin)
                width, colour = part.seconds / clock.size, CATEGORIES[part.category].colour
                runs.barh(row, width, left=begin, color=colour, height=0.75)
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
    again = again[-MOST_ROWS:]
    figure, (axis,) = _figure(1.5 + ROW_INCHES * len(again))
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
    return {name: copies[:: -(-len(copies) // MOST_POINTS)] for name, copies in found.items()}


def newest_versions(job: Job) -> Figure | None:
    """The newest version on each level over time; below it, versions that a level did not get."""
    if not job.copies:
        return None
    figure, (axis,) = _figure(3.2)
    clock, levels = _Clock(job), _by_level(job)
    for width, (name, copies) in zip((6, 4, 2.5, 1.2), levels.items(), strict=False):
        at = [clock.at(copy.at) for copy in copies]
        versions, colour = [copy.version for copy in copies], LEVELS.get(name, "black")
        at, versions = [*at, clock.at(clock.end)], [*versions, versions[-1]]
        axis.step(at, versions, where="post", color=colour, linewidth=width, alpha=0.8)
    marks = []
    for kind, marker in (("skipped", "x"), ("failed", "D"), ("drifted", "s")):
        these = [event for event in job.incidents if event["name"] == kind][-MOST_POINTS:]
        if these:
            at = [clock.at(event["time_seconds"]) for event in these]
            versions = [event["version"] for event in these]
            marks += axis.plot(at, versions, marker, color="#d1495b", markersize=5, label=kind)
    clock.draw(axis)
    axis.set_ylabel("newest version (steps)")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(axis="y", linewidth=0.3)
    _legend(figure, {name: LEVELS.get(name, "black") for name in levels}, marks)
    return figure


def costs(job: Job) -> Figure | None:
    """What each copy cost: in memory the stall and the copying, elsewhere the write."""
    if not any(copy.seconds > 0 for copy in job.copies):
        return None
    figure, (axis,) = _figure(3.2)
    clock = _Clock(job)
    lines = list[Any]()
    for name, copies in _by_level(job).items():
        colour = LEVELS.get(name, "black")
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
    ranks = job.timeline.ranks()[:MOST_RANKS]
    found = {rank: [*size_buckets(job.timeline.communication(rank))] for rank in ranks}
    sizes = {b.upto_bytes: b.size for buckets in found.values() for b in buckets}
    figure, (axis,) = _figure(3.0)
    for place, buckets in enumerate(found.values()):
        at = [sorted(sizes).index(b.upto_bytes) + (place + 1) / (len(ranks) + 1) for b in buckets]
        times = [
            (b.latency.min_us / 1e6, b.latency.avg_us / 1e6, b.latency.max_us / 1e6)
            for b in buckets
        ]
        least, mean, most = ([*each] for each in zip(*times, strict=True))
        axis.vlines(at, least, most, color=RANKS[place], linewidth=3, alpha=0.4)
        axis.plot(at, mean, "o", color=RANKS[place])
    axis.set_xticks([n + 0.5 for n in range(len(sizes))], [sizes[size] for size in sorted(sizes)])
    axis.set_xlim(0, len(sizes))
    axis.set_xlabel("size of the message")
    _log_times(axis, "from launch to end")
    _legend(figure, {f"rank {rank}": RANKS[place] for place, rank in enumerate(ranks)})
    return figure


def one_step(job: Job) -> Figure | None:
    """A step of median duration: each layer's allreduce, with the layer's copies right below it."""
    if job.timeline is None:
        return None
    ranks = job.timeline.ranks()[:MOST_RANKS]
    try:
        version = typical_version(job.timeline, ranks)
        steps = [step_of(job.timeline, rank, version) for rank in ranks]
    except TimelineError:
        return None
    rows = row_names([*chain.from_iterable(steps)])
    height = 0.4 + 0.2 * len(set(rows.values()))
    figure, axes = _figure(1.3 + height * len(ranks), *([height] * len(ranks)))
    ends = [max(s.end_us for s in step if s.kind != "update") - step[0].begin_us for step in steps]
    for axis, rank, step in zip(axes, ranks, steps, strict=True):
        _draw_step(axis, step, rows)
        axis.set_title(f"rank {rank}, the step after v{version}", loc="left")
        axis.set_xlim(-0.02 * max(ends) / 1e3, 1.06 * max(ends) / 1e3)
    axes[-1].set_xlabel("time since the boundary (ms)")
    kinds = {span.kind for span in chain.from_iterable(steps)}
    _legend(figure, {name: colour for kind, (name, colour) in STEP.items() if kind in kinds})
    return figure


def _draw_step(axis: Axes, step: Sequence[Span], rows: dict[str, str]) -> None:
    zero = step[0].begin_us
    names = list(dict.fromkeys(rows.values()))
    for span in step:
        begin, width, colour = (span.begin_us - zero) / 1e3, span.us / 1e3, STEP[span.kind][1]
        if span.kind in ("boundary", "barrier", "update"):
            axis.axvspan(begin, begin + width, color=colour, alpha=0.25, linewidth=0)
            if span.kind != "update":  # an update begins where the barrier ends
                axis.axvline(begin, color=colour, linewidth=1.5)
            continue
        shift = -0.4 if span.kind == "allreduce" else 0.02
        waited = (span.latency_us - span.us) / 1e3
        for row in dict.fromkeys(rows[layer] for layer in span.layers):
            place = (names.index(row) + shift, 0.38)
            if waited > 0:
                axis.broken_barh([(begin - waited, waited)], place, color=colour, alpha=0.3, lw=0)
            axis.broken_barh([(begin, width)], place, color=colour, lw=0.3)
    axis.set_yticks(range(len(names)), [n if len(n) <= 28 else "…" + n[-27:] for n in names])
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(axis="x", linewidth=0.3)


# --- cores in use --------------------------------------------------------------------------------


def cores(job: Job) -> Figure | None:
    """Cores in use by the trainers and the agent of a node, and when a version was under way."""
    found = traced_usage(job)
    if not found:
        return None
    begin = found[0].at - found[0].seconds
    found = [each for each in found if each.at < begin + MOST_SECONDS]
    figure, (axis,) = _figure(3.2)
    edges = [each.at - begin for each in found]
    shades = versions_under_way(job)
    for name, intervals in shades.items():
        for start, end in intervals:
            left, right = max(start / 1e6 - begin, 0.0), min(end / 1e6 - begin, edges[-1])
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
    axis.set_xlabel("time since the begin of the trace (s)")
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
    begins = [span.begin_us for span in job.timeline.of("begin", rank=min(job.timeline.ranks()))]
    for begin, until in zip(reversed(begins), [float("inf"), *reversed(begins)], strict=False):
        steps = [s for s in job.timeline.of("boundary", from_us=begin) if s.begin_us < until]
        if steps:
            first, last = steps[0].begin_us / 1e6, max(step.end_us for step in steps) / 1e6
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
            if seals.get(span.version, 0) > span.begin_us:
                copied.append((span.begin_us, seals[span.version]))
        agent = job.timeline.of("write", "commit", rank=rank)
        written += [(span.begin_us, span.end_us) for span in agent]
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


__all__ = [
    "Draw",
    "allreduces",
    "cores",
    "costs",
    "mean_cores",
    "newest_versions",
    "one_step",
    "restarts",
    "share_scales",
    "time_of_runs",
]
