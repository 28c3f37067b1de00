"""Files of traces: Tierckpt's own and Horovod's timeline, as timelines on one axis.

The format is the "Trace Event Format" of Chrome's trace viewer: a JSON array of entries, which may
lack its end, or (as written here) an object with the array as `traceEvents`.

Files of killed processes can be read, too. `tierckpt.tracing.recorder` describes the contents of
Tierckpt's traces.

Horovod's timeline (`HOROVOD_TIMELINE`) also shows how well the clocks agree.

The contents of the file, for Horovod 0.28, by experiment and from its `timeline.cc`: rank 0 writes
it for the job. Every tensor is a "process" with the tensor's name. It has `NEGOTIATE_ALLREDUCE`,
from the first rank's request to the last one's, and then `ALLREDUCE`, with activities inside and
the tensor's type and shape at its end. Time stamps are microseconds of a monotonic clock since
Horovod's start, and the very first entry has the Unix time of that start; Tierckpt's traces count
the same way, so adding it is enough.

A tensor's name is not that of a parameter: a group's tensors have the name of the first one and a
number, without `named_parameters` they have their places in the optimizer, and a sparse gradient
is two allgathers. So Tierckpt's traces contain the parameters of each name (see `Trace.know`);
without that, only the prefix `allreduce.` is removed from a name.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tierckpt._text import error_text

from .recorder import ROW_NAMES, label, row_names
from .timeline import Span, Timeline, TimelineError, lanes

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
    zero = min((s.start_us for s in timeline.of()), default=0)
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
        several = [(s.start_us, s.end_us) for s in members] if row in PARALLEL else []
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
    return {"name": span.name, "cat": span.kind, "ts": span.start_us - zero, **shape, "args": args}


START = "start_time_since_epoch_in_micros"
REDUCTIONS = ("ALLREDUCE", "ADASUM")
SPARSE = "ALLGATHER"
"""The reduction of a sparse gradient; gathers that no trace names are something else."""
AGREEMENT = "allreduce.tierckpt."
"""Prefix of the checkpointers' own reductions, which move no gradients."""

TOLERATED_SHARE = 0.1
"""Tolerated share of allreduces that are not found in their place."""
ITEM_BYTES = {"16": 2, "32": 4, "64": 8}
"""Bytes by the digits at the end of the type's name; other types have one byte."""


Names = Mapping[str, Sequence[str]]
"""A tensor's name, and its parameters."""


def read_horovod(path: Path, names: Names | None = None) -> list[Span]:
    """Reductions of gradients and their negotiations in Unix time, as rank 0's; no other
    collectives. `names` are those in the traces.

    Raises TimelineError.
    """
    entries = list(read_entries(path))
    starts = [e["args"][START] for e in entries if START in e.get("args", ())]
    if not starts:
        raise TimelineError(
            f"{path} has no start time, so it is not a timeline of Horovod 0.28 or newer; "
            "HOROVOD_TIMELINE=FILE makes one (on rank 0)"
        )
    try:
        return list(_spans_of_horovod(entries, starts[0], names or {}))
    except (KeyError, TypeError, ValueError) as error:
        raise TimelineError(f"{path} has an entry of unknown form: {error_text(error)}") from error


def _spans_of_horovod(
    entries: Iterable[dict[str, Any]], zero_us: int, known: Names
) -> Iterator[Span]:
    """Pair starts and ends. They nest within a tensor, so each tensor has a stack."""
    tensors: dict[int, str] = {}
    open_: dict[int, list[tuple[str, int]]] = {}
    launched: dict[int, int] = {}
    for entry in entries:
        pid, phase = entry.get("pid", -1), entry["ph"]
        if phase == "M" and "name" in entry["args"]:
            tensors[pid] = entry["args"]["name"]
        elif phase == "B":
            open_.setdefault(pid, []).append((entry["name"], zero_us + entry["ts"]))
        elif phase == "E" and open_.get(pid):  # a barrier has an end and no start
            activity, start_us = open_[pid].pop()
            tensor, operation = tensors[pid], activity.removeprefix("NEGOTIATE_")
            if operation not in REDUCTIONS and not (operation == SPARSE and tensor in known):
                continue
            if tensor.startswith(AGREEMENT):
                continue
            layers = tuple(known.get(tensor, ())) or (tensor.removeprefix("allreduce."),)
            span = Span("", 0, start_us, zero_us + entry["ts"], label(layers), layers=layers)
            if operation != activity:
                launched[pid] = start_us
                yield replace(span, kind="negotiate", row="negotiate")
            elif not open_[pid]:
                yield replace(
                    span,
                    kind="allreduce",
                    row="allreduce",
                    nbytes=_nbytes(entry.get("args", {})),
                    launched_us=launched.pop(pid, None),
                )


