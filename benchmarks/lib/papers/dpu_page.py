"""The table of overlaps by message size from rows."""

from __future__ import annotations

from typing import Any

from lib.papers.page import table
from lib.papers.results import Row

_HEAD = [
    "scheme",
    "MB a node",
    "nodes",
    "one exchange, s",
    "computing, s",
    "both inline, s",
    "both with the agent, s",
    "overlap, % (range)",
    "bare sockets, %",
]


def section(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    ordered = sorted(rows, key=lambda row: (row["nodes"], row["message_bytes"]))
    return [
        "Overlap of redundancy with a training of two ranks, as the OSU benchmarks define it: "
        "1 - (both together - computing alone) / exchange alone. Nodes are network namespaces on "
        "this machine, with cables of 100 Mbit/s each way where it has them: the cores that train "
        "also encode for all nodes and shape the cables. *Inline*: without an agent, one after the "
        f"other. Published anchor: up to {published['overlap']} %, on processors of the network.",
        table([_HEAD, *map(_line, ordered)]),
    ]


def _line(row: Row) -> list[str]:
    low, high = (100 * share for share in row["overlap_range"])
    bare = row["bare_overlap"]
    return [
        row["method"],
        f"{row['message_bytes'] / 1e6:.1f}",
        f"{row['nodes']}",
        f"{row['once_seconds']:.2f}",
        f"{row['compute_seconds']:.1f}",
        f"{row['inline_seconds']:.1f}",
        f"{row['together_seconds']:.1f}",
        f"**{100 * row['overlap']:.0f}** ({low:.0f} to {high:.0f})",
        "-" if bare is None else f"{100 * bare:.0f}",
    ]
