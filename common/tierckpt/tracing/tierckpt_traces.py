"""Tierckpt's own traces as spans; `tierckpt.tracing.recorder` describes their contents."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierckpt._text import in_words

from .chrome_trace import read_entries
from .horovod_timeline import Names, agreement, read_horovod
from .recorder import ROW_NAMES
from .spans import Span, Timeline, TimelineError


@dataclass(frozen=True)
class Recorded:
    """The contents of one rank's file."""

    spans: list[Span]
    reductions: Mapping[str, tuple[str, ...]] | None
    """Names of the reductions in Horovod's timeline, and the parameters of each, from the newest
    run that has the name. Empty: it has none of them; None: unknown."""


def load(ours: Sequence[Path], horovod: Path | None) -> Timeline:
    """All files on one time axis, with notes on how well they fit. Raises TimelineError."""
    timeline = Timeline()
    writer: dict[int, Path] = {}
    recorded_names: list[Names] = []
    for path in ours:
        recorded = read_trace(path)
        rank = recorded.spans[0].rank
        if rank in writer:
            raise TimelineError(
                f"{writer[rank]} and {path} are both of rank {rank}; give the files of one job"
            )
        writer[rank] = path
        timeline.add(recorded.spans)
        recorded_names += [] if recorded.reductions is None else [recorded.reductions]
    if horovod is not None:
        if recorded_names and not any(recorded_names):
            raise TimelineError(
                f"{horovod} has no reductions of these ranks: Horovod's rank 0 writes only those "
                "of its own process set, and a job of one process has none"
            )
        _add_horovod(
            timeline,
            horovod,
            {n: layers for names in recorded_names for n, layers in names.items()},
        )
    return timeline


def _add_horovod(timeline: Timeline, path: Path, reductions: Names) -> None:
    """Add the part of Horovod's timeline that the traces cover: they may cover a part of the
    run."""
    ours = timeline.of()
    begin, end = min(s.begin_us for s in ours), max(s.end_us for s in ours)
    spans = read_horovod(path, reductions)
    found = [s for s in spans if s.begin_us >= begin and s.end_us <= end]
    if not found:
        raise TimelineError(
            f"{path} has no allreduce from the time that the traces cover; give files of one run"
        )
    timeline.add(found)
    fit = agreement(timeline)
    timeline.notes.append(f"Horovod: {fit.text()}")
    if not fit.plausible:
        timeline.notes.append(
            f"Warning: {path} and the traces contradict each other: they are from different runs, "
            "or a clock was set during the run"
        )


def read_trace(path: Path) -> Recorded:
    """One rank's file. Raises TimelineError when it is not one."""
    entries = list(read_entries(path))
    if not any(e.get("cat") == "begin" for e in entries):
        raise TimelineError(
            f"{path} is not a trace of a rank (trace-r00000.json and so on, in the folder of the "
            "setting trace_dir); give Horovod's timeline with --horovod"
        )
    try:
        return Recorded(list(_in_order(list(_spans(entries)))), _reductions(entries))
    except (KeyError, TypeError, IndexError) as error:
        raise TimelineError(f"{path} has an entry of unknown form: {in_words(error)}") from error


def _in_order(spans: list[Span]) -> Iterable[Span]:
    """End each allreduce before the update that needs it.

    A callback notes its end, and may have to wait for Python to run it.
    """
    updates = sorted(s.begin_us for s in spans if s.kind == "update")
    for span in spans:
        if span.kind == "allreduce":
            for update_us in updates[bisect_left(updates, span.begin_us) :][:1]:
                span = replace(span, end_us=min(span.end_us, update_us))
        yield span


def _reductions(entries: Iterable[dict[str, Any]]) -> dict[str, tuple[str, ...]] | None:
    runs = [e["args"]["reductions"] for e in entries if e.get("cat") == "names"]
    if not runs:
        return None
    return {name: tuple(layers) for names in runs for name, layers in names.items()}


def _spans(entries: Iterable[dict[str, Any]]) -> Iterable[Span]:
    for entry in entries:
        if entry["ph"] not in ("X", "i") or entry["cat"] == "names":
            continue
        args = entry["args"]
        yield Span(
            kind=entry["cat"],
            rank=entry["pid"],
            begin_us=entry["ts"],
            end_us=entry["ts"] + entry.get("dur", 0),
            name=entry["name"],
            row=ROW_NAMES[entry["tid"]],
            version=args.get("version", -1),
            nbytes=args.get("bytes", 0),
            layers=tuple(args.get("layers", ())),
        )
