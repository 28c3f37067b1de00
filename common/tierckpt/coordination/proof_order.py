"""Proof order: instructions for a job that `tierckpt prove` starts, passed in its environment.

The job's checkpoints then go to a scratch folder, whatever the script says, and the user's own are
never touched. Standard library and settings only.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict, replace

from tierckpt.config import PREFIX, Config, MemoryConfig, PeerConfig, PersistentConfig
from tierckpt.errors import ConfigError
from tierckpt.storage.job_directory import job_id_of

VARIABLE = PREFIX + "PROVE_DIR"
FILE_NAME = "order.json"
SEED = "seed"
"""Folder with a version that the run's first checkpointer starts with."""
KEPT, MARK = "kept", "killed"
RECORDS = "records"
PROGRESS = "progress"
"""File with the newest version of rank 0, as text."""
NEVER_STEPS = 10**12


_PATHS: dict[str, str] = {}
"""The scripts' own paths, by the scratch folder used instead."""


class ProofOrder(Struct, frozen=True):
    """Instructions for one run."""

    folder: Path
    """Folder of this run alone; all its nodes see it."""
    until: int
    """The run stops, as by `tierckpt halt`, with this version or the first one after it."""
    keep: int | None = None
    """The first version from this one on is copied to `kept`; None: none."""
    kill_at: int | None = None
    """All ranks are killed once with SIGKILL at the boundary of this version; None: never."""

    def write(self) -> None:
        """Create the folder and write the order into it."""
        self.folder.mkdir(parents=True)
        (self.folder / RECORDS).mkdir()
        values = {**asdict(self), "folder": str(self.folder)}
        (self.folder / FILE_NAME).write_text(json.dumps(values, indent=1) + "\n")

    @property
    def kept(self) -> Path:
        """Folder of kept copies, with the same names as the scratch folders in `folder`."""
        return self.folder / KEPT

    @property
    def mark(self) -> Path:
        """File that exists once the kill was carried out."""
        return self.folder / MARK

    def place_of(self, path: str) -> str:
        """Return the scratch folder that replaces a job's `path`."""
        scratch = self.folder / job_id_of(path)
        return str(scratch / "{node}" if "{node}" in path else scratch)


def order_here() -> ProofOrder | None:
    """Return this process's order; None without one. Raises ConfigError if it cannot be read:
    without the order the job would write to the user's checkpoints."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    try:
        values = json.loads((Path(folder) / FILE_NAME).read_text())
        given = {name: values[name] for name in ("keep", "kill_at")}
        return ProofOrder(Path(folder), int(values["until"]), **given)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{VARIABLE} is {folder!r}, but no order of `tierckpt prove` can be read there "
            f"({error}). All nodes must see the same folder: choose it with `tierckpt prove --dir`"
        ) from error


def redirected(config: Config) -> Config:
    """Return the settings as the order wants them: every version to memory, none to a store of the
    user's, all in the run's folder. Without an order, return `config` itself. Raises ConfigError
    as `order_here`."""
    order = order_here()
    if order is None:
        return config
    scratch = order.place_of(config.path)
    _PATHS[scratch] = config.path
    found = replace(
        config,
        path=scratch,
        job_id="",
        rollback_to=0,
        when_busy="wait",
        agent="inline",
        halt_seconds_left=0.0,
        events_dir=str(order.folder / "events"),
        trace_dir="",
        stages="",
        memory=MemoryConfig(),
        local=replace(
            config.local,
            every_steps=NEVER_STEPS,  # except for the last version: the level is in use
            every_seconds=0.0,
            keep="1",
        ),
        peer=PeerConfig(),
        persistent=PersistentConfig(),
    )
    _take_seed(order, Path(found.directory))
    return found


def path_of(place: str) -> str:
    """Return the script's own path for a scratch folder."""
    return _PATHS.get(place, place)


def _take_seed(order: ProofOrder, directory: Path) -> None:
    """Move the seed into place. The node's first rank to call it does; before any rank looks."""
    with contextlib.suppress(OSError):
        directory.parent.mkdir(exist_ok=True)
        (order.folder / SEED).rename(directory)


__all__ = ["ProofOrder", "order_here", "path_of", "redirected"]
