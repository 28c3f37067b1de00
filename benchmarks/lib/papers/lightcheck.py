"""The tables of LightCheck (ICCD 2023): how often can a job take checkpoints at 5 % overhead?

For each model and method: `cost`, the time that a checkpoint adds to the training; the fewest
iterations between checkpoints at which that is at most 5 %; the overhead there. One team of
processes at a time, so that the largest model fits into memory; its plain steps before and after
the steps with checkpoints are the comparison, so a drift of the machine cancels out.
`resumption` measures the recovery, and compares the curve of a resumed job.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from lib.files import SHARED_MEMORY, temporary
from lib.limits import Limits
from lib.methods.checkfreq import tuned_interval
from lib.methods.registry import METHODS
from lib.papers.frequency import Frequency, attached
from lib.papers.models import MODELS, present
from lib.papers.results import Row
from lib.papers.resumption import Resumption, ResumptionError
from lib.terminal import say
from lib.training.teams import TeamError

BUDGET = 0.05
"""LightCheck's: the overhead that is allowed."""
WORLD = 2
MOST_EVERY = 6
"""The longest interval that is measured; longer ones are computed."""
FIRST = {"torch-save": 3, "checkfreq": 3}
"""The first interval that is measured, if it is not 1."""
SAMPLE_BYTES = 256 << 20
"""Bytes of the bare copy and write at most."""


def measure(options: argparse.Namespace) -> Iterator[list[Row]]:
    """Measure the chosen models and methods; yields the rows of one model after another."""
    for name in present(options.models):
        for method in options.methods:
            for part in options.parts:
                say(f"{name}: {method}, {part}")
                yield [_row(options, name, method, part)]


def _row(options: argparse.Namespace, name: str, method: str, part: str) -> Row:
    model = MODELS[name]
    row: Row = {
        "model": name,
        "title": model.title,
        "method": method,
        "method_title": METHODS["torchrun"][method].title,
        "part": part,
        "batch": model.shape,
        "world": WORLD,
        "simulated": False,
        "status": "ok",
    }
    with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
        try:
            if part == "recovery":
                return {**row, **_recovery(name, method, folder, memory)}
            return {**row, **_frequency(options, name, method, folder, memory)}
        except (TeamError, ResumptionError) as error:
            return {**row, "status": f"failed: {error}"}


# --- how often, and at which overhead -------------------------------------------------------------


def _frequency(
    options: argparse.Namespace, name: str, method: str, folder: Path, memory: Path
) -> Row:
    files = folder / "files"
    files.mkdir()
    places = (files, memory)
    with attached(method, "torchrun", name, WORLD, places, options.timeout) as (team, state_bytes):
        found = shortest(Frequency(team, options.rounds), method)
    return {
        "state_bytes": state_bytes,
        **found,
        **bounds(state_bytes, folder, found["step_seconds"]),
    }


def shortest(frequency: Frequency, method: str) -> Row:
    """Find the fewest iterations between checkpoints at which the overhead is in the budget.

    Ours starts at every iteration, the others at an interval that shows their cost. Where
    checkpoints are skipped, or wait for the previous one, or cost more than the budget, the next
    try is the interval in which one is finished. `measured`: the overhead was measured at that
    interval, and not computed from the cost of a checkpoint at another one.
    """
    every = FIRST.get(method, 1)
    frequency.at(1, rounds=1, checkpoints=2)  # warms up buffers, files and page tables
    tried = [frequency.at(every)]
    alone = min(MOST_EVERY, _until_done(tried[0]))
    crowded = tried[0]["taken"] < tried[0]["due"] or tried[0]["overhead"] > BUDGET
    if method != "torch-save" and crowded and alone > every:
        tried.append(frequency.at(alone))
        found = iterations(tried[-1], method)
        if alone < found <= MOST_EVERY:
            tried.append(frequency.at(found))
    last = tried[-1]
    needed = iterations(last, method)
    least = needed if len(tried) == 1 else max(needed, last["every"])  # shorter ones were tried
    same = least == last["every"] and last["overhead"] <= BUDGET
    chosen = least if same or least != last["every"] else least + 1
    overhead = last["overhead"] if same else last["cost_seconds"] / (chosen * last["step_seconds"])
    return {
        "iterations": chosen,
        "overhead": overhead,
        "overhead_range": last["overhead_range"] if same else None,
        "measured": same,
        "step_seconds": last["step_seconds"],
        "cost_seconds": last["cost_seconds"],
        "durable_seconds": last["durable_seconds"],
        "cpu_share": last["cpu_share"],
        "tried": tried,
    }


def _until_done(tried: Row) -> int:
    """Steps until a checkpoint is finished, so that the next one need not wait."""
    seconds = tried["durable_seconds"]
    return math.ceil(seconds / tried["step_seconds"]) + 1 if seconds else MOST_EVERY


def iterations(tried: Row, method: str) -> int:
    """The fewest iterations at which a checkpoint of this cost is within the budget."""
    step = tried["step_seconds"]
    least = max(1, math.ceil(tried["cost_seconds"] / (BUDGET * step)))
    if tried["taken"] < tried["due"]:
        least = max(least, tried["every"] + 1)
    if method == "checkfreq" and tried["phases"]:
        own = tried["phases"]
        least = max(least, tuned_interval(own["snapshot"], own["persist"], step, 0.0, BUDGET))
    return least


def bounds(state_bytes: int, folder: Path, step: float) -> Row:
    """What the hardware allows: a rank's share of the copy, and the write of all, over a step."""
    limits = Limits(min(state_bytes, SAMPLE_BYTES), folder, "cpu", WORLD)
    limits.once()
    samples = [limits.once() for _ in range(3)]
    copy = limits.nbytes / median(each["copy"].wall_s for each in samples)
    write = limits.nbytes / median(each["write_recycled"].wall_s for each in samples)
    limits.path.unlink()
    return {
        "copy_bytes_per_second": copy,
        "write_bytes_per_second": write,
        "copy_of_step": state_bytes / WORLD / copy / step,
        "write_of_step": state_bytes / write / step,
    }


# --- recovery, and the curve after it -------------------------------------------------------------

RESUMED = {
    "ours-memory": "ours",
    "ours-local": "ours-disk",
    "checkfreq": "checkfreq",
    "torch-save": "torch-save",
}
"""The method of a killed job, see `lib.goodput.methods`."""


def _recovery(name: str, method: str, folder: Path, memory: Path) -> Row:
    """Kill a job, and compare it with one that was not killed."""
    job = Resumption(name, MODELS[name], RESUMED[method], folder / "resumed", memory / "resumed")
    return job.run(lose_memory=method == "ours-local")


__all__ = ["measure"]
