"""A picture of simulated jobs: one bar for each, divided by the use of its time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tierckpt.errors import ConfigError

from .replicas import Study

COLOURS = {
    "training": "#4c9f70",
    "checkpoints": "#f2b134",
    "lost": "#d1495b",
    "noticed": "#7d8597",
    "nodes": "#5c677d",
    "restart": "#30638e",
    "recovery": "#30638e",
    "start": "#30638e",
}
LOADS = {"memory": "#b8d8f0", "local": "#85b8e0", "peer": "#5a9bd4", "persistent": "#a05195"}
OTHER = "#333333"
WIDTH_INCHES, ROW_INCHES, DPI = 9.0, 0.42, 110


def plot(studies: Mapping[str, Study], path: Path) -> None:
    """Draw the studies by name, the first one on top. The scale is cut so that the time that is no
    training fills the picture. Raises ConfigError if matplotlib is missing or the file cannot be
    written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'tierckpt[plot]'"
        ) from error
    size = (WIDTH_INCHES, 1.9 + ROW_INCHES * len(studies))
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    drawn: set[str] = set()
    for row, study in enumerate(studies.values()):
        at = 0.0
        for name, share in study.phase_shares.items():
            width = 100 * share.mean
            label = "" if name in drawn or width < 0.01 else name
            axis.barh(row, width, left=at, color=_colour(name), height=0.75, label=label or None)
            drawn |= {name} if label else set()
            at += width
    worst = min(100 * study.goodput.mean for study in studies.values())
    axis.set_xlim(max(0.0, worst - 0.25 * (100 - worst)), 100)
    axis.set_yticks(range(len(studies)), list(studies), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("% of the wall time (simulated)", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error


def _colour(name: str) -> str:
    if name.startswith("load "):
        return LOADS.get(name.removeprefix("load "), OTHER)
    return COLOURS.get(name, OTHER)
