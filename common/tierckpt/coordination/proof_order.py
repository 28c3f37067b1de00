"""An order: what a job is to do that `tierckpt prove` has started; found through its environment.

Its checkpoints are then in a scratch folder, whatever the script says, and the user's are never
touched. Standard library and settings only.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tierckpt.config import PREFIX, Config, MemoryConfig, PeerConfig, PersistentConfig
from tierckpt.errors import ConfigError
from tierckpt.storage.memory.job_directory import job_id_of

VARIABLE = PREFIX + "PROVE_DIR"
FILE_NAME = "order.json"
SEED = "seed"
"""A version that the first checkpointer of the run begins with."""
KEPT, MARK = "kept", "killed"
RECORDS = "records"
PROGRESS = "progress"
"""The newest version of rank 0, as text."""
NEVER_STEPS = 10**12


_PATHS: dict[str, str] = {}
"""The scripts' own, by what stands in their place."""


@dataclass(frozen=True)
class ProofOrder:
    """What a run is to do."""

    folder: Path
    """Of this run alone; all its nodes see it."""
    until: int
    """It ends, as by `tierckpt halt`, with this version, or the first one after it."""
    keep: int | None = None
    """The first version from this one on is copied to `kept`; None: none."""
    kill_at: int | None = None
    """All ranks are killed with SIGKILL at the boundary of this version, once; None: not at all."""

    def write(self) -> None:
        """Into its folder, which is made."""
        self.folder.mkdir(parents=True)
        (self.folder / RECORDS).mkdir()
        values = {**asdict(self), "folder": str(self.folder)}
        (self.folder / FILE_NAME).write_text(json.dumps(values, indent=1) + "\n")

    @property
    def kept(self) -> Path:
        """Has folders named as those in `folder` that stand in the place of jobs' paths."""
        return self.folder / KEPT

    @property
    def mark(self) -> Path:
        """Is there once the kill was carried out."""
        return self.folder / MARK

    def place_of(self, path: str) -> str:
        """Where versions go in place of a job's `path`."""
        scratch = self.folder / job_id_of(path)
        return str(scratch / "{node}" if "{node}" in path else scratch)


def order_here() -> ProofOrder | None:
    """This process's; None where nobody proves anything. Raises ConfigError where it cannot be
    read: without it the job would write to the user's checkpoints."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    try:
        values = json.loads((Path(folder) / FILE_NAME).read_text())
        given = {name: values[name] for name in ("keep", "kill_at")}
        return ProofOrder(Path(folder), int(values["until"]), **given)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{VARIABLE} is {folder!r}, and there is no order of `tierckpt prove` that can be read "
            f"({error}). Several nodes have to see one folder: `tierckpt prove --dir` says which"
        ) from error


def redirected(config: Config) -> Config:
    """As the order says: every version to memory, none to a store of the user's, all in the run's
    folder. Without an order it is `config` itself. Raises ConfigError as `order_here`."""
    order = order_here()
    if order is None:
        return config
    scratch = order.place_of(config.path)
    _PATHS[scratch] = config.path
    found = replace(
        config,
        path=scratch,
        job_id="",
        when_busy="wait",
        agent="inline",
        health="off",
        halt_seconds_left=0.0,
        events_dir=str(order.folder / "events"),
        trace_dir="",
        memory=MemoryConfig(),
        local=replace(
            config.local,
            every_steps=NEVER_STEPS,  # but for the last one: the level is there
            every_seconds=0.0,
            keep_last=1,
            keep_every=0,
            keep_best=0,
        ),
        peer=PeerConfig(),
        persistent=PersistentConfig(),
    )
    _take_seed(order, Path(found.directory))
    return found


def path_of(place: str) -> str:
    """The script's own, in whose place that scratch folder is."""
    return _PATHS.get(place, place)


def _take_seed(order: ProofOrder, directory: Path) -> None:
    """Any rank that comes first, for its node; before any rank looks for it."""
    with contextlib.suppress(OSError):
        directory.parent.mkdir(exist_ok=True)
        (order.folder / SEED).rename(directory)


__all__ = ["ProofOrder", "order_here", "path_of", "redirected"]
