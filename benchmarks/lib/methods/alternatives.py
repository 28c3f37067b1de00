"""The alternatives: torch.save, torch.distributed.checkpoint (DCP) and torchsnapshot."""

from __future__ import annotations

import contextlib
import importlib
import os
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from lib.methods.method import FolderMethod, Job, Waiters


def raw_state(job: Job) -> dict[str, Any]:
    """References to the live tensors of model and optimizer, without a copy. Plain dicts: the
    stagers of some torch releases cannot copy the ordered ones of modules."""
    return {"model": dict(job.module.state_dict()), "optimizer": job.optimizer.state_dict()}


class TorchSave(FolderMethod):
    """Rank 0 writes everything while all wait, as in most training scripts."""

    name = "torch-save"
    title = "torch.save, rank 0, barrier"
    fsync = "yes"

    def setup(self, job: Job) -> None:
        super().setup(job)
        self.group = dist.new_group(backend="gloo")

    def boundary(self, version: int, due: bool) -> None:
        if not due:
            return
        if self.job.rank == 0:
            self._write(version)
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


class TorchSnapshot(FolderMethod):
    """torchsnapshot: staged in the call, written by a thread, no fsync."""

    name = "torchsnapshot"
    title = "torchsnapshot async_take"
    fsync = "no"

    @classmethod
    def missing(cls) -> str | None:
        try:
            importlib.import_module("torchsnapshot")
        except ImportError as error:
            return f"not installed ({error})"
        return None

    def setup(self, job: Job) -> None:
        super().setup(job)
        self.library = importlib.import_module("torchsnapshot")
        self.group = dist.new_group(backend="gloo")
        self.waiters = Waiters()

    def boundary(self, version: int, due: bool) -> None:
        if not due:
            return
        self.drain()  # never two in flight, as with the other methods
        pending = self.library.Snapshot.async_take(
            path=str(self.path(version)),
            app_state={"model": self.job.module, "optimizer": self.job.optimizer},
            pg=self.group,
            replicated=["**"],  # every rank has the same state and writes a part
        )
        self.waiters.start(pending.wait, lambda: self.finished(version))

    def drain(self) -> None:
        self.waiters.join()

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self.waiters.join()


PEERS = (TorchSave, DcpThread, DcpProcess, DcpTuned, TorchSnapshot)
