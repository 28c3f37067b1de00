"""The table of MLPerf Storage's checkpoint workload from rows."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from lib.papers.page import Judged, table
from lib.papers.results import Row
from lib.papers.rule import word

TITLES = {"ours-local": "**Tierckpt, to local**", "dlio-torch": "DLIO's `torch.save`"}
_HEAD = ["writer", "ranks", "MB", "write, s (range)", "GB/s", "read, s (range)", "GB/s"]


def section(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    ordered = sorted(rows, key=lambda row: (row["world"], row["method"] != "ours-local"))
    counts = sorted({len(row["write_seconds"]) for row in rows})
    factor = published["hidden_size"] // rows[0]["layout"]["hidden_size"]
    return [
        f"{' and '.join(map(str, counts))} checkpoints of one run, fsync'ed, then read by another "
        "job with a cold cache; means of the slowest rank, by DLIO's clock. The layout is that of "
        f"the 8B model of {published['gigabytes']} GB, every width divided by {factor}. Only "
        "Tierckpt verifies a checksum, and keeps a copy in shared memory.",
        table([_HEAD, *map(_line, ordered)]),
    ]


def verdicts(rows: list[Row], published: dict[str, Any]) -> Iterator[Judged]:
    """The goal of at least the speed of DLIO's own writer, in one run each."""
    by = {row["method"]: row for row in rows}
    if TITLES.keys() <= by.keys():
        cases = [
            (kind, word(mean(by["ours-local"][name]) <= mean(by["dlio-torch"][name]), visits=1))
            for kind, name in (("write", "write_seconds"), ("read", "read_seconds"))
        ]
        yield Judged("MLPerf Storage: as fast as DLIO's own writer (one run)", cases)


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
    spread = f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    return [spread, f"{size / mean(values) / 1e9:.2f}"]