def _nbytes(args: dict[str, str]) -> int:
    """Size of a tensor with a type like `float32` and a shape like `[512, 3]`; 0 if unknown."""
    if "shape" not in args:
        return 0
    digits = re.search(r"\d+$", args["dtype"])
    items = prod(int(n) for n in re.findall(r"\d+", args["shape"]))
    return items * ITEM_BYTES.get(digits[0] if digits else "", 1)


class ClockAgreement(Struct, frozen=True):
    """The agreement of two clocks, judged by the necessary order of events.

    A gradient is reduced after one update of the weights and before the next. An allreduce in its
    place bounds the distance of the clocks, as a message's round trip does in Cristian's algorithm;
    an allreduce out of place shows that they disagree.
    """

    expected: int
    """Launches between two updates, counted by layer."""
    missing: int
    """Number of these without an allreduce between the same two updates."""
    late_us: int
    """The timeline's stamps may be too late by this: the shortest time from an update to an
    allreduce."""
    early_us: int
    """They may be too early by this: the shortest time from an allreduce to the update."""
    delay_us: int
    """The median time from a launch to the allreduce. A launch is noted after it was made,
    sometimes too late, so this is not a bound."""

    @property
    def plausible(self) -> bool:
        """False if more are missing than Horovod may have left out."""
        return self.missing <= self.expected * TOLERATED_SHARE

    def text(self) -> str:
        """The agreement in one sentence."""
        if not self.expected:
            return "the traces have no launch between two updates, so clocks cannot be compared"
        return (
            f"{self.missing} of {self.expected} allreduces are not between their updates; the "
            f"stamps of the others are at most {self.late_us / 1e3:.2f} ms late or "
            f"{self.early_us / 1e3:.2f} ms early, and they start {self.delay_us / 1e3:.2f} ms "
            "(median) after the launch was noted"
        )


def agreement(timeline: Timeline) -> ClockAgreement:
    """Compare rank 0's launches and updates with Horovod's allreduces."""
    # Horovod writes a new timeline in every run; Tierckpt's trace is continued.
    run_us = max((s.start_us for s in timeline.of("begin", rank=0)), default=0)
    updates = timeline.of("update", rank=0, from_us=run_us)
    starts = [s.start_us for s in updates]
    of_layer: dict[str, list[Span]] = {}
    for span in timeline.of("allreduce", rank=0):
        for layer in span.layers:
            of_layer.setdefault(layer, []).append(span)
    late, early, delays, expected = [], [], [], 0
    for launch in timeline.of("release", rank=0, from_us=run_us):
        after = bisect_left(starts, launch.start_us)
        if not 0 < after < len(updates):
            continue
        start_us, end_us = updates[after - 1].end_us, starts[after]
        for layer in launch.layers:
            expected += 1
            reduced = of_layer.get(layer, [])
            for span in reduced[bisect_left(reduced, start_us, key=_start_us) :][:1]:
                if span.end_us <= end_us:
                    late.append(span.start_us - start_us)
                    early.append(end_us - span.end_us)
                    delays.append(span.start_us - launch.start_us)
    return ClockAgreement(
        expected=expected,
        missing=expected - len(delays),
        late_us=min(late, default=0),
        early_us=min(early, default=0),
        delay_us=int(median(delays)) if delays else 0,
    )


def _start_us(span: Span) -> int:
    return span.start_us


class Recorded(Struct, frozen=True):
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
    start, end = min(s.start_us for s in ours), max(s.end_us for s in ours)
    spans = read_horovod(path, reductions)
    found = [s for s in spans if s.start_us >= start and s.end_us <= end]
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
        raise TimelineError(f"{path} has an entry of unknown form: {error_text(error)}") from error


def _in_order(spans: list[Span]) -> Iterable[Span]:
    """End each allreduce before the update that needs it.

    A callback notes its end, and may have to wait for Python to run it.
    """
    updates = sorted(s.start_us for s in spans if s.kind == "update")
    for span in spans:
        if span.kind == "allreduce":
            for update_us in updates[bisect_left(updates, span.start_us) :][:1]:
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
            start_us=entry["ts"],
            end_us=entry["ts"] + entry.get("dur", 0),
            name=entry["name"],
            row=ROW_NAMES[entry["tid"]],
            version=args.get("version", -1),
            nbytes=args.get("bytes", 0),
            layers=tuple(args.get("layers", ())),
        )
