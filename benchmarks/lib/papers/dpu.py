"""Overlap of redundancy with computing, by message size, in the manner of the OSU benchmarks.

OSU's overlap for non-blocking collectives: 1 - (both together - computing alone) / communication
alone. The nodes, the training next to them and the measure are those of levels.py; here the shard
of a node has several sizes. *Inline* is the sum of both, as without an agent.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import mean, median

import levels
from lib.files import SHARED_MEMORY, temporary
from lib.levels.figures import Row as LevelRow
from lib.levels.nodes import Place
from lib.papers.results import Row

LINK_MBIT = 100


def keys(options: argparse.Namespace) -> Iterator[Row]:
    """What identifies each row: schemes by message size."""
    for size in options.sizes:
        for scheme in options.methods:
            yield {"scheme": scheme, "message_bytes": int(size) << 20}


def missing(options: argparse.Namespace) -> list[str | None]:
    """Why the chosen rows cannot be measured here."""
    return []


def measure(options: argparse.Namespace, key: Row) -> Row:
    """Measure a row."""
    with temporary(options.dir) as disk, temporary(SHARED_MEMORY) as memory:
        place = Place(disk, memory, str(disk / "persistent"))
        return _row(_level(options, key, place))


def _level(options: argparse.Namespace, key: Row, place: Place) -> LevelRow:
    chosen = argparse.Namespace(
        levels=[key["scheme"]],
        shard_mb=key["message_bytes"] >> 20,
        link_mbit=LINK_MBIT,
        model="toy" if options.toy else "linear",
        every=1,
        steps=4,
        timeout=options.timeout,
    )
    with ExitStack() as stack:
        bench = levels.Bench(chosen, place, stack)
        bench.calibrate()
        for _ in range(options.rounds):
            bench.round()
        (row,) = bench.rows.values()
        row.finish()
        return row


def _row(row: LevelRow) -> Row:
    alone = median(s.alone.span_s for s in row.samples)
    compute = median(s.compute_s for s in row.samples)
    together = median(s.overall_s for s in row.samples)
    assert row.overlap is not None
    return {
        "method": row.name,
        "nodes": row.nodes,
        "link_bits_per_second": LINK_MBIT * 1_000_000 if row.linked else 0,
        "once_seconds": median(mean(s.alone.seconds) for s in row.samples),
        "alone_seconds": alone,
        "compute_seconds": compute,
        "together_seconds": together,
        "inline_seconds": alone + compute,
        "overlap": row.overlap.median,
        "overlap_range": [row.overlap.low, row.overlap.high],
        "bare_overlap": row.bare_overlap.median if row.bare_overlap else None,
        "rounds": len(row.samples),
        "others_cores": median(s.others or 0.0 for s in row.samples),
    }
