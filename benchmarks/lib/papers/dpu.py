"""Overlap of redundancy with computing, by message size, in the manner of the OSU benchmarks.

OSU's overlap for non-blocking collectives: 1 - (both together - computing alone) / communication
alone. The nodes, the training next to them and the measure are those of levels.py; here the shard
of a node has several sizes. *Inline* is the sum of both, as without an agent.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import mean, median
from typing import Any

import levels
from lib.figures import QUIET_CORES
from lib.files import SHARED_MEMORY, temporary
from lib.levels.figures import Row as LevelRow
from lib.levels.figures import Sample, Work
from lib.levels.nodes import LEVELS, Place
from lib.papers.results import FOLDER, Row
from lib.papers.rule import Judged, table, visits_text, word

CHOICES = {"methods": ("partner", "xor", "rs"), "sizes": ("1", "4", "16", "64")}
TOY = {"methods": ("partner",), "sizes": ("1",)}
KEY = ("scheme", "message_bytes")


def keys(options: argparse.Namespace) -> Iterator[Row]:
    """What identifies each row: schemes by message size."""
    for size in options.sizes:
        for scheme in options.methods:
            yield {"scheme": scheme, "message_bytes": int(size) << 20}


def measure(options: argparse.Namespace, key: Row) -> Row:
    """Measure a row."""
    with temporary(options.dir) as disk, temporary(SHARED_MEMORY) as memory:
        place = Place(disk, memory, str(disk / "persistent"))
        return _row(_level(options, key, place))


def _level(options: argparse.Namespace, key: Row, place: Place) -> LevelRow:
    model = "toy" if options.toy else "linear"
    (level,) = (each for each in LEVELS if each.name.startswith(key["scheme"]))
    with ExitStack() as stack:
        bench = levels.Bench(model, key["message_bytes"], [level], place, stack)
        bench.calibrate()
        for _ in range(options.rounds):
            bench.round()
        (row,) = bench.rows.values()
        return row


def _row(row: LevelRow) -> Row:
    alone = median(s.alone.span_s for s in row.samples)
    compute = median(s.compute_s for s in row.samples)
    together = median(s.overall_s for s in row.samples)
    overlap, bare = row.figures()["overlap"], row.figures()["bare_overlap"]
    return {
        "method": row.name,
        "nodes": row.nodes,
        "link_bits_per_second": levels.LINK_BITS_PER_SECOND if row.linked else 0,
        "once_seconds": median(mean(s.alone.seconds) for s in row.samples),
        "alone_seconds": alone,
        "compute_seconds": compute,
        "together_seconds": together,
        "inline_seconds": alone + compute,
        "overlap": overlap.median,
        "overlap_range": [overlap.low, overlap.high],
        "bare_overlap": bare.median if bare else None,
        "rounds": len(row.samples),
        "others_cores": median(s.others or 0.0 for s in row.samples),
    }


GOAL = 0.95
OF_LEVELS = FOLDER / "2026-11-25-levels-2-cores.json"
"""A run of levels.py, which is the same measurement with shards of 64 MiB."""
_HEAD = [
    "scheme",
    "MiB a node",
    "nodes",
    "exchange, s",
    "both, s (inline)",
    "overlap, %",
    "bare sockets, %",
]


def section(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    document = json.loads(OF_LEVELS.read_text())
    return [
        "Overlap of redundancy with a training of two ranks, as the OSU benchmarks define it, "
        "without their limits at 0 and 100: 1 - (both together - computing alone) / exchange "
        f"alone. There: up to {published['overlap']} %.",
        "There the network card exchanges an all-to-all; here the node's agent exchanges "
        "redundancy, and encodes it on the training's two cores. Nodes are namespaces of one "
        "machine, with cables of 100 Mbit/s. *Bare sockets*: the same bytes unencoded, the most "
        "that these cores allow.",
        table([_HEAD, *map(_line, _all(rows))]),
        f"64 MiB: [levels.py](../benchmarks/results/{OF_LEVELS.name}) on an {document['cpu']}; "
        f"load average {document['load_average'][0]:.1f} at its start. What other processes took "
        "is not known, so there is no verdict.",
    ]


def verdicts(rows: list[Row], published: dict[str, Any]) -> Iterator[Judged]:
    """The goal for each size and scheme."""
    cases = []
    for row in _all(rows):
        is_quiet = row.get("others_cores", QUIET_CORES + 1) <= QUIET_CORES
        found = word(row["overlap"] >= GOAL, row["rounds"]) if is_quiet else "not known"
        cases.append((f"{row['scheme']} {row['message_bytes'] >> 20} MiB", found))
    yield Judged(f"MVAPICH2-DPU: an overlap of at least {100 * GOAL:.0f} %", cases)


def _all(rows: list[Row]) -> list[Row]:
    known = {(row["scheme"], row["message_bytes"]) for row in rows}
    more = [row for row in _of_levels() if (row["scheme"], row["message_bytes"]) not in known]
    return sorted([*rows, *more], key=lambda row: (row["nodes"], row["message_bytes"]))


def _of_levels() -> Iterator[Row]:
    """Rows of levels.py, its overlaps again from the samples."""
    document = json.loads(OF_LEVELS.read_text())
    for level in document["levels"]:
        if not level["linked"]:
            continue
        samples = [
            Sample(**{**each, "alone": Work(**each["alone"]), "bare": Work(**each["bare"])})
            for each in level["samples"]
        ]
        overlaps = sorted(sample.overlap for sample in samples)
        alone = median(sample.alone.span_s for sample in samples)
        compute = median(sample.compute_s for sample in samples)
        yield {
            "scheme": level["name"].split(",")[0].split()[0],
            "method": level["name"],
            "nodes": level["nodes"],
            "message_bytes": document["shard_bytes"],
            "once_seconds": level["seconds"]["median"],
            "compute_seconds": compute,
            "inline_seconds": alone + compute,
            "together_seconds": median(sample.overall_s for sample in samples),
            "overlap": median(overlaps),
            "overlap_range": [overlaps[0], overlaps[-1]],
            "bare_overlap": median(sample.bare_overlap or 0.0 for sample in samples),
            "rounds": len(samples),
        }


def _line(row: Row) -> list[str]:
    low, high = (100 * share for share in row["overlap_range"])
    bare, count = row["bare_overlap"], row["rounds"]
    spread = f"{low:.0f} to {high:.0f}, " if count > 1 else ""
    return [
        row["method"].split(",")[0],
        f"{row['message_bytes'] >> 20}",
        f"{row['nodes']}",
        f"{row['once_seconds']:.2f}",
        f"{row['together_seconds']:.1f} ({row['inline_seconds']:.1f})",
        f"**{100 * row['overlap']:.0f}** ({spread}{visits_text(count)})",
        "-" if bare is None else f"{100 * bare:.0f}",
    ]
