"""A picture of the account: one bar of time for each run, and all shares in one stacked bar."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.errors import ConfigError

from .account import Account
from .categories import CATEGORIES, NOT_RUNNING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES, ROW_INCHES, DPI = 9.0, 0.28, 110
MOST_ROWS = 60
"""Of more runs, the last ones are drawn."""
UNITS_SECONDS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0))
BREAK_SHARE = 0.02
"""Width of a time in which the job was not running, whatever its length."""


def plot(job: Account, path: Path) -> None:
    """Draw the account to a PNG, or to another form by the file's suffix. Raises ConfigError if
    matplotlib is missing or the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'tierckpt[plot]'"
        ) from error
    rows = min(len(job.runs), MOST_ROWS)
    figure = Figure(figsize=(WIDTH_INCHES, 2.3 + ROW_INCHES * rows), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    runs, whole = figure.subplots(2, 1, height_ratios=[0.6 + 0.3 * rows, 1.0])
    _draw_runs(runs, job)
    _draw_whole(whole, job)
    seconds = job.seconds
    shown = [name for name in CATEGORIES if seconds[name] > 0]
    handles = [_patch(name) for name in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error


def _patch(name: str) -> object:
    from matplotlib.patches import Patch

    return Patch(color=CATEGORIES[name].colour, label=CATEGORIES[name].title)


def _unit(seconds: float) -> tuple[str, float]:
    return next((unit for unit in UNITS_SECONDS if seconds >= 3 * unit[1]), UNITS_SECONDS[-1])


def _draw_runs(axis: Axes, job: Account) -> None:
    """One row for each run, from the failure before it on. A time without the job is cut short."""
    unit, size = _unit(job.elapsed_seconds)
    at, gap = 0.0, BREAK_SHARE * job.elapsed_seconds
    drawn = job.runs[-MOST_ROWS:]
    for row, run in enumerate(drawn):
        for part in run.parts:
            if part.category == NOT_RUNNING:
                axis.axvspan(at / size, (at + gap) / size, color="#eeeeee", hatch="//", zorder=0)
                at += gap
                continue
            colour = CATEGORIES[part.category].colour
            axis.barh(row, part.seconds / size, left=at / size, color=colour, height=0.75)
            at += part.seconds
    axis.set_yticks(range(len(drawn)), [f"run {run.number}" for run in drawn], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, at / size)
    axis.set_xlabel(f"{unit} of the job", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_whole(axis: Axes, job: Account) -> None:
    """All runs in one bar of shares."""
    at, seconds, elapsed = 0.0, job.seconds, job.elapsed_seconds or 1.0
    for name in CATEGORIES:
        share = 100 * seconds[name] / elapsed
        axis.barh(0, share, left=at, color=CATEGORIES[name].colour, height=0.75)
        if share >= 5:
            axis.text(at + share / 2, 0, f"{share:.0f} %", ha="center", va="center", fontsize=8)
        at += share
    axis.set_xlim(0, 100)
    axis.set_yticks([0], ["all"], fontsize=8)
    axis.set_xlabel(f"% of {_elapsed(elapsed)} (goodput {100 * job.goodput:.1f} %)", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _elapsed(seconds: float) -> str:
    unit, size = _unit(seconds)
    return f"{seconds / size:.3g} {unit}"


__all__: Sequence[str] = ("plot",)
