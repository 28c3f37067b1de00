"""Horovod's timeline (`HOROVOD_TIMELINE`) as spans on our axis, and how far the clocks agree.

What is in the file, of Horovod 0.28, by experiment and from its `timeline.cc`: rank 0 writes it
for the job. Every tensor is a "process" with the tensor's name. Its life is `NEGOTIATE_ALLREDUCE`,
from when the first rank asks for it until the last one has, and then `ALLREDUCE`, with activities
inside and the tensor's type and shape at its end. Time stamps are microseconds of a monotonic clock
since Horovod's start, and the very first entry says when that was in Unix time; our traces count
the same way, so adding it is all.

A tensor's name is not that of a parameter: a group's tensors are all called after its first one and
numbered, without `named_parameters` they are called after their places in the optimizer, and a
sparse gradient is two allgathers. So our traces say which name stands for which parameters (see
`Trace.know`); without that, a name is at most stripped of its `allreduce.`.
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

from .chrome_trace import read_entries
from .recorder import label
from .spans import Span, Timeline, TimelineError

START = "start_time_since_epoch_in_micros"
REDUCTIONS = ("ALLREDUCE", "ADASUM")
SPARSE = "ALLGATHER"
"""What reduces a sparse gradient; gathers that no trace knows of are something else."""
AGREEMENT = "allreduce.tierckpt."
"""Of the checkpointers, which moves no gradients."""

TOLERATED_SHARE = 0.1
"""Of allreduces that are not found where they belong."""
ITEM_BYTES = {"16": 2, "32": 4, "64": 8}
"""By the digits at the end of the type's name; other types have one byte."""


Names = Mapping[str, Sequence[str]]
"""A tensor's name, and the parameters that it stands for."""


def read_horovod(path: Path, names: Names | None = None) -> list[Span]:
    """Reductions of gradients and their negotiations, in Unix time, as of rank 0, and no other
    collectives. `names` are those that the traces know.

    Raises TimelineError.
    """
    entries = list(read_entries(path))
    starts = [e["args"][START] for e in entries if START in e.get("args", ())]
    if not starts:
        raise TimelineError(
            f"{path} does not say when it began, so it is no timeline of Horovod 0.28 or newer; "
            "HOROVOD_TIMELINE=FILE makes one (on rank 0)"
        )
    try:
        return list(_spans(entries, starts[0], names or {}))
    except (KeyError, TypeError, ValueError) as error:
        raise TimelineError(f"{path} has an entry of a form unknown here: {error!r}") from error


def _spans(entries: Iterable[dict[str, Any]], start_us: int, known: Names) -> Iterator[Span]:
    """Beginnings and ends nest within a tensor, so a stack for each tells which belong together."""
    tensors: dict[int, str] = {}
    open_: dict[int, list[tuple[str, int]]] = {}
    launched: dict[int, int] = {}
    for entry in entries:
        pid, phase = entry.get("pid", -1), entry["ph"]
        if phase == "M" and "name" in entry["args"]:
            tensors[pid] = entry["args"]["name"]
        elif phase == "B":
            open_.setdefault(pid, []).append((entry["name"], start_us + entry["ts"]))
        elif phase == "E" and open_.get(pid):  # a barrier's end has no beginning
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
    """Of a tensor with a type like `float32` and a shape like `[512, 3]`; 0 when not told."""
    if "shape" not in args:
        return 0
    digits = re.search(r"\d+$", args["dtype"])
    items = prod(int(n) for n in re.findall(r"\d+", args["shape"]))
    return items * ITEM_BYTES.get(digits[0] if digits else "", 1)


@dataclass(frozen=True)
class ClockAgreement:
    """How the two clocks stand to each other, judged by what must come before what.

    A gradient is reduced after one update of the weights and before the next. An allreduce that is
    there bounds how far the clocks can be apart, as a message's way there and back does in
    Cristian's algorithm; one that is not shows that they are.
    """

    expected: int
    """Launches that lie between two updates, counted by layer."""
    missing: int
    """Of these, for how many there is no allreduce between the same two updates."""
    late_us: int
    """By so much the timeline's stamps may be too late: the shortest way from an update to an
    allreduce."""
    early_us: int
    """By so much they may be too early: the shortest way from an allreduce to the update."""
    delay_us: int
    """The median way from a launch to the allreduce. A launch is noted when it was made, at times
    too late, so this bounds nothing."""

    @property
    def plausible(self) -> bool:
        """False when more is missing than Horovod may have left out."""
        return self.missing <= self.expected * TOLERATED_SHARE

    def text(self) -> str:
        """One sentence for people."""
        if not self.expected:
            return "the traces have no launch between two updates, so clocks cannot be compared"
        return (
            f"{self.missing} of {self.expected} allreduces are not between the updates where they "
            f"belong; the others' stamps are at most {self.late_us / 1e3:.2f} ms late or "
            f"{self.early_us / 1e3:.2f} ms early, and they begin "
            f"{self.delay_us / 1e3:.2f} ms (median) after the launch was noted"
        )


def agreement(timeline: Timeline) -> ClockAgreement:
    """Compare rank 0's launches and updates with Horovod's allreduces."""
    # Horovod writes a timeline anew in every run, ours go on.
    life = max((s.begin_us for s in timeline.of("begin", rank=0)), default=0)
    updates = timeline.of("update", rank=0, from_us=life)
    begins = [s.begin_us for s in updates]
    of_layer: dict[str, list[Span]] = {}
    for span in timeline.of("allreduce", rank=0):
        for layer in span.layers:
            of_layer.setdefault(layer, []).append(span)
    late, early, delays, expected = [], [], [], 0
    for launch in timeline.of("release", rank=0, from_us=life):
        after = bisect_left(begins, launch.begin_us)
        if not 0 < after < len(updates):
            continue
        begin_us, end_us = updates[after - 1].end_us, begins[after]
        for layer in launch.layers:
            expected += 1
            known = of_layer.get(layer, [])
            for span in known[bisect_left(known, begin_us, key=_begin_us) :][:1]:
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
