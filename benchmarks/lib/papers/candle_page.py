"""The tables of NT3 and ResNet under Horovod from rows."""

from __future__ import annotations

from typing import Any

from lib.papers.page import table
from lib.papers.results import Row


def section(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    parts = []
    for row in (each for each in rows if each["part"] == "timeline"):
        parts += _timeline(row)
    workers = [row for row in rows if row["part"] == "workers"]
    if workers:
        parts += [
            "A checkpoint at every step, over workers; all share two cores. *Duration*: from the "
            "call to the end of the checkpoint, in memory or on the disk. *Overhead*: of a step; "
            "the range is that of visits, and what is below 0 is noise.",
            table([_HEAD, *map(_worker, sorted(workers, key=_order))]),
        ]
    return parts


_HEAD = ["model", "MB", "method", "workers", "step, s", "duration, s", "overhead, %", "taken"]


def _order(row: Row) -> tuple[str, str, int]:
    return row["model"], row["method"], row["world"]


def _worker(row: Row) -> list[str]:
    title = row["method_title"]
    title = f"**{title}**" if row["method"].startswith("ours") else title
    first = [row["title"], "-", title, f"{row['world']}"]
    if row["status"] != "ok":
        return [*first, row["status"].splitlines()[-1], "-", "-", "-"]
    first[1] = f"{row['state_bytes'] / 1e6:,.0f}"
    low, high = (100 * share for share in row["overhead_range"])
    done = row["durable_seconds"]
    return [
        *first,
        f"{row['step_seconds']:.2f}",
        "-" if done is None else f"{done:.2f}",
        f"{100 * row['overhead']:.1f} ({low:.1f} to {high:.1f})",
        f"{row['taken']} of {row['due']}",
    ]


def _timeline(row: Row) -> list[str]:
    gaps = row["gaps"]
    lines = [["bytes, up to", "count", "mean, ms", "least", "most", "of it moving, mean"]]
    for bucket in row["allreduces"]:
        latency, moving = bucket["latency"], bucket["moving"]
        lines.append(
            [
                f"{bucket['upto_bytes']:,}",
                f"{latency['count']}",
                f"{latency['avg_us'] / 1e3:.1f}",
                f"{latency['min_us'] / 1e3:.1f}",
                f"{latency['max_us'] / 1e3:.1f}",
                f"{moving['avg_us'] / 1e3:.1f}",
            ]
        )
    return [
        f"{row['title']} ({row['batch']} a rank), {row['world']} ranks, {row['steps']} traced "
        "steps with a version each: allreduces by message size, from the launch to the end.",
        table(lines),
        f"Gaps between updates of the weights: {gaps['avg_us'] / 1e3:,.0f} ms on average "
        f"({gaps['min_us'] / 1e3:,.0f} to {gaps['max_us'] / 1e3:,.0f}). Of the time of all copies, "
        f"{100 * row['hidden_in_gaps']:.0f} % lies in these gaps while the training computes, "
        f"{100 * row['hidden_in_communication']:.0f} % while an allreduce is in progress, "
        f"{100 * row['hidden_in_backward']:.0f} % during the backward pass as far as it is seen.",
    ]
