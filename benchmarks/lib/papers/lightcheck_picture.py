"""The picture of LightCheck's tables: iterations between checkpoints, here and published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.papers.lightcheck import interval_of
from lib.papers.results import Row

BARS = {
    "ours-memory": ("Tierckpt, memory", "#1b7837"),
    "ours-local": ("Tierckpt, local disk", "#7fbf7b"),
    "checkfreq": ("CheckFreq, here", "#9970ab"),
    "torch-save": ("torch.save, here", "#999999"),
}
THERE = {
    0: ("LightCheck, published", "#2166ac"),
    3: ("its disk, published", "#92c5de"),
    4: ("CheckFreq, published", "#d6b3e6"),
    5: ("torch.save, published", "#cccccc"),
}


def draw(rows: list[Row], published: dict[str, Any], path: Path) -> None:
    """Draw the bars of all models with a measured interval."""
    from matplotlib.figure import Figure

    by = {
        (r["model"], r["method"]): interval_of(r["tried"], r["method"]).iterations
        for r in rows
        if "tried" in r
    }
    models = [name for name in published["models"] if any(model == name for model, _ in by)]
    figure = Figure(figsize=(10, 4), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / (len(BARS) + len(THERE))
    for place, (method, (label, color)) in enumerate(BARS.items()):
        found = [(x, by[name, method]) for x, name in enumerate(models) if (name, method) in by]
        if found:
            where = [x + place * width for x, _ in found]
            axis.bar(where, [count for _, count in found], width, label=label, color=color)
    for place, (column, (label, color)) in enumerate(THERE.items(), len(BARS)):
        values = [published["models"][name]["iterations"][column] for name in models]
        where = [x + place * width for x in range(len(models))]
        axis.bar(where, values, width, label=label, color=color, hatch="//", edgecolor="white")
    axis.set_yscale("log")
    axis.set_ylabel("iterations")
    titles = {row["model"]: row["title"] for row in rows}
    axis.set_xticks([x + 0.4 - width / 2 for x in range(len(models))])
    axis.set_xticklabels([titles[name] for name in models])
    axis.set_title("Iterations between checkpoints at 5 % overhead (fewer is better)")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    figure.savefig(path, dpi=110)
