"""The tables of NT3 and ResNet under Horovod from rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lib.papers.page import Judged, table
from lib.papers.results import Row
from lib.papers.rule import cost_of
from tierckpt._text import counted


def section(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    parts = []
    for row in (each for each in rows if each["part"] == "timeline"):
        parts += _timeline(row)
    workers = [row for row in rows if row["part"] == "workers"]
    if workers:
        parts += [
            "A checkpoint at every step; all workers share two cores. *Duration*: from the call to "
            "the end of the checkpoint, in memory or on the disk.",
            table([_HEAD, *map(_worker, sorted(workers, key=_order))]),
        ]
    return parts


def verdicts(rows: list[Row], published: dict[str, Any]) -> Iterator[Judged]:
    """The goal of a version at each step, by the rule."""
    own = [r for r in rows if r["part"] == "workers" and r["method"].startswith("ours")]
    cases = [
        (f"{row['title']} {row['method_title'].split(', ')[-1]}, {row['world']}", cost_of(row))
        for row in sorted(own, key=_order)
    ]
    yield Judged(
        f"NT3: a version at each step, at most {100 * GOAL:.0f} %, by workers",
        [(name, cost.verdict(GOAL)) for name, cost in cases],
    )


GOAL = 0.05
_HEAD = ["model, MB", "method", "workers", "step, s", "duration, s", "cost, %"]


def _order(row: Row) -> tuple[str, str, int]:
    return row["model"], row["method"], row["world"]


def _worker(row: Row) -> list[str]:
    title = row["method_title"]
    title = f"**{title}**" if row["method"].startswith("ours") else title
    done = row["durable_seconds"]
    return [
        *(f"{row['title']}, {row['state_bytes'] / 1e6:,.0f}", title, f"{row['world']}"),
        f"{row['step_seconds']:.2f}",
        "-" if done is None else f"{done:.2f}",
        cost_of(row).text,
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
        f"{row['title']}, {counted(row['samples'], 'sample')} a rank, {row['world']} ranks, "
        f"{row['steps']} traced steps with a version each: allreduces by message size, from the "
        "launch to the end.",
        table(lines),
        f"Gaps between updates of the weights: {gaps['avg_us'] / 1e3:,.0f} ms on average "
        f"({gaps['min_us'] / 1e3:,.0f} to {gaps['max_us'] / 1e3:,.0f}). Of the time of all copies, "
        f"{100 * row['hidden_in_gaps']:.0f} % lies in these gaps while the training computes, "
        f"{100 * row['hidden_in_communication']:.0f} % during an allreduce, "
        f"{100 * row['hidden_in_backward']:.0f} % in the backward pass as far as it is seen.",
    ]
