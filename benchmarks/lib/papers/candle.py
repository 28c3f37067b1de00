"""CANDLE's NT3, and ResNet, under Horovod: a timeline of allreduces and copies, and the cost of
checkpoints over workers.

*Timeline*: Horovod's own and Tierckpt's, over workers and batch sizes, on one axis
(`tierckpt.tracing`): allreduces by message size, as DeepIntrospect lists them; gaps between updates
of the weights; the share of the copies hidden in them. *Workers*: duration of a checkpoint at every
step, and its cost, as DeepFreeze reports them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from msgspec import to_builtins

from lib.files import SHARED_MEMORY, temporary
from lib.jobs.plan import Plan
from lib.jobs.processes import JobError, Processes
from lib.methods.registry import METHODS
from lib.models import OF_PAPERS
from lib.papers.frequency import attached
from lib.papers.models import MODELS
from lib.papers.results import Row
from lib.papers.rule import Judged, cost_of, table
from lib.training.launchers import HorovodRanks
from tierckpt._text import counted
from tierckpt.cli.trace import load
from tierckpt.tracing.timeline import summarize

CHOICES = {
    "models": ("nt3", "resnet18"),
    "methods": ("ours-memory", "ours-local", "torch-save"),
    "parts": ("timeline", "workers"),
    "worlds": ("1", "2", "4"),
    "samples": ("1", "4", "20"),
}
TOY = {"models": ("nt3-toy",), "parts": ("timeline",), "worlds": ("2",), "samples": ("4",)}
KEY = ("model", "part", "method", "world", "samples")
STEPS = 8
"""Traced ones."""


def keys(options: argparse.Namespace) -> Iterator[Row]:
    """What identifies each row: timelines over workers and batches, costs over workers."""
    for model in options.models:
        own = str(MODELS[model].batch)
        for world in options.worlds:
            timelines = [("timeline", "ours-memory", each) for each in options.samples]
            costs = [("workers", method, own) for method in options.methods]
            for part, method, samples in [*timelines, *costs]:
                if part in options.parts and (part == "workers" or world != "1"):
                    yield {
                        "model": model,
                        "part": part,
                        "method": method,
                        "world": int(world),
                        "samples": int(samples),
                    }


def missing(options: argparse.Namespace) -> list[str | None]:
    """Why the chosen rows cannot be measured here."""
    return [HorovodRanks.missing()]


def measure(options: argparse.Namespace, key: Row) -> Row:
    """Measure a row."""
    model = MODELS[key["model"]]
    about = {"title": model.title, "method_title": METHODS["horovod"][key["method"]].title}
    if key["part"] == "timeline":
        return {**about, **_timeline(key)}
    who = (key["method"], key["model"], "horovod", key["world"])
    with attached(options, *who) as frequency:
        return {**about, **frequency.at(1)}


def _timeline(key: Row) -> Row:
    """Train some traced steps, and sum up both timelines."""
    with temporary(SHARED_MEMORY) as folder:
        places = (str(folder / "files"), str(folder / "memory"))
        model = OF_PAPERS + key["model"]
        plan = Plan(model, "ours-memory", key["world"], STEPS, 1, *places, launcher="horovod")
        timeline = folder / "horovod.json"
        with closing(Processes(replace(plan, batch=key["samples"]))) as job:
            job.environment["HOROVOD_TIMELINE"] = str(timeline)
            job.environment["TIERCKPT_TRACE_DIR"] = str(folder)
            job.start_ranks()
            if job.all[0].wait():
                raise JobError(job.last_words())
        found = summarize(load(sorted(folder.glob("trace-r*.json")), timeline))
    hidden = found.hidden
    return {
        "steps": found.steps,
        "allreduces": [to_builtins(bucket) for bucket in found.buckets],
        "gaps": to_builtins(found.gaps),
        "durations": {kind: to_builtins(stats) for kind, stats in found.durations.items()},
        "copy_us": hidden.copy_us,
        "hidden_in_communication": hidden.share(hidden.communication_us),
        "hidden_in_backward": hidden.share(hidden.backward_us),
        "hidden_in_gaps": hidden.share(hidden.computing_us),
    }


def section(rows: list[Row], published: dict[str, Any]) -> list[str]:
    """Paragraphs and tables."""
    parts = []
    for row in (each for each in rows if each["part"] == "timeline"):
        parts += _timeline_text(row)
    workers = [row for row in rows if row["part"] == "workers"]
    if workers:
        parts += [
            "A checkpoint at every step; all workers share two cores. *Duration*: from the call to "
            "the end of the checkpoint, in memory or on the disk.",
            table([_HEAD, *map(_worker, sorted(workers, key=_order))]),
        ]
    return parts


def verdicts(rows: list[Row], published: dict[str, Any]) -> Iterator[Judged]:
    """The goal of a version at each step, by the rule."""
    own = [r for r in rows if r["part"] == "workers" and r["method"].startswith("ours")]
    cases = [
        (f"{row['title']} {row['method_title'].split(', ')[-1]}, {row['world']}", cost_of(row))
        for row in sorted(own, key=_order)
    ]
    yield Judged(
        f"NT3: a version at each step, at most {100 * GOAL:.0f} %, by workers",
        [(name, cost.verdict(GOAL)) for name, cost in cases],
    )


GOAL = 0.05
_HEAD = ["model, MB", "method", "workers", "step, s", "duration, s", "cost, %"]


def _order(row: Row) -> tuple[str, str, int]:
    return row["model"], row["method"], row["world"]


def _worker(row: Row) -> list[str]:
    title = row["method_title"]
    title = f"**{title}**" if row["method"].startswith("ours") else title
    done = row["durable_seconds"]
    return [
        *(f"{row['title']}, {row['state_bytes'] / 1e6:,.0f}", title, f"{row['world']}"),
        f"{row['step_seconds']:.2f}",
        "-" if done is None else f"{done:.2f}",
        cost_of(row).text,
    ]


def _timeline_text(row: Row) -> list[str]:
    gaps = row["gaps"]
    lines = [["bytes, up to", "count", "mean, ms", "least", "most", "of it moving, mean"]]
    for bucket in row["allreduces"]:
        latency, moving = bucket["latency"], bucket["moving"]
        lines.append(
            [
                f"{bucket['upto_bytes']:,}",
                f"{latency['count']}",
                f"{latency['avg_us'] / 1e3:.1f}",
                f"{latency['min_us'] / 1e3:.1f}",
                f"{latency['max_us'] / 1e3:.1f}",
                f"{moving['avg_us'] / 1e3:.1f}",
            ]
        )
    return [
        f"{row['title']}, {counted(row['samples'], 'sample')} a rank, {row['world']} ranks, "
        f"{row['steps']} traced steps with a version each: allreduces by message size, from the "
        "launch to the end.",
        table(lines),
        f"Gaps between updates of the weights: {gaps['avg_us'] / 1e3:,.0f} ms on average "
        f"({gaps['min_us'] / 1e3:,.0f} to {gaps['max_us'] / 1e3:,.0f}). Of the time of all copies, "
        f"{100 * row['hidden_in_gaps']:.0f} % lies in these gaps while the training computes, "
        f"{100 * row['hidden_in_communication']:.0f} % during an allreduce, "
        f"{100 * row['hidden_in_backward']:.0f} % in the backward pass as far as it is seen.",
    ]
