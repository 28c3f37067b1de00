"""The methods of goodput.py: ways to take checkpoints and to resume from them.

A training script uses them in the same way: `resume` at the start, `boundary` after every step.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path
from typing import Any, ClassVar

import torch

import ddp_ckpt  # noqa: F401 - forks then have it
from lib.launchers import SHIM
from lib.methods.alternatives import DcpThread, TorchSave, raw_state
from lib.methods.checkfreq import CheckFreq
from lib.methods.method import Job, Method

KEEP = 2  # versions; older ones are removed, or the disk would be full after some minutes


class Nothing(Method):
    """Takes no checkpoint: the plain training, for the undisturbed pace."""

    def resume(self, job: Job, every: int) -> int:
        """Attach, and restore the newest version; returns its number, or 0 if there is none."""
        self.setup(job)
        return 0

    def stall_seconds(self) -> list[float]:
        """How long each version stalled the training, if the method reports it."""
        return []


class _WholeFiles(Nothing):
    """A file for each version; on a resume every rank reads the newest one."""

    def resume(self, job: Job, every: int) -> int:
        self.setup(job)
        return load_newest(job)

    def boundary(self, version: int, due: bool) -> None:
        super().boundary(version, due)
        if due:
            remove_old(self.job)


class RootSave(_WholeFiles, TorchSave):
    """torch.save on rank 0 with fsync, while all wait."""


class CheckFreqSave(_WholeFiles, CheckFreq):
    """CheckFreq's two phases."""


class DcpAsync(Nothing, DcpThread):
    """DCP async_save in a thread, used as in its tutorial.

    Not the tuned variant of stall.py: its daemon process imports torch, for seconds in every run.
    """

    def resume(self, job: Job, every: int) -> int:
        self.setup(job)
        found = sorted(path.parent for path in job.directory.glob("v*/.metadata"))
        if not found:
            return 0
        state = self._state()
        self.dcp.load(state, checkpoint_id=str(found[-1]), process_group=self.group)
        self.state_dict.set_state_dict(
            job.model,
            job.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return version_of(found[-1])

    def boundary(self, version: int, due: bool) -> None:
        super().boundary(version, due)
        if due and self.job.rank == 0:
            done = sorted(path.parent for path in self.job.directory.glob("v*/.metadata"))
            for old in done[:-KEEP]:
                shutil.rmtree(old)


class Ours(Nothing):
    """Tierckpt: to memory at the interval, to local disk once a minute."""

    name = "ours"
    title = "Tierckpt, memory and local"
    adapter = "ddp_ckpt"

    def resume(self, job: Job, every: int) -> int:
        self.job = job
        self.waits: list[float] = []
        self.checkpointer = importlib.import_module(self.adapter).Checkpointer(
            job.model,
            job.optimizer,
            path=str(job.directory),
            shm_dir=str(job.memory),
            boundary="explicit",
            on_event=self._receive,
            **self.settings(every),
        )
        return int(self.checkpointer.restore())

    def settings(self, every: int) -> dict[str, Any]:
        """The intervals of the levels."""
        return {"memory_every_steps": every}

    def _receive(self, event: Any) -> None:
        if event.name == "sealed":
            self.waits.append(event.seconds["stall"])

    def boundary(self, version: int, due: bool) -> None:
        self.checkpointer.step()

    def stall_seconds(self) -> list[float]:
        return self.waits


class OursDisk(Ours):
    """Tierckpt: to local disk at the interval."""

    name = "ours-disk"
    title = "Tierckpt, local disk"
    usual = False

    def settings(self, every: int) -> dict[str, Any]:
        return {"memory_every_steps": 0, "local_every_steps": every, "local_every_seconds": 0}


class OursTorchrun(Ours):
    """Tierckpt under torchrun: its restarts start all processes again; run by launched_job.py."""

    title = "Tierckpt, torchrun"
    shim: ClassVar[tuple[str, ...]] = ()


class OursRun(OursTorchrun):
    """Tierckpt under torchrun and `tierckpt run`."""

    title = "Tierckpt, tierckpt run"
    shim: ClassVar[tuple[str, ...]] = SHIM


class HorovodElastic(Nothing):
    """hvd.elastic.TorchState: a copy in every process's memory; trained by elastic_job.py."""

    name = "hvd-elastic"
    title = "hvd.elastic"

    @classmethod
    def missing(cls) -> str | None:
        return elastic_missing()


def elastic_missing() -> str | None:
    """Why elastic Horovod cannot run here, or None."""
    if importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed here; `make horovod` builds it"
    return None


def load_newest(job: Job) -> int:
    """Load the newest file of torch.save; return its version, or 0 if there is none."""
    path = newest_file(job)
    if path is None:
        return 0
    state = torch.load(path, mmap=True)
    job.module.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    return version_of(path)


def newest_file(job: Job) -> Path | None:
    """The newest file of torch.save."""
    found = _files(job)
    return found[-1] if found else None


def remove_old(job: Job) -> None:
    """Rank 0 removes all but the newest files of torch.save."""
    if job.rank == 0:
        for old in _files(job)[:-KEEP]:
            old.unlink()


def _files(job: Job) -> list[Path]:
    return sorted(path for path in job.directory.glob("v*") if not path.suffix)


def version_of(path: Path) -> int:
    """The version of a checkpoint named v<version>."""
    return int(path.name[1:])


RESUMABLE: dict[str, type[Nothing]] = {
    "nothing": Nothing,
    "torch-save": RootSave,
    "checkfreq": CheckFreqSave,
    "dcp-thread": DcpAsync,
    "hvd-elastic": HorovodElastic,
    "ours": Ours,
    "ours-disk": OursDisk,
    "ours-torchrun": OursTorchrun,
    "ours-run": OursRun,
}


def preload() -> None:
    """Import the modules that the methods need, so that forks have them."""
    for name in (
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.checkpoint.state_dict_saver",
        *(["horovod.torch"] if elastic_missing() is None else []),
    ):
        importlib.import_module(name)


__all__ = ["RESUMABLE", "Nothing", "preload", "raw_state", "version_of"]
