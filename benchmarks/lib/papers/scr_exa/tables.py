"""SCR-Exa's experiment: one checkpoint an epoch, over ranks, DDP and Horovod.

An epoch has a few steps here. *Root checkpointing* writes to one shared parallel file system with
simulated bandwidth (`lib.methods.shared_store`); ours takes each version to memory, or to local
disk, or flushes one of ten. More ranks than the machine holds are simulated (`scale`). Then jobs
that are killed every ten epochs: as a whole (`cold`), or one of their nodes (`spares`). Their logs
are compared with that of an undisturbed job.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lib.files import SHARED_MEMORY, temporary
from lib.methods.registry import METHODS
from lib.methods.shared_store import BYTES_PER_SECOND, FLUSHED_OF
from lib.papers.frequency import Frequency, attached
from lib.papers.models import MODELS
from lib.papers.results import Row
from lib.papers.scr_exa import cold, scale, spares
from lib.papers.scr_exa.jobs import Plan
from lib.papers.scr_exa.savers import SAVERS
from lib.training.launchers import LAUNCHERS

EPOCH = 4
"""Steps of an epoch in jobs that are killed."""
BETWEEN = 10
"""Epochs between two failures, which come in the middle of an epoch."""
COLD_RESTARTS = 2
NODES, SPARES = 8, 4
OF_PARTS = {
    "epochs": ("root-shared", "ours-memory", "ours-local", "ours-flushed"),
    "restarts": ("root-shared", "ours-memory", "ours-local"),
    "spares": ("root-shared", "ours-xor"),
    "scale": ("root-shared", "ours-flushed"),
}
"""The methods of each part."""


def keys(options: argparse.Namespace) -> Iterator[Row]:
    """What identifies each row. Those of `scale` are simulated from the others."""
    for model in options.models:
        for launcher in options.launchers:
            jobs = [
                *(("epochs", int(w), int(e)) for e in options.epochs for w in options.worlds),
                ("restarts", 2, EPOCH),
                ("spares", 2 if options.toy else NODES, EPOCH),
                *(("scale", world, 0) for world in scale.WORLDS),
            ]
            for part, world, steps in jobs:
                if part not in options.parts or (part, launcher) == ("spares", "horovod"):
                    continue
                for method in OF_PARTS[part]:
                    if method in options.methods:
                        yield {
                            "model": model,
                            "part": part,
                            "launcher": launcher,
                            "world": world,
                            "method": method,
                            "epoch_steps": steps,
                        }


def missing(options: argparse.Namespace) -> list[str | None]:
    """Why the chosen rows cannot be measured here, besides models."""
    return [LAUNCHERS[launcher].missing() for launcher in options.launchers]


def measure(options: argparse.Namespace, key: Row) -> Row:
    """Measure a row."""
    part, model = key["part"], MODELS[key["model"]]
    titles = METHODS if part in ("epochs", "scale") else SAVERS
    about = {
        "title": model.title,
        "batch": model.shape,
        "method_title": titles[key["launcher"]][key["method"]].title,
    }
    how = {"epochs": _epochs, "restarts": _restarts, "spares": _spares, "scale": scale.simulated}
    return {**about, **how[part](options, key)}


def _epochs(options: argparse.Namespace, key: Row) -> Row:
    epochs = 2 if options.toy else FLUSHED_OF
    with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
        places = (_made(folder / "files"), memory)
        started = attached(
            *(key["method"], key["launcher"], key["model"], key["world"]), places, options.timeout
        )
        with started as (team, size):
            frequency = Frequency(team, options.rounds)
            frequency.at(1, rounds=1, checkpoints=2)
            found = frequency.at(key["epoch_steps"], checkpoints=epochs)
            return {"store_bytes_per_second": BYTES_PER_SECOND, "state_bytes": size, **found}


def _restarts(options: argparse.Namespace, key: Row) -> Row:
    failures = _failures(1 if options.toy else COLD_RESTARTS, options.toy)
    with _plan(options, key, failures) as plan:
        plan = replace(plan, killed_at=tuple(failures))
        return cold.measure(plan, key["method"] != "ours-memory", options.timeout)


def _spares(options: argparse.Namespace, key: Row) -> Row:
    count = 1 if options.toy else SPARES
    failures = _failures(count, options.toy)
    with _plan(options, key, failures) as plan:
        plan = replace(plan, held_at=tuple(failures))
        return spares.measure(plan, count, failures, options.timeout)


def _failures(count: int, toy: bool) -> list[int]:
    """The steps of the failures."""
    epochs = 2 if toy else BETWEEN
    return [number * epochs * EPOCH + EPOCH // 2 for number in range(1, count + 1)]


@contextmanager
def _plan(options: argparse.Namespace, key: Row, failures: list[int]) -> Iterator[Plan]:
    """A job that ends as many epochs after its last failure as lie between two."""
    steps = failures[-1] + failures[0] - EPOCH
    who = (key[name] for name in ("model", "launcher", "method", "world"))
    with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
        yield Plan(*who, steps, EPOCH, str(folder / "job"), str(memory / "job"))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
