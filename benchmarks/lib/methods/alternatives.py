"""The alternatives: torch.save, torch.distributed.checkpoint (DCP) and torchsnapshot."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lib.methods.method import FolderMethod, Job, load_into, raw_state, version_of

BYTES_PER_SECOND = 100_000_000
"""The simulated bandwidth of a shared parallel file system."""


class TorchSave(FolderMethod):
    """Rank 0 writes everything while all wait, as in most training scripts. Under Horovod the
    others continue until their next allreduce, and wait there."""

    name = "torch-save"
    title = "torch.save on rank 0"
    fsync = "yes"
    launchers = ("torchrun", "horovod")

    def setup(self, job: Job) -> None:
        super().setup(job)
        self.group = dist.new_group(backend="gloo") if job.launcher == "torchrun" else None

    def boundary(self, version: int, due: bool) -> None:
        if not due:
            return
        if self.job.rank == 0:
            self._write(version)
        if self.group is not None:
            dist.barrier(self.group)
        self.finished(version)

    def _write(self, version: int) -> None:
        path = self.path(version)
        temporary = path.with_suffix(".part")
        with open(temporary, "wb") as file:
            torch.save(raw_state(self.job), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)


class TorchLoad(TorchSave):
    """The same, and after a restart rank 0 alone reads: the others get the bytes by a broadcast."""

    name = "torch-load"
    title = "torch.load on rank 0, broadcast"
    usual = False

    def load(self) -> int:
        found = self.complete() if self.job.rank == 0 else []
        raw = self._read(found[-1]) if found else b""
        about = torch.tensor([version_of(found[-1]) if found else 0, len(raw)])
        self._broadcast(about)
        version, size_bytes = (int(value) for value in about)
        if not version:
            return 0
        content = torch.empty(size_bytes, dtype=torch.uint8)
        if self.job.rank == 0:
            content = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._broadcast(content)
        load_into(self.job, torch.load(io.BytesIO(content.numpy().data)))
        return version

    def _read(self, path: Path) -> bytes:
        return path.read_bytes()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if self.job.launcher == "torchrun":
            dist.broadcast(tensor, 0)
        else:
            hvd: Any = importlib.import_module("horovod.torch")
            hvd.broadcast_(tensor, 0)


class RootShared(TorchLoad):
    """Root checkpointing on a shared file system: a write and a read last as long as they would at
    its bandwidth."""

    name = "root-shared"
    title = "torch.save on rank 0, shared file system"

    def _write(self, version: int) -> None:
        begin = time.perf_counter()
        super()._write(version)
        _last_as(self.path(version).stat().st_size, begin)

    def _read(self, path: Path) -> bytes:
        begin = time.perf_counter()
        raw = path.read_bytes()
        _last_as(len(raw), begin)
        return raw


def _last_as(nbytes: int, begin: float) -> None:
    time.sleep(max(0.0, begin + nbytes / BYTES_PER_SECOND - time.perf_counter()))


class DcpThread(FolderMethod):
    """DCP's async_save, used as in its tutorial: staged in the call, written by a thread."""

    name = "dcp-thread"
    title = "DCP async_save, thread"
    fsync = "yes"

    def setup(self, job: Job) -> None:
        super().setup(job)
        self.dcp = importlib.import_module("torch.distributed.checkpoint")
        self.state_dict = importlib.import_module("torch.distributed.checkpoint.state_dict")
        # A save has collectives on a background thread. On DDP's group they would interleave
        # with the gradient allreduces and deadlock.
        self.group = dist.new_group(backend="gloo")
        self.upload: Future[Any] | None = None

    def complete(self) -> list[Path]:
        return sorted(path.parent for path in self.job.directory.glob("v*/.metadata"))

    def load(self) -> int:
        found = self.complete()
        if not found:
            return 0
        state = self._state()
        self.dcp.load(state, checkpoint_id=str(found[-1]), process_group=self.group)
        self.state_dict.set_state_dict(
            self.job.model,
            self.job.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return version_of(found[-1])

    def boundary(self, version: int, due: bool) -> None:
        if due:
            self.drain()  # the tutorial's pattern: never two saves in flight
            self._track(version, self._save(version))

    def _save(self, version: int) -> Future[Any]:
        upload: Future[Any] = self.dcp.async_save(
            self._state(), checkpoint_id=str(self.path(version)), process_group=self.group
        )
        return upload

    def _state(self) -> dict[str, Any]:
        model, optimizer = self.state_dict.get_state_dict(self.job.model, self.job.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _track(self, version: int, upload: Future[Any]) -> None:
        self.upload = upload
        upload.add_done_callback(lambda _: self.finished(version))

    def drain(self) -> None:
        if self.upload is not None:
            self.upload.result()  # raises the error of the background save
            self.upload = None


class DcpProcess(DcpThread):
    """async_save with DCP's daemon process: staged in the call, passed through a pipe."""

    name = "dcp-process"
    title = "DCP async_save, process"

    def _save(self, version: int) -> Future[Any]:
        checkpointer = importlib.import_module(
            "torch.distributed.checkpoint.state_dict_saver"
        ).AsyncCheckpointerType
        upload: Future[Any] = self.dcp.async_save(
            self._state(),
            checkpoint_id=str(self.path(version)),
            process_group=self.group,
            async_checkpointer_type=checkpointer.PROCESS,
        )
        return upload

    def close(self) -> None:
        executor: Any = importlib.import_module(
            "torch.distributed.checkpoint._async_process_executor"
        )
        executor._CHECKPOINT_PROCESS = None  # its finalizer ends the daemon


class DcpTuned(DcpProcess):
    """async_save with every option that helps: the best alternative.

    A thread stages into shared memory, kept between saves, so that the daemon receives
    handles instead of bytes. Save plans are cached. Plain state dicts are cheaper than
    `get_state_dict`. The trainer waits for the staging only before the optimizer's step.
    """

    name = "dcp-tuned"
    title = "DCP async_save, best tuned"

    def setup(self, job: Job) -> None:
        super().setup(job)
        staging = importlib.import_module("torch.distributed.checkpoint.staging")
        saver = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
        planner = importlib.import_module("torch.distributed.checkpoint.default_planner")
        cuda = job.device.type == "cuda"  # pinning and non-blocking copies need a device
        self.stager = staging.DefaultStager(
            staging.StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=cuda,
            )
        )
        self.options = {
            "process_group": self.group,
            "async_checkpointer_type": saver.AsyncCheckpointerType.PROCESS,
            "async_stager": self.stager,
            "planner": planner.DefaultSavePlanner(enable_plan_caching=True),
        }
        self.staged: Future[None] | None = None

    def _save(self, version: int) -> Future[Any]:
        response = self.dcp.async_save(
            raw_state(self.job), checkpoint_id=str(self.path(version)), **self.options
        )
        self.staged = response.staging_completion
        upload: Future[Any] = response.upload_completion
        return upload

    def before_optimizer_step(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def close(self) -> None:
        self.stager.close()
        super().close()


class TorchSnapshot(DcpThread):
    """torchsnapshot: staged in the call, written by a thread, no fsync."""

    name = "torchsnapshot"
    title = "torchsnapshot async_take"
    fsync = "no"

    @classmethod
    def missing(cls) -> str | None:
        found = importlib.util.find_spec("torchsnapshot")
        return "not installed" if found is None else None

    def setup(self, job: Job) -> None:
        super().setup(job)
        self.library = importlib.import_module("torchsnapshot")
        self.waiter = ThreadPoolExecutor(1)  # the library offers a wait and no callback

    def _save(self, version: int) -> Future[Any]:
        pending = self.library.Snapshot.async_take(
            path=str(self.path(version)),
            app_state={"model": self.job.module, "optimizer": self.job.optimizer},
            pg=self.group,
            replicated=["**"],  # every rank has the same state and writes a part
        )
        return self.waiter.submit(pending.wait)


PEERS = (TorchSave, DcpThread, DcpProcess, DcpTuned, TorchSnapshot, TorchLoad, RootShared)
