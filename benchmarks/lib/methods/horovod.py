"""The methods for Horovod jobs: torch.save on rank 0, elastic commit, and ours."""

from __future__ import annotations

import importlib
import time
from typing import Any

from lib.methods.alternatives import TorchSave
from lib.methods.method import Job, Method
from lib.methods.ours import OursLocal, OursMemory, OursOff


class RootSave(TorchSave):
    """Rank 0 writes; the others continue until their next allreduce, and wait there.

    Horovod's documentation recommends this. On a restart rank 0 loads the file and broadcasts
    parameters and optimizer state; this is not measured here.
    """

    title = "torch.save on rank 0"

    def setup(self, job: Job) -> None:
        self.job = job

    def boundary(self, version: int, due: bool) -> None:
        if not due:
            return
        if self.job.rank == 0:
            self._write(version)
        self.finished(version)


class HorovodCommit(Method):
    """Horovod's elastic state: the call makes a deep copy in the memory of every process.

    The copy is lost with its process: a job survives the death of some workers, not of all.
    """

    name = "hvd-commit"
    title = "hvd.elastic.TorchState.commit"
    peer = True

    def setup(self, job: Job) -> None:
        hvd: Any = importlib.import_module("horovod.torch")
        self.state = hvd.elastic.TorchState(model=job.model, optimizer=job.optimizer)

    def boundary(self, version: int, due: bool) -> None:
        if due:
            self.state.commit()
            self.finished(version)


class AttachedOff(OursOff):
    """`OursOff` under Horovod."""

    adapter = "horovod_ckpt"


class HorovodMemory(OursMemory):
    """`OursMemory` under Horovod."""

    adapter = "horovod_ckpt"


class HorovodLocal(OursLocal):
    """`OursLocal` under Horovod."""

    adapter = "horovod_ckpt"


class HorovodElastic(HorovodMemory):
    """The memory level through `horovod_ckpt.elastic.TorchState`."""

    name = "ours-commit"
    title = "Tierckpt, TorchState.commit"

    def setup(self, job: Job) -> None:
        self.job = job
        elastic = importlib.import_module("horovod_ckpt.elastic")
        # Every commit takes a version; the loop decides when to commit.
        settings = {**self._settings(), "memory_every_steps": 1}
        self._state = elastic.TorchState(job.model, job.optimizer, tierckpt=settings)
        self._state.sync()
        self._checkpointer = self._state.checkpointer

    def boundary(self, version: int, due: bool) -> None:
        if due:
            self._open.add(version)
            self._begun[version] = time.perf_counter()
            self._state.commit()
            self._ahead = version - self._checkpointer.version


HOROVODS = (
    RootSave,
    HorovodCommit,
    AttachedOff,
    HorovodMemory,
    HorovodLocal,
    HorovodElastic,
)
