"""Mechanisms for DLIO's setting `checkpoint_mechanism_classname`: ours, and its own with fsync.

    mpirun -np 8 dlio_benchmark workload=llama_8b_zero3 \\
        ++workload.checkpoint.checkpoint_mechanism_classname=lib.dlio.mechanisms.Tierckpt

with the folder `benchmarks` in PYTHONPATH. DLIO calls one method after the other on every rank, and
takes the time of each call. It makes the tensors, as its workload describes them.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing

import ddp_ckpt
import tierckpt

FOLDER = "tierckpt"
"""The job's path, inside DLIO's checkpoint folder."""


class TorchSave(PyTorchCheckpointing):
    """DLIO's own writer, one `torch.save` a file, with fsync: DLIO's entry `checkpoint.fsync` sets
    an argument that its writer does not read."""

    _instance: TorchSave | None = None

    @staticmethod
    def get_instance() -> TorchSave:
        """The one instance of this process; DLIO's way to make it."""
        if TorchSave._instance is None:
            TorchSave._instance = TorchSave()
        return TorchSave._instance

    def __init__(self) -> None:
        super().__init__()
        self.args.checkpoint_fsync = True


class Tierckpt(PyTorchCheckpointing):
    """Versions on the local level. DLIO's step is the number of the version.

    Each rank has tensors of its own, as under ZeRO-3, and stores all of them. `save_checkpoint`
    returns when the version is fsync'ed on this rank's node. `load_checkpoint` restores in place:
    from memory if the newest versions are still there, so a benchmark of a disk reads in a job of
    its own. Settings beyond those given here come from the environment (TIERCKPT_...).
    """

    _instance: Tierckpt | None = None

    @staticmethod
    def get_instance() -> Tierckpt:
        """The one instance of this process."""
        if Tierckpt._instance is None:
            Tierckpt._instance = Tierckpt()
        return Tierckpt._instance

    def __init__(self) -> None:
        super().__init__()
        self._begin_process_group()
        self._model = torch.nn.ParameterDict()
        for kind in ("model_state", "layer_state", "optimization_state"):
            for name, tensor in _tensors(getattr(self, kind), kind):
                self._model[name] = torch.nn.Parameter(tensor, requires_grad=False)
        clock = torch.zeros(1, requires_grad=True)
        clock.grad = torch.ones(1)
        self._optimizer = torch.optim.SGD([clock], lr=1.0)
        self._model["clock"] = self._optimizer.param_groups[0]["params"][0]
        self._troubles: list[str] = []
        self._checkpointer = tierckpt.Checkpointer(
            self._model,
            self._optimizer,
            group=ddp_ckpt.TorchGroup(),
            path=os.path.join(self.args.checkpoint_folder, FOLDER),
            forward_changes="*",
            replicas="off",
            local_keep=max(2, self.args.num_checkpoints_write),
            on_event=self._event,
        )

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        """Make the state a new one, and store it. Raises RuntimeError if it is not durable."""
        self.checkpoint_storage.create_node(f"global_epoch{epoch}_step{step_number}", exist_ok=True)
        self._optimizer.step()
        self._checkpointer.save(now=True)
        found = self._checkpointer.version
        if self._troubles or found != step_number:
            raise RuntimeError(
                f"step {step_number}: v{found} was stored, with these errors: {self._troubles}. "
                "DLIO's steps must begin at 1, in an empty checkpoint folder"
            )

    def load_checkpoint(self, epoch: int, step_number: int) -> None:
        """Restore the version of this step. Raises RestoreError if it is not complete and sound."""
        self._checkpointer.restore(version=step_number)

    def finalize(self) -> None:
        """Remove all that only a restart needs."""
        super().finalize()
        self._checkpointer.close()
        dist.destroy_process_group()

    def _event(self, event: Any) -> None:
        if event.severity >= logging.ERROR:
            self._troubles.append(event.text())

    def _begin_process_group(self) -> None:
        """Start gloo among DLIO's ranks. MASTER_ADDR is needed on several nodes only."""
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        with socket.socket() as free:
            free.bind(("", 0))
            port = self.comm.bcast(free.getsockname()[1], root=0)
        rank, size = self.args.my_rank, self.args.comm_size
        dist.init_process_group(
            "gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=size
        )


def _tensors(value: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors of nested dicts, with names that a module accepts."""
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    return [each for key in value or () for each in _tensors(value[key], f"{name}_{key}")]
