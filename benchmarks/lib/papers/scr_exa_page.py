"""The tables of SCR-Exa's experiment from rows."""

from __future__ import annotations

from typing import Any

from lib.papers.page import table
from lib.papers.results import Row


def section(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    epochs = [row for row in rows if row["part"] == "epochs"]
    restarts = [row for row in rows if row["part"] == "restarts"]
    parts = []
    if epochs:
        worlds = sorted({row["world"] for row in epochs})
        store = epochs[0]["store_bytes_per_second"] / 1e6
        parts += [
            f"One checkpoint an epoch of {epochs[0]['epoch_steps']} steps: overhead in percent "
            "of the training, over ranks that share two cores (below 0 is noise). The shared file "
            f"system is simulated: a write there lasts as long as at {store:g} MB/s. Published: "
            f"under {published['overhead']} % for SCR, nearly constant in ranks, with real epochs.",
            table([_head(worlds), *_epochs(epochs, worlds)]),
        ]
    if restarts:
        parts += [
            "Restarts of two DDP ranks after a SIGKILL, from the disk: seconds to the next step "
            "(of it the load), and the largest difference of the loss from a job that was not "
            "killed.",
            table([["model", "method", "back, s", "difference"], *map(_restart, restarts)]),
        ]
    return parts


def _head(worlds: list[int]) -> list[str]:
    return ["model", "MB", "launcher", "method", *(f"{w} ranks" if w > 1 else "1" for w in worlds)]


def _epochs(rows: list[Row], worlds: list[int]) -> list[list[str]]:
    groups: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row in sorted(rows, key=lambda row: (row["model"], row["launcher"], row["method"])):
        key = (row["title"], row["launcher"], row["method_title"])
        groups.setdefault(key, {})[row["world"]] = row
    lines = []
    for (title, launcher, method), by in groups.items():
        size = next((r["state_bytes"] for r in by.values() if "state_bytes" in r), 0)
        bold = f"**{method}**" if method.startswith("ours") else method
        name = {"torchrun": "DDP", "horovod": "Horovod"}[launcher]
        cells = [_share(by[world]) if world in by else "-" for world in worlds]
        lines.append([title, f"{size / 1e6:,.0f}", name, bold, *cells])
    return lines


def _share(row: Row) -> str:
    return f"{100 * row['total_overhead']:.1f}" if row["status"] == "ok" else "failed"


def _restart(row: Row) -> list[str]:
    back = f"{row['back_seconds']:.2f} ({row['load_seconds']:.2f})"
    return [row["title"], row["method_title"], back, f"{row['loss_difference']:.3g}"]
