"""Horovod's timeline (`HOROVOD_TIMELINE`) as spans on the same axis; the agreement of clocks.

The contents of the file, for Horovod 0.28, by experiment and from its `timeline.cc`: rank 0 writes
it for the job. Every tensor is a "process" with the tensor's name. It has `NEGOTIATE_ALLREDUCE`,
from the first rank's request to the last one's, and then `ALLREDUCE`, with activities inside and
the tensor's type and shape at its end. Time stamps are microseconds of a monotonic clock since
Horovod's start, and the very first entry has the Unix time of that start; Tierckpt's traces count
the same way, so adding it is enough.

A tensor's name is not that of a parameter: a group's tensors have the name of the first one and a
number, without `named_parameters` they have their places in the optimizer, and a sparse gradient is
two allgathers. So Tierckpt's traces contain the parameters of each name (see `Trace.know`); without
that, only the prefix `allreduce.` is removed from a name.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from tierckpt._text import in_words

from .chrome_trace import read_entries
from .recorder import label
from .spans import Span, Timeline, TimelineError

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
        return list(_spans(entries, starts[0], names or {}))
    except (KeyError, TypeError, ValueError) as error:
        raise TimelineError(f"{path} has an entry of unknown form: {in_words(error)}") from error


def _spans(entries: Iterable[dict[str, Any]], start_us: int, known: Names) -> Iterator[Span]:
    """Pair starts and ends. They nest within a tensor, so each tensor has a stack."""
    tensors: dict[int, str] = {}
    open_: dict[int, list[tuple[str, int]]] = {}
    launched: dict[int, int] = {}
    for entry in entries:
        pid, phase = entry.get("pid", -1), entry["ph"]
        if phase == "M" and "name" in entry["args"]:
            tensors[pid] = entry["args"]["name"]
        elif phase == "B":
            open_.setdefault(pid, []).append((entry["name"], start_us + entry["ts"]))
        elif phase == "E" and open_.get(pid):  # a barrier has an end and no start
            activity, begin_us = open_[pid].pop()
            tensor, operation = tensors[pid], activity.removeprefix("NEGOTIATE_")
            if operation not in REDUCTIONS and not (operation == SPARSE and tensor in known):
                continue
            if tensor.startswith(AGREEMENT):
                continue
            layers = tuple(known.get(tensor, ())) or (tensor.removeprefix("allreduce."),)
            span = Span("", 0, begin_us, start_us + entry["ts"], label(layers), layers=layers)
            if operation != activity:
                launched[pid] = begin_us
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


@dataclass(frozen=True)
class ClockAgreement:
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
            f"{self.early_us / 1e3:.2f} ms early, and they begin {self.delay_us / 1e3:.2f} ms "
            "(median) after the launch was noted"
        )


def agreement(timeline: Timeline) -> ClockAgreement:
    """Compare rank 0's launches and updates with Horovod's allreduces."""
    # Horovod writes a new timeline in every run; Tierckpt's trace is continued.
    run_us = max((s.begin_us for s in timeline.of("begin", rank=0)), default=0)
    updates = timeline.of("update", rank=0, from_us=run_us)
    begins = [s.begin_us for s in updates]
    of_layer: dict[str, list[Span]] = {}
    for span in timeline.of("allreduce", rank=0):
        for layer in span.layers:
            of_layer.setdefault(layer, []).append(span)
    late, early, delays, expected = [], [], [], 0
    for launch in timeline.of("release", rank=0, from_us=run_us):
        after = bisect_left(begins, launch.begin_us)
        if not 0 < after < len(updates):
            continue
        begin_us, end_us = updates[after - 1].end_us, begins[after]
        for layer in launch.layers:
            expected += 1
            reduced = of_layer.get(layer, [])
            for span in reduced[bisect_left(reduced, begin_us, key=_begin_us) :][:1]:
                if span.end_us <= end_us:
                    late.append(span.begin_us - begin_us)
                    early.append(end_us - span.end_us)
                    delays.append(span.begin_us - launch.begin_us)
    return ClockAgreement(
        expected=expected,
        missing=expected - len(delays),
        late_us=min(late, default=0),
        early_us=min(early, default=0),
        delay_us=int(median(delays)) if delays else 0,
    )


def _begin_us(span: Span) -> int:
    return span.begin_us
