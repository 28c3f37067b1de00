"""The interface between a training and a method of taking checkpoints."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

KEEP = 2
"""Versions that `retire` keeps: the disk would be full after some minutes."""


@dataclass(frozen=True)
class Setting:
    """The parameters of a rank of a team. `every` is in steps."""

    method: str
    launcher: str
    world: int
    model: str
    every: int
    directory: str
    memory: str
    device: str = "cpu"
    backend: str = "gloo"


@dataclass(frozen=True)
class Job:
    """The training of this rank, as a method sees it.

    model: the module that the training calls. module: the same without a DDP wrapper.
    directory: the folder for durable checkpoints; it exists, with the same path on all ranks.
    memory: a folder in shared memory, with the same path on all ranks; the parent removes it.
    """

    model: nn.Module
    module: nn.Module
    optimizer: Optimizer
    directory: Path
    memory: Path
    rank: int
    world: int
    device: torch.device
    launcher: str


class Method:
    """Takes no checkpoint: the base class is also the control row of the table.

    All calls come from the training's main thread, in the same order on every rank. A training
    calls `setup`, or `resume` if it is to go on from the newest version.

    durable: version -> time.perf_counter() at which the method had finished the version (see
        `fsync`). Any thread may write it. The clock is CLOCK_MONOTONIC, so the parent may compare
        it between processes.
    details: version -> seconds in named phases, if the method reports them.
    attached: the time of day at which `resume` had attached, before it loaded.
    """

    name = "nothing"
    title = "nothing"
    fsync = "-"  # yes: fsync'ed before it counts as durable; no: in the page cache only
    launchers: tuple[str, ...] = ("torchrun", "horovod")
    usual = True  # measured by stall.py when no methods are named
    beside = ""  # the method of the plain blocks, if being attached has a cost

    def __init__(self) -> None:
        self.durable: dict[int, float] = {}
        self.details: dict[int, dict[str, float]] = {}
        self.attached = 0.0

    @classmethod
    def missing(cls) -> str | None:
        """The reason if this method cannot run here, or None."""
        return None

    def setup(self, job: Job) -> None:
        """Attach to the training. Collective: every rank calls it at the same point."""
        self.job = job

    def resume(self, job: Job, every: int) -> int:
        """Attach to a training with a version every `every` steps, and restore the newest one;
        return its number, or 0 if there is none. Collective."""
        self.setup(job)
        self.attached = time.time()
        return self.load()

    def load(self) -> int:
        """Restore the newest version, as in `resume`."""
        return 0

    def boundary(self, version: int, due: bool) -> None:
        """End of a step: `version` optimizer steps are complete. Take a checkpoint if due.

        After it returns, the next forward pass may start; the parameters are safe to change
        only after the next `before_optimizer_step` has returned, too.
        """

    def before_optimizer_step(self) -> None:
        """Last call before the optimizer step: wait for the copies that must precede it."""

    def stall_seconds(self) -> list[float]:
        """How long each version stalled the training, if the method reports it."""
        return []

    def drain(self) -> None:
        """Wait until all checkpoints are finished on this rank. Raises their errors."""

    def busy(self) -> bool:
        """True while work continues next to the training, on this rank."""
        return False

    def retire(self) -> None:
        """Delete all but the newest checkpoints, if the method itself does not."""

    def sweep(self) -> None:
        """Delete old checkpoints. Called on rank 0, drained and outside any measurement."""

    def close(self) -> None:
        """Release threads, processes and memory. Collective, after `drain`."""

    def finished(self, version: int) -> None:
        """Note that `version` is durable now. Any thread."""
        self.durable[version] = time.perf_counter()


class FolderMethod(Method):
    """A method that leaves one entry per version in the directory, named v<version>: a file of
    torch.save, if it says nothing else."""

    launchers = ("torchrun",)

    def path(self, version: int) -> Path:
        return self.job.directory / f"v{version:08d}"

    def complete(self) -> list[Path]:
        """The complete checkpoints, the newest last."""
        return sorted(path for path in self.job.directory.glob("v*") if not path.suffix)

    def load(self) -> int:
        """Every rank reads the newest file."""
        found = self.complete()
        if not found:
            return 0
        load_into(self.job, torch.load(found[-1], mmap=True))
        return version_of(found[-1])

    def retire(self) -> None:
        if self.job.rank == 0:
            for old in self.complete()[:-KEEP]:
                _remove(old)

    def sweep(self) -> None:
        for entry in self.job.directory.iterdir():
            _remove(entry)


def _remove(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def version_of(path: Path) -> int:
    """The version of a checkpoint named v<version>."""
    return int(path.name[1:])


def raw_state(job: Job) -> dict[str, Any]:
    """References to the live tensors of model and optimizer, without a copy. Plain dicts: the
    stagers of some torch releases cannot copy the ordered ones of modules."""
    return {"model": dict(job.module.state_dict()), "optimizer": job.optimizer.state_dict()}


def load_into(job: Job, state: dict[str, Any]) -> None:
    """Load what `raw_state` has given."""
    job.module.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
