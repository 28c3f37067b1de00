"""The picture of scale.py: goodput by ranks, and the simulator beside published figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.scale.steps import STEP_WAYS
from lib.scale.studies import WAYS

COLOURS = ("tab:gray", "tab:blue", "tab:green", "tab:orange")
STYLES = ("s--", "x-", "v:", "o-")


def plot(path: Path, document: dict[str, Any]) -> str:
    """Draw the picture; return a line for the terminal."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8.4))
    usual, often, ballots, checks = axes.flat
    for axis, factor in ((usual, 1.0), (often, 10.0)):
        _goodput(axis, [row for row in document["goodput"] if row["rate_factor"] == factor])
        times = "" if factor == 1 else f", {factor:g} times as many"
        axis.set_title(f"simulated: Llama 3's failures{times}", fontsize=10)
    _ballots(ballots, document["steps"])
    _checks(checks, document["lightcheck"])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return f"picture: {path}"


def _goodput(axis: Any, rows: list[dict[str, Any]]) -> None:
    for way, colour, style in zip(WAYS, COLOURS, STYLES, strict=True):
        own = [row for row in rows if row["way"] == way]
        axis.errorbar(
            [row["ranks"] for row in own],
            [100 * row["goodput"] for row in own],
            [100 * row["goodput_error"] for row in own],
            fmt=style,
            color=colour,
            label=way.replace("ours", "Tierckpt"),
        )
    axis.set_xscale("log", base=2)
    axis.set(xlabel="ranks", ylabel="goodput, % (simulated)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _ballots(axis: Any, rows: list[dict[str, Any]]) -> None:
    for (name, label), colour, style in zip(STEP_WAYS.items(), COLOURS[1:], STYLES, strict=False):
        points = [1e3 * row[f"{name}_seconds"] for row in rows]
        axis.plot([row["ranks"] for row in rows], points, style, color=colour, label=label)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="ranks", ylabel="ms (calculated)", yscale="log")
    axis.set_title("a ballot; the training waits only if a step is shorter", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _checks(axis: Any, points: list[dict[str, Any]]) -> None:
    """LightCheck's hours: the simulator over theirs."""
    own = [p for p in points if p["mtbf_hours"]]
    for name, marker, label in (
        ("simulated_hours", "o", "failures while training only, as in their formula"),
        ("with_failures_of_restarts_hours", "x", "failures also hit restarts"),
    ):
        axis.plot(
            [60 * p["mtbf_hours"] for p in own],
            [100 * (p[name] / p["published_hours"] - 1) for p in own],
            marker,
            label=label,
        )
    axis.set_xscale("log")
    axis.set(xlabel="minutes between failures", ylabel="simulated hours, % above published")
    axis.set_title("the simulator beside LightCheck's figures 5a and 5b", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
