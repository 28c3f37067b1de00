"""SCR-Exa's experiment: one checkpoint an epoch, over ranks, DDP and Horovod.

An epoch has a few steps here. *Root checkpointing* writes to one shared parallel file system, whose
bandwidth is simulated (`lib.methods.shared_store`); ours takes each version to memory, or to local
disk, or flushes one of ten. Then restarts: the log of a killed job beside one that was not.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from lib.files import SHARED_MEMORY, temporary
from lib.methods.registry import METHODS
from lib.methods.shared_store import BYTES_PER_SECOND, FLUSHED_OF
from lib.papers.frequency import Frequency, attached
from lib.papers.models import MODELS, present
from lib.papers.results import Row
from lib.papers.resumption import Resumption
from lib.progress import say
from lib.training.launchers import LAUNCHERS
from lib.training.teams import TeamError

EPOCH = 4
"""Steps."""
RESUMED = {"ours-disk": "ours, local disk", "torch-save": "torch.save, rank 0"}
"""Methods of the restarts, see `lib.goodput.methods`."""


def measure(options: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield finished rows."""
    for name in present(options.models):
        for launcher in options.launchers if "epochs" in options.parts else ():
            if LAUNCHERS[launcher].missing():
                say(f"{launcher}: {LAUNCHERS[launcher].missing()}")
                continue
            for world in map(int, options.worlds):
                for method in options.methods:
                    say(f"{name}: {launcher}, {world} ranks, {method}")
                    yield [_epochs(options, name, launcher, world, method)]
        for method in RESUMED if "restarts" in options.parts else ():
            say(f"{name}: a restart, {method}")
            yield [_restart(options, name, method)]


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
    row["store_bytes_per_second"] = BYTES_PER_SECOND
    epochs = 2 if options.toy else FLUSHED_OF
    with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
        places = (_made(folder / "files"), memory)
        try:
            with attached(method, launcher, name, world, places, options.timeout) as (team, size):
                frequency = Frequency(team, options.rounds)
                frequency.at(1, rounds=1, checkpoints=2)
                return {**row, "state_bytes": size, **frequency.at(EPOCH, checkpoints=epochs)}
        except TeamError as error:
            return {**row, "status": f"failed: {error}"}


def _restart(options: argparse.Namespace, name: str, method: str) -> Row:
    row = _about(name, "restarts", "torchrun", 2, method)
    row["method_title"] = RESUMED[method]
    with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
        job = Resumption(name, MODELS[name], method, folder / "job", memory / "job")
        return {**row, **job.run(lose_memory=True)}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
