"""The picture of a history: lines of runs over the versions that they made.

A run that goes on where the run before it ended is on the same line; one that went back, or lost
versions, begins a new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.errors import ConfigError

from .nodes import JobNode, RunNode

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OWN, OTHER = "tab:blue", "tab:orange"
"""Colours of the job's own runs, and of those of its forks."""
MOST_INCHES = 60.0
"""Height of a picture of very many lines, which are closer to each other then."""
MOST_NAMES = 12
"""Names of runs on one line."""


def draw(job: JobNode, out: Path) -> int:
    """Draw the runs of a job and of its forks, each from the version that it began with; returns
    their number. Raises ConfigError if matplotlib is missing, if there is nothing to draw, or if
    the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ConfigError(
            "drawing needs matplotlib, which is not installed: pip install 'tierckpt[plot]'"
        ) from error
    lanes = _Lanes()
    lanes.add(job.runs, None, 0, 0)
    if not lanes.count:
        hint = f"; {job.hint}" if job.hint else ""
        raise ConfigError(f"{job.path}: no run has left a version to draw{hint}")
    figure = Figure(figsize=(9, 1.4 + min(0.32 * lanes.count, MOST_INCHES)))
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    lanes.draw(axis)
    axis.set_ylim(lanes.count - 0.5, -0.7)  # room for the name above the first line
    axis.set_yticks([])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("version; blue: runs of the job, orange: forks, dots: on disk or in memory")
    axis.margins(x=0.08)
    figure.tight_layout()
    try:
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error
    return len(lanes.bars)


@dataclass
class _Bar:
    """One run, or a fork without runs."""

    lane: int
    first: int
    last: int
    there: list[int]
    name: str
    colour: str
    above: int | None
    """The lane of the run that it came from; None: it came from none."""
    source: int
    """The version there that it came from. With parts of it a job begins at 0."""


class _Lanes:
    """Gives runs their lines."""

    def __init__(self) -> None:
        """No runs yet."""
        self.count = 0
        self.bars: list[_Bar] = []
        self._ends: dict[int, int] = {}
        """The end of the last run on each lane."""

    def add(
        self,
        runs: list[RunNode],
        above: int | None,
        source: int,
        begin: int,
        job: str = "",
        colour: str = OWN,
    ) -> None:
        """Add runs that began from the run on the lane `above`, and all that came from them. Runs
        of a fork began at `begin`, from the version `source` of the run above."""
        left = [(run, above, begin) for run in reversed(runs)]
        while left:
            run, above, begin = left.pop()
            first = run.begun_at or begin
            if run.newest <= first and not (run.versions or run.runs or run.forks):
                continue  # a start that left nothing
            lane = above if run.began and above in self._ends else None
            if lane is None or first < self._ends[lane]:
                lane = self._new_lane()
            came_from = first if run.began else source
            bar = _Bar(lane, first, max(run.newest, first), [], "", colour, above, came_from)
            bar.there = [each.id.version for each in run.versions]
            bar.name = f"{job}run {run.generation}"
            self.bars.append(bar)
            self._ends[lane] = bar.last
            for each in run.forks:
                self._add_fork(each.job, each.child.path, each.child.id.version, lane)
            left += [(each, lane, first) for each in reversed(run.runs)]

    def _add_fork(self, job: JobNode | None, path: str, version: int, above: int) -> None:
        name = f"{Path(path).name or path}: "
        if job is not None and job.runs:
            begin = 0 if job.origin is not None and job.origin.parts else version
            self.add(job.runs, above, version, begin, name, OTHER)
        else:
            bar = _Bar(self._new_lane(), version, version, [], name, OTHER, above, version)
            self.bars.append(bar)

    def _new_lane(self) -> int:
        self.count += 1
        return self.count - 1

    def draw(self, axis: Axes) -> None:
        """Draw everything; of the names on one lane those that have room."""
        room = max(bar.last for bar in self.bars) / MOST_NAMES
        named: dict[int, float] = {}
        for bar in self.bars:
            if bar.above not in (None, bar.lane):
                ends = [bar.above, bar.lane]
                axis.plot([bar.source, bar.first], ends, color="0.6", linewidth=1, zorder=1)
            axis.plot([bar.first, bar.last], [bar.lane, bar.lane], color=bar.colour)
            axis.plot([bar.first], [bar.lane], "|", color=bar.colour, markersize=9)
            size = 4 if len(bar.there) < MOST_NAMES else 1.5
            lanes = [bar.lane] * len(bar.there)
            axis.plot(bar.there, lanes, "o", color=bar.colour, markersize=size)
            if bar.first >= named.get(bar.lane, bar.first):
                named[bar.lane] = bar.first + room
                at, by = (bar.first, bar.lane), (2, 4)
                axis.annotate(bar.name, at, by, textcoords="offset points", fontsize=7)


__all__ = ["draw"]
