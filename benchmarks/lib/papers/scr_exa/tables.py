"""SCR-Exa's experiment: one checkpoint an epoch, over ranks, DDP and Horovod.

An epoch has a few steps here. *Root checkpointing* writes to one shared parallel file system, whose
bandwidth is simulated (`lib.methods.shared_store`); ours takes each version to memory, or to local
disk, or flushes one of ten. Then jobs that are killed every ten epochs: as a whole (`cold`), or one
of their nodes (`spares`). Their logs are compared with that of an undisturbed job.
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
from lib.papers.models import MODELS, present
from lib.papers.results import Row
from lib.papers.scr_exa import cold, spares
from lib.papers.scr_exa.jobs import JobError, Plan
from lib.papers.scr_exa.savers import SAVERS
from lib.terminal import say
from lib.training.launchers import LAUNCHERS
from lib.training.teams import TeamError
from tierckpt.testing.network import NoNetworkError

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
}
"""The methods of each part."""


def measure(options: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield finished rows."""
    chosen = {
        part: [m for m in options.methods if m in methods] if part in options.parts else []
        for part, methods in OF_PARTS.items()
    }
    for name in present(options.models):
        for launcher in options.launchers:
            if LAUNCHERS[launcher].missing():
                say(f"{launcher}: {LAUNCHERS[launcher].missing()}")
                continue
            for world in map(int, options.worlds):
                for method in chosen["epochs"]:
                    say(f"{name}: {launcher}, {world} ranks, {method}")
                    yield [_epochs(options, name, launcher, world, method)]
            for method in chosen["restarts"]:
                say(f"{name}: {launcher}, cold restarts, {method}")
                yield [_restarts(options, name, launcher, method)]
        for method in chosen["spares"]:
            say(f"{name}: lost nodes, {method}")
            yield [_spares(options, name, method)]


def _about(name: str, part: str, launcher: str, world: int, method: str) -> Row:
    model = MODELS[name]
    return {
        "model": name,
        "title": model.title,
        "batch": model.shape,
        "part": part,
        "launcher": launcher,
        "world": world,
        "method": method,
        "epoch_steps": EPOCH,
        "simulated": False,
        "status": "ok",
    }


def _epochs(options: argparse.Namespace, name: str, launcher: str, world: int, method: str) -> Row:
    row = _about(name, "epochs", launcher, world, method)
    row["method_title"] = METHODS[launcher][method].title
    row["epoch_steps"] = options.epoch
    row["store_bytes_per_second"] = BYTES_PER_SECOND
    epochs = 2 if options.toy else FLUSHED_OF
    with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
        places = (_made(folder / "files"), memory)
        try:
            with attached(method, launcher, name, world, places, options.timeout) as (team, size):
                frequency = Frequency(team, options.rounds)
                frequency.at(1, rounds=1, checkpoints=2)
                return {
                    **row,
                    "state_bytes": size,
                    **frequency.at(options.epoch, checkpoints=epochs),
                }
        except TeamError as error:
            return {**row, "status": f"failed: {error}"}


def _restarts(options: argparse.Namespace, name: str, launcher: str, method: str) -> Row:
    row = _about(name, "restarts", launcher, 2, method)
    row["method_title"] = SAVERS[launcher][method].title
    failures = _failures(1 if options.toy else COLD_RESTARTS, options.toy)
    with _plan(options, name, launcher, 2, method, failures) as plan:
        plan = replace(plan, killed_at=tuple(failures))
        lose_memory = method != "ours-memory"
        try:
            return {**row, **cold.measure(plan, lose_memory, options.timeout)}
        except JobError as error:
            return {**row, "status": f"failed: {error}"}


def _spares(options: argparse.Namespace, name: str, method: str) -> Row:
    nodes, count = (2, 1) if options.toy else (NODES, SPARES)
    row = _about(name, "spares", "torchrun", nodes, method)
    row["method_title"] = SAVERS["torchrun"][method].title
    failures = _failures(count, options.toy)
    with _plan(options, name, "torchrun", nodes, method, failures) as plan:
        plan = replace(plan, held_at=tuple(failures))
        try:
            return {**row, **spares.measure(plan, count, failures, options.timeout)}
        except (JobError, NoNetworkError) as error:
            return {**row, "status": f"failed: {error}"}


def _failures(count: int, toy: bool) -> list[int]:
    """The steps of the failures."""
    epochs = 2 if toy else BETWEEN
    return [number * epochs * EPOCH + EPOCH // 2 for number in range(1, count + 1)]


@contextmanager
def _plan(
    options: argparse.Namespace,
    name: str,
    launcher: str,
    world: int,
    method: str,
    failures: list[int],
) -> Iterator[Plan]:
    """A job that ends as many epochs after its last failure as lie between two."""
    steps = failures[-1] + failures[0] - EPOCH
    with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
        places = str(folder / "job"), str(memory / "job")
        yield Plan(name, launcher, method, world, steps, EPOCH, *places)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
