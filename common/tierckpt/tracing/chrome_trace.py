"""Chrome's trace format: reads files of killed processes, too, and writes merged ones.

The format is the "Trace Event Format" of Chrome's trace viewer: a JSON array of entries, which may
lack its end, or (as written here) an object with the array as `traceEvents`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .recorder import row_names
from .spans import Span, Timeline, TimelineError
from .summary import lanes

Entry = dict[str, Any]

ROWS = ("training", "copier", "launches", "negotiate", "allreduce", "agent")
"""From top to bottom."""
PARALLEL = ("negotiate", "allreduce", "agent")
"""Rows with overlapping spans: each span gets the first free one of several rows."""


def read_entries(path: Path) -> Iterator[Entry]:
    """A file's entries in order, without an incomplete last one.

    Raises TimelineError if the file cannot be read, is not an array, or is damaged before its end.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise TimelineError(f"cannot read {path}: {error.strerror or error}") from error
    if not text.lstrip().startswith("["):
        raise TimelineError(f"{path} is not a trace: it does not start as a JSON array")
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in ", \t\r\n":
            at += 1
        if at == len(text) or text[at] == "]":
            return
        try:
            entry, at = decoder.raw_decode(text, at)
        except ValueError as error:
            if _ends_in(text, at):
                return
            raise TimelineError(f"{path} is damaged at character {at}: {error}") from error
        if not isinstance(entry, dict):
            raise TimelineError(
                f"{path} is not a trace: the entry before character {at} is {entry!r}"
            )
        yield entry


def _ends_in(text: str, at: int) -> bool:
    """True if the entry at this position is the last one, and only its end is missing."""
    depth, quoted, escaped = 0, False, False
    for position in range(at, len(text)):
        char = text[position]
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = quoted
        elif char == '"':
            quoted = not quoted
        elif not quoted:
            depth += (char in "{[") - (char in "}]")
            if depth <= 0:
                return False
    return True


def write(timeline: Timeline, path: Path) -> None:
    """Write one file for `about:tracing` and Perfetto: a process for each rank, with rows.

    Its time starts at zero; `otherData` has the real time of that. Raises TimelineError; the file
    is replaced completely or not at all.
    """
    zero = min((s.begin_us for s in timeline.of()), default=0)
    content = {
        "traceEvents": [e for rank in timeline.ranks() for e in _of_rank(timeline, rank, zero)],
        "displayTimeUnit": "ms",
        "otherData": {"begin_unix_us": str(zero), "notes": timeline.notes},
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, separators=(",", ":")))
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise TimelineError(f"cannot write {path}: {error.strerror or error}") from error


def _of_rank(timeline: Timeline, rank: int, zero: int) -> list[Entry]:
    spans = [s for s in timeline.of(rank=rank) if s.kind != "allreduce"]
    spans += timeline.communication(rank)
    names: list[str] = []
    entries: list[Entry] = []
    for row in ROWS:
        members = [s for s in spans if s.row == row]
        several = [(s.begin_us, s.end_us) for s in members] if row in PARALLEL else []
        chosen = lanes(several) or [0] * len(members)
        for span, lane in zip(members, chosen, strict=True):
            entries.append({"pid": rank, "tid": len(names) + lane, **_entry(span, zero)})
        names += [
            f"{row} {lane + 1}" if lane else row for lane in range(max(chosen, default=-1) + 1)
        ]
    return [*row_names(rank, f"rank {rank}", names), *entries]


def _entry(span: Span, zero: int) -> Entry:
    args: Entry = {"version": span.version, "bytes": span.nbytes, "layers": list(span.layers)}
    if span.launched_us is not None:
        args["launched"] = span.launched_us - zero
    shape = (
        {"ph": "X", "dur": span.us} if span.us or span.kind != "release" else {"ph": "i", "s": "t"}
    )
    return {"name": span.name, "cat": span.kind, "ts": span.begin_us - zero, **shape, "args": args}
