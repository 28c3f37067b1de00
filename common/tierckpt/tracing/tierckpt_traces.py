"""Tierckpt's own traces as spans; `tierckpt.tracing.recorder` describes their contents."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierckpt._text import in_words

from .chrome_trace import read_entries
from .recorder import ROW_NAMES
from .spans import Span, TimelineError


@dataclass(frozen=True)
class Recorded:
    """The contents of one rank's file."""

    spans: list[Span]
    reductions: Mapping[str, tuple[str, ...]] | None
    """Names of the reductions in Horovod's timeline, and the parameters of each, from the newest
    run that has the name. Empty: it has none of them; None: unknown."""


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
