"""The tables of LightCheck (ICCD 2023): how often can a job take checkpoints at 5 % overhead?

For each model and method: the fewest iterations between checkpoints at which they cost at most 5 %
by the rule (`lib.papers.rule`), and the cost there. One team of processes at a time, so that the
largest model fits into memory; its plain steps before and after the steps with checkpoints are the
comparison, so a drift of the machine cancels out. `resumption` measures the recovery, and compares
the curve of a resumed job.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from lib.files import SHARED_MEMORY, temporary
from lib.methods.checkfreq import tuned_interval
from lib.methods.registry import METHODS
from lib.papers.frequency import Frequency, attached
from lib.papers.models import MODELS
from lib.papers.results import Row
from lib.papers.resumption import Resumption
from lib.papers.rule import Interval, cost_of, interval

BUDGET = 0.05
"""LightCheck's allowed overhead."""
WORLD = 2
MAX_EVERY = 6
"""The longest measured interval; longer ones are computed."""
FIRST = {"torch-save": 3, "checkfreq": 3}
"""The first measured interval, if it is not 1."""


def keys(options: argparse.Namespace) -> Iterator[Row]:
    """What identifies each row of the chosen models and methods."""
    for model, method, part in product(options.models, options.methods, options.parts):
        yield {"model": model, "method": method, "part": part}


def missing(options: argparse.Namespace) -> list[str | None]:
    """Why the chosen rows cannot be measured here, besides models."""
    return []


def measure(options: argparse.Namespace, key: Row) -> Row:
    """Measure a row."""
    name, method = key["model"], key["method"]
    model = MODELS[name]
    about = {
        "title": model.title,
        "method_title": METHODS["torchrun"][method].title,
        "batch": model.shape,
        "world": WORLD,
    }
    with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
        if key["part"] == "recovery":
            return {**about, **_recovery(name, method, folder, memory)}
        return {**about, **_frequency(options, name, method, folder, memory)}


# --- how often, and at which overhead -------------------------------------------------------------


def _frequency(
    options: argparse.Namespace, name: str, method: str, folder: Path, memory: Path
) -> Row:
    files = folder / "files"
    files.mkdir()
    places = (files, memory)
    with attached(method, "torchrun", name, WORLD, places, options.timeout) as (team, state_bytes):
        return {"state_bytes": state_bytes, **shortest(Frequency(team, options.rounds), method)}


def shortest(frequency: Frequency, method: str) -> Row:
    """Try intervals until one keeps to the budget, by the rule.

    Ours starts at every iteration, the others at an interval that shows their cost. Where
    checkpoints are skipped, or wait for the previous one, or cost more than the budget, the next
    try is the interval in which one is finished. The page finds the interval again from `tried`.
    """
    every = FIRST.get(method, 1)
    frequency.at(1, rounds=1, checkpoints=2)  # warms up buffers, files and page tables
    tried = [frequency.at(every)]
    alone = min(MAX_EVERY, _until_done(tried[0]))
    first = cost_of(tried[0])
    crowded = first.taken < first.due or first.share > BUDGET
    if method != "torch-save" and crowded and alone > every:
        tried.append(frequency.at(alone))
        found = interval_of(tried, method).iterations
        if alone < found <= MAX_EVERY:
            tried.append(frequency.at(found))
    return {
        "step_seconds": tried[-1]["step_seconds"],
        "durable_seconds": tried[-1]["durable_seconds"],
        "tried": tried,
    }


def _until_done(tried: Row) -> int:
    """Steps until a checkpoint is finished, so that the next one need not wait."""
    seconds = tried["durable_seconds"]
    return math.ceil(seconds / tried["step_seconds"]) + 1 if seconds else MAX_EVERY


def interval_of(tried: Sequence[Row], method: str) -> Interval:
    """The fewest iterations within the budget. CheckFreq has a rule of its own besides."""
    last, own = tried[-1], 1
    if method == "checkfreq" and last["phases"]:
        parts, step = last["phases"], last["step_seconds"]
        own = tuned_interval(parts["snapshot"], parts["persist"], step, 0.0, BUDGET)
    return interval(tried, BUDGET, own)


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


__all__ = ["interval_of", "keys", "measure", "missing"]
