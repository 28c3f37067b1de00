"""Checkpoint libraries of 2026, as their documentation uses them: Meta's, DLRover's, Google's."""

from __future__ import annotations

import importlib
import time
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from lib.methods.alternatives import raw_state
from lib.methods.method import FolderMethod, Job, Waiters

WAIT_LIMIT_S = 60.0


class TorchCheckpointing(FolderMethod):
    """Meta's torch_checkpointing: a thread stages into shared memory, a process writes.

    Every rank writes its replica: the library divides only tensors that are sharded. Its O_DIRECT
    is off: with it, release 0.1.1 fails on ext4 ("Invalid argument", at the close of a file).
    """

    name = "torch-checkpointing"
    title = "torch_checkpointing, async"
    fsync = "no"
    usual = False

    @classmethod
    def missing(cls) -> str | None:
        return _missing("torch_checkpointing")

    def setup(self, job: Job) -> None:
        super().setup(job)
        library: Any = importlib.import_module("torch_checkpointing")
        storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
        self.manager = library.CheckpointManager(
            library.CheckpointManager.Config(
                storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False)
            )
        )
        self.upload: Future[Any] | None = None

    def boundary(self, version: int, due: bool) -> None:
        if due:
            self.drain()  # never two in flight, as with the other methods
            self.upload = self.manager.save(str(self.path(version)), raw_state(self.job))
            assert self.upload is not None
            self.upload.add_done_callback(lambda _: self.finished(version))

    def before_optimizer_step(self) -> None:
        with self.manager.lock():  # waits for the staging
            pass

    def drain(self) -> None:
        if self.upload is not None:
            self.upload.result()
            self.upload = None

    def close(self) -> None:
        self.manager.close()


class DLRover(FolderMethod):
    """DLRover's flash checkpoint: rank 0 copies into shared memory in the call, a process writes.

    Used outside of `dlrover-run`: rank 0 starts the process, which ends with it.
    """

    name = "dlrover"
    title = "DLRover flash checkpoint"
    fsync = "no"
    usual = False

    @classmethod
    def missing(cls) -> str | None:
        return _missing("dlrover.trainer.torch.flash_checkpoint.ddp")

    def setup(self, job: Job) -> None:
        super().setup(job)
        library: Any = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        constants: Any = importlib.import_module("dlrover.python.common.constants")
        self.tracker: str = constants.CheckpointConstant.TRACER_FILE_NAME
        self.kinds: Any = library.StorageType
        self.group = dist.new_group(backend="gloo")
        self.checkpointer = library.DdpCheckpointer(str(job.directory), comm_backend="gloo")
        self.waiters = Waiters()

    def boundary(self, version: int, due: bool) -> None:
        if not due:
            return
        self.drain()
        path = self.path(version)
        self.checkpointer.save_checkpoint(
            version, raw_state(self.job), f"{path}.pt", storage_type=self.kinds.DISK
        )
        self.waiters.start(lambda: self._wait(version), lambda: self.finished(version))

    def _wait(self, version: int) -> None:
        """Wait for the file with the number of the newest checkpoint. The library's own wait looks
        every three seconds, and fails before the first checkpoint."""
        limit = time.monotonic() + WAIT_LIMIT_S
        path = self.job.directory / self.tracker
        while not path.exists() or path.read_text() != str(version):
            if time.monotonic() > limit:
                raise TimeoutError(f"DLRover has not written v{version}")
            time.sleep(0.005)

    def drain(self) -> None:
        self.waiters.join()

    def close(self) -> None:
        self.waiters.join()
        if self.job.rank == 0:  # its segment and its sockets have one name for all jobs
            self.checkpointer._engine._shm_handler.unlink()
            importlib.import_module("dlrover.python.common.multi_process").clear_sock_dir()


class Orbax(FolderMethod):
    """Google's Orbax, for arrays of numpy and JAX: rank 0 copies in the call, threads write.

    TensorStore, which writes the arrays, syncs their files; the last rename is not synced.
    """

    name = "orbax"
    title = "Orbax async, rank 0"
    fsync = "data"
    usual = False

    @classmethod
    def missing(cls) -> str | None:
        return _missing("orbax.checkpoint")

    def setup(self, job: Job) -> None:
        super().setup(job)
        self.library: Any = importlib.import_module("orbax.checkpoint")
        handler = self.library.StandardCheckpointHandler()
        self.checkpointer = self.library.AsyncCheckpointer(handler)
        self.waiters = Waiters()

    def boundary(self, version: int, due: bool) -> None:
        if not due:
            return
        self.drain()
        if self.job.rank == 0:
            state = raw_state(self.job)
            arrays = {"model": _arrays(state["model"]), "optimizer": _arrays(state["optimizer"])}
            what = self.library.args.StandardSave(arrays)
            self.checkpointer.save(self.path(version), args=what)
        self.waiters.start(self.checkpointer.wait_until_finished, lambda: self.finished(version))

    def drain(self) -> None:
        self.waiters.join()

    def close(self) -> None:
        self.checkpointer.close()


def _arrays(value: Any) -> dict[str, Any]:
    """The tensors of nested dicts as arrays, which share their memory."""
    nested = {str(key): each for key, each in value.items() if isinstance(each, dict)}
    tensors = {str(key): each for key, each in value.items() if isinstance(each, torch.Tensor)}
    return {
        **{key: _arrays(each) for key, each in nested.items()},
        **{key: each.detach().numpy() for key, each in tensors.items()},
    }


def _missing(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"not installed ({error})"
    return None


OF_TODAY = (TorchCheckpointing, DLRover, Orbax)
