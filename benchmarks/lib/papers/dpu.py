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
from lib.terminal import say

LINK_MBIT = 100


def measure(options: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield the rows of one message size after another."""
    for size in map(int, options.sizes):
        say(f"{size} MiB a node")
        with temporary(options.dir) as disk, temporary(SHARED_MEMORY) as memory:
            place = Place(disk, memory, str(disk / "persistent"))
            yield [_row(row, size) for row in _levels(options, size, place)]


def _levels(options: argparse.Namespace, size: int, place: Place) -> list[LevelRow]:
    chosen = argparse.Namespace(
        levels=options.methods,
        shard_mb=size,
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
        for row in bench.rows.values():
            row.finish()
        return list(bench.rows.values())


def _row(row: LevelRow, size: int) -> Row:
    alone = median(s.alone.span_s for s in row.samples)
    compute = median(s.compute_s for s in row.samples)
    together = median(s.overall_s for s in row.samples)
    assert row.overlap is not None
    return {
        "method": row.name,
        "nodes": row.nodes,
        "message_bytes": size << 20,
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
        "simulated": False,
        "status": "ok",
    }
