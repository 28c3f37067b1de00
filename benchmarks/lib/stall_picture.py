"""The picture of stall.py: every method, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PANELS = {
    "slowdown": ("training slowdown per checkpoint, ms", 1e3),
    "cpu": ("CPU-s per checkpoint", 1.0),
    "call": ("call, ms", 1e3),
    "durable": ("time to durable, ms", 1e3),
}


def plot(path: Path, document: dict[str, Any]) -> None:
    """Draw the picture from a results file."""
    from matplotlib.figure import Figure

    rows = [row for row in document["methods"] if row["status"] == "ok"][::-1]
    figure = Figure(figsize=(15, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for axis, (name, (title, scale)) in zip(axes, PANELS.items(), strict=True):
        for place, row in enumerate(rows):
            if found := row[name]:
                middle, low, high = (scale * found[key] for key in ("median", "low", "high"))
                color = "tab:orange" if row["name"].startswith("ours") else "tab:blue"
                axis.barh(place, middle, xerr=[[middle - low], [high - middle]], color=color)
        axis.set_yticks(range(len(rows)), [row["title"] for row in rows])
        axis.set_title(title, fontsize=10)
        axis.grid(axis="x", alpha=0.3)
    figure.suptitle(
        f"{document['model']}: {document['state_bytes'] / 1e6:.1f} MB of state, "
        f"{document['world']} ranks, a checkpoint every {document['every']} steps "
        "(median and range)",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)
