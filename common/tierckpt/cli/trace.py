"""`tierckpt trace`: timelines of a job, merged or summarized."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tierckpt.tracing import traces
from tierckpt.tracing.timeline import (
    Hidden,
    SizeBucket,
    Stats,
    Summary,
    Timeline,
    TimelineError,
    summarize,
)
from tierckpt.tracing.traces import load

from .arguments import version_number


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt trace merge|summary`."""
    parser.description = (
        "Reads the traces that ranks wrote to trace_dir, and Horovod's timeline if there is one."
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    text = "write one file for Perfetto or about:tracing"
    merging = actions.add_parser("merge", help=text)
    merging.add_argument("out", type=Path, metavar="OUT.json")
    _add_inputs(merging)
    merging.set_defaults(run=merge_traces)

    text = "print latencies, gaps, and how much of the copying was hidden"
    summing = actions.add_parser("summary", help=text)
    text = "leave out all steps before version V, e.g. the first, slow ones"
    summing.add_argument("--from-version", type=version_number, metavar="V", help=text)
    _add_inputs(summing)
    summing.set_defaults(run=summarize_traces)


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    text = "trace-r*.json of all ranks, from the folder in trace_dir"
    parser.add_argument("--ours", type=Path, nargs="+", required=True, metavar="FILE", help=text)
    text = "the file in HOROVOD_TIMELINE, of the same run"
    parser.add_argument("--horovod", type=Path, metavar="FILE", help=text)


def merge_traces(args: argparse.Namespace, console: Console) -> None:
    """`tierckpt trace merge OUT`."""
    timeline = load(args.ours, args.horovod)
    traces.write(timeline, args.out)
    console.print(
        f"{args.out}: {len(timeline.of())} spans of {len(timeline.ranks())} rank(s); open it in "
        "Perfetto or about:tracing",
        soft_wrap=True,
    )
    _notes(timeline, console)


def summarize_traces(args: argparse.Namespace, console: Console) -> None:
    """`tierckpt trace summary`."""
    timeline = load(args.ours, args.horovod)
    if args.from_version is not None:
        timeline = since(timeline, args.from_version)
    found = summarize(timeline)
    console.print(f"{found.ranks} rank(s), {found.steps} step(s) each")
    for table in trace_tables(found):
        console.print(table)
    _notes(timeline, console)


def since(timeline: Timeline, version: int) -> Timeline:
    """The timeline from the boundary of `version` on. Raises TimelineError."""
    starts = [s.start_us for s in timeline.of("boundary") if s.version >= version]
    if not starts:
        raise TimelineError(f"no boundary of v{version} or later is in the traces")
    later = Timeline(timeline.notes)
    later.add(timeline.of(from_us=min(starts)))
    return later


def _notes(timeline: Timeline, console: Console) -> None:
    for note in timeline.notes:
        console.print(note, soft_wrap=True)


# --- tables --------------------------------------------------------------------------------------


def trace_tables(found: Summary) -> list[Table]:
    """The tables that `summary` prints."""
    return [
        *([_allreduces(found.buckets)] if found.buckets else []),
        _durations({"between weight updates": found.gaps, **found.durations}),
        _hidden(found.hidden),
    ]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table


def _cells(stats: Stats) -> list[str]:
    return [f"{us / 1e3:.3f}" for us in (stats.min_us, stats.avg_us, stats.max_us)]


def _allreduces(buckets: Sequence[SizeBucket]) -> Table:
    columns = ("size", "count", "min ms", "avg ms", "max ms", "data moving, avg ms")
    table = _table("Allreduces, from launch to end", *columns)
    for b in buckets:
        count = str(b.latency.count)
        table.add_row(b.size, count, *_cells(b.latency), f"{b.moving.avg_us / 1e3:.3f}")
    return table


def _durations(durations: dict[str, Stats]) -> Table:
    table = _table("Times", "span", "count", "min ms", "avg ms", "max ms")
    for name, stats in durations.items():
        if stats.count:
            table.add_row(name, str(stats.count), *_cells(stats))
    return table


def _hidden(found: Hidden) -> Table:
    table = _table("Copying, all ranks", "while", "ms", "share")
    parts = {
        "in all": found.copy_us,
        "hidden under allreduces": found.communication_us,
        "... while their data moves": found.moving_us,
        "hidden under backward, as far as seen": found.backward_us,
        "hidden, in all": found.computing_us,
    }
    for name, us in parts.items():
        table.add_row(name, f"{us / 1e3:.3f}", f"{100 * found.share(us):.1f} %")
    return table
