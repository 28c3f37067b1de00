"""The picture of a history: a line for each run, over the versions that it made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.errors import ConfigError

from .tree import JobNode, RunNode

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OWN, OTHER = "tab:blue", "tab:orange"
"""Colours of the job's own runs, and of those of its forks."""


def draw(job: JobNode, out: Path) -> None:
    """Draw the runs of a job and of its forks, each from the version that it began with. Raises
    ConfigError if matplotlib is missing, if there is nothing to draw, or if the file cannot be
    written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    if not job.runs:
        raise ConfigError(f"{job.path}: no run has left anything to draw")
    figure = Figure(figsize=(9, 1.2 + 0.32 * _count(job)))
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    _Lanes(axis).add(job.runs, None, 0, OWN)
    axis.invert_yaxis()
    axis.set_yticks([])
    axis.set_xlabel("version; blue: runs of the job, orange: forks, filled: on disk or in memory")
    axis.margins(x=0.08, y=0.25)
    figure.tight_layout()
    try:
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error


def _count(job: JobNode) -> int:
    runs = job.every_run()
    return len(runs) + sum(_count(f.job) if f.job else 1 for r in runs for f in r.forks)


class _Lanes:
    """Gives each run a line of its own."""

    def __init__(self, axis: Axes) -> None:
        self._axis, self._next = axis, 0

    def add(
        self, runs: list[RunNode], parent: int | None, begin: int, colour: str, fork: str = ""
    ) -> None:
        """Draw runs that began from a version of the run on the line `parent`; those of a fork
        began at `begin`."""
        for run in runs:
            lane, first = self._lane(), run.began.version if run.began else begin
            if parent is not None:
                self._axis.plot([first, first], [parent, lane], color="0.6", linewidth=1)
            self._axis.plot([first, max(run.newest, first)], [lane, lane], color=colour)
            there = [each.id.version for each in run.versions]
            self._axis.plot(there, [lane] * len(there), "o", color=colour, markersize=4)
            name = f"{fork}run {run.generation}"
            self._axis.annotate(name, (first, lane), (2, 3), textcoords="offset points", fontsize=7)
            for each in run.forks:
                self._add_fork(each.job, each.child.path, each.child.id.version, lane)
            self.add(run.runs, lane, first, colour, fork)

    def _add_fork(self, job: JobNode | None, path: str, version: int, parent: int) -> None:
        name = f"{Path(path).name or path}: "
        if job is not None and job.runs:
            begin = 0 if job.origin is not None and job.origin.parts else version
            self.add(job.runs, parent, begin, OTHER, name)
            return
        lane = self._lane()
        self._axis.plot([version, version], [parent, lane], color="0.6", linewidth=1)
        self._axis.annotate(name, (version, lane), (2, 3), textcoords="offset points", fontsize=7)

    def _lane(self) -> int:
        self._next += 1
        return self._next - 1


__all__ = ["draw"]
