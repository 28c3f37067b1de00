"""The table of MLPerf Storage's checkpoint workload from rows."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from lib.papers.page import table
from lib.papers.results import Row

TITLES = {"ours-local": "**ours, to local**", "dlio-torch": "DLIO's `torch.save`"}
_HEAD = [
    "writer",
    "ranks",
    "MB",
    "write, s: mean",
    "median (range)",
    "GB/s",
    "read, s: mean",
    "median (range)",
    "GB/s",
]


def section(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    if not rows:
        return []
    ordered = sorted(rows, key=lambda row: (row["world"], row["method"] != "ours-local"))
    counts = sorted({len(row["write_seconds"]) for row in rows})
    factor = published["hidden_size"] // rows[0]["layout"]["hidden_size"]
    return [
        f"{' and '.join(map(str, counts))} checkpoints, written and fsync'ed, then read by another "
        "job after the files were dropped from the page cache; of each the slowest rank counts, by "
        "DLIO's clock, and GB/s are of the mean, as in the benchmark. The layout is that of the 8B "
        f"model of {published['gigabytes']} GB, every width divided by {factor}. Ours includes a "
        "checksum of all bytes, verified at the read, a copy in shared memory that survives the "
        "process, and an agreement of all ranks; its first write also starts the agent and uses "
        "its memory for the first time. DLIO's writer has none of these.",
        table([_HEAD, *map(_line, ordered)]),
    ]


def _line(row: Row) -> list[str]:
    size = row["state_bytes"]
    return [
        TITLES[row["method"]],
        f"{row['world']}",
        f"{size / 1e6:,.0f}",
        *_seconds(row["write_seconds"], size),
        *_seconds(row["read_seconds"], size),
    ]


def _seconds(values: list[float], size: int) -> list[str]:
    spread = f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    return [f"{mean(values):.2f}", spread, f"{size / mean(values) / 1e9:.2f}"]
