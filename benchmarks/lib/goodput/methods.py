"""What goodput.py compares: ways to take checkpoints and to come back to them.

Each is used as a training script would: `resume` at the start, `boundary` after every step.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch

import ddp_ckpt
from lib.methods.alternatives import DcpThread, TorchSave, raw_state
from lib.methods.method import Job, Method

KEEP = 2  # versions; older ones are removed, or the disk is full after some minutes


class Nothing(Method):
    """Never comes back: the plain training that useful steps are counted against."""

    def resume(self, job: Job, every: int) -> int:
        """Attach, and bring back the newest version; returns it, 0 if there is none."""
        self.setup(job)
        return 0

    def stall_seconds(self) -> list[float]:
        """How long each version kept the training, where the method tells by itself."""
        return []


class RootSave(Nothing, TorchSave):
    """torch.save on rank 0 with fsync, all wait; on the way back every rank reads the file."""

    def resume(self, job: Job, every: int) -> int:
        self.setup(job)
        found = sorted(path for path in job.directory.glob("v*") if not path.suffix)
        if not found:
            return 0
        state = torch.load(found[-1], mmap=True)
        job.module.load_state_dict(state["model"])
        job.optimizer.load_state_dict(state["optimizer"])
        return version_of(found[-1])

    def boundary(self, version: int, due: bool) -> None:
        super().boundary(version, due)
        if due and self.job.rank == 0:
            for old in sorted(self.job.directory.glob("v*"))[:-KEEP]:
                old.unlink()


class DcpAsync(Nothing, DcpThread):
    """DCP async_save in a thread, as its tutorial has it.

    Not the tuned one of stall.py: the daemon process that it saves with imports torch first, for
    seconds in every run.
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
    title = "ours, memory and local"

    def resume(self, job: Job, every: int) -> int:
        self.waits: list[float] = []
        self.checkpointer = ddp_ckpt.Checkpointer(
            job.model,
            job.optimizer,
            path=str(job.directory),
            shm_dir=str(job.memory),
            boundary="explicit",
            on_event=self._heard,
            memory_every_steps=every,
        )
        return int(self.checkpointer.restore())

    def _heard(self, event: Any) -> None:
        if event.name == "sealed":
            self.waits.append(event.seconds["stall"])

    def boundary(self, version: int, due: bool) -> None:
        self.checkpointer.step()

    def stall_seconds(self) -> list[float]:
        return self.waits


class HorovodElastic(Nothing):
    """hvd.elastic.TorchState: a copy in every process's memory; trained by elastic.py."""

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


def version_of(path: Path) -> int:
    """Of a checkpoint called v<version>."""
    return int(path.name[1:])


RESUMABLE: dict[str, type[Nothing]] = {
    "nothing": Nothing,
    "torch-save": RootSave,
    "dcp-thread": DcpAsync,
    "hvd-elastic": HorovodElastic,
    "ours": Ours,
}


def preload() -> None:
    """Import what the methods import later: a fork then has it."""
    for name in (
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.checkpoint.state_dict_saver",
        *(["horovod.torch"] if elastic_missing() is None else []),
    ):
        importlib.import_module(name)


__all__ = ["RESUMABLE", "Nothing", "preload", "raw_state", "version_of"]
