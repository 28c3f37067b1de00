"""Ways to restart: the checkpoint that each leaves, and how it restores that.

Both runs of the ranks of `restart.py` use them. All calls are collective.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

WAIT_LIMIT_S = 120.0


@dataclass
class Job:
    """The training of one rank. `root` (disk) and `memory` (tmpfs) are folders of the way alone."""

    model: nn.Module
    module: nn.Module
    optimizer: Optimizer
    root: Path
    memory: Path
    rank: int
    world: int
    nodes: int
    iterate: Callable[[], None]


class Way:
    """A fresh start without a checkpoint: the cost that every restart has."""

    title = "no restart: start afresh"
    module = "torch"
    lost: ClassVar[tuple[str, ...]] = ()
    """Losses between the runs: `memory`, `node` (the disk of the last one), `disks`."""
    warm = True
    """Whether it is also measured with files in the page cache, as after a crash of processes."""
    ours = False

    def leave(self, job: Job) -> None:
        """Leave a checkpoint of the state at the time of return."""

    def restore(self, job: Job) -> dict[str, float]:
        """Restore that state; return the `read` and `exchanged` bytes, if known."""
        return {}

    def close(self) -> None:
        """Release everything. Called after the first step."""


class Ours(Way):
    """A level of Tierckpt."""

    module = "ddp_ckpt"
    ours = True
    settings: ClassVar[dict[str, Any]] = {}

    def _attach(self, job: Job) -> Any:
        self.events: set[str] = set()
        return importlib.import_module(self.module).Checkpointer(
            job.model,
            job.optimizer,
            path=str(job.root / "{node}"),
            shm_dir=str(job.memory),
            node=f"node{job.rank * self._nodes(job) // job.world}",
            memory_every_steps=0,
            local_every_steps=1_000_000,
            local_every_seconds=0,
            persistent_every_seconds=0,
            boundary="explicit",
            on_event=lambda event: self.events.add(f"{event.name} {event.level}"),
            **{
                k: v.format(root=job.root) if isinstance(v, str) else v
                for k, v in self.settings.items()
            },
        )

    def _nodes(self, job: Job) -> int:
        return job.nodes

    def leave(self, job: Job) -> None:
        ckpt = self._attach(job)
        job.iterate()
        ckpt.step()
        ckpt.save(now=True)
        self._finish(ckpt)

    def _finish(self, ckpt: Any) -> None:
        ckpt.abandon()

    def restore(self, job: Job) -> dict[str, float]:
        self._ckpt = self._attach(job)
        restored = self._ckpt.restore()
        if restored.version < 1:
            raise RuntimeError("nothing was restored")
        phases = {f"seconds.{name}": value for name, value in restored.seconds.items()}
        return {"read": restored.read_bytes, "exchanged": restored.exchanged_bytes, **phases}

    def close(self) -> None:
        self._ckpt.abandon()


class OursMemory(Ours):
    """All processes were killed; their slots are in shared memory."""

    title = "Tierckpt, memory"


class OursLocal(Ours):
    """All nodes were rebooted; their disks are intact."""

    title = "Tierckpt, local"
    lost = ("memory",)


class OursPeer(Ours):
    """All memory and the last node with its disk are lost; its shards are rebuilt."""

    title = "Tierckpt, peer (a node is lost)"
    lost = ("memory", "node")
    settings: ClassVar[dict[str, Any]] = {
        "peer_redundancy": "partner",
        "peer_interface": "lo",
        "agent_linger_seconds": 0.0,  # agents are lost with their nodes
    }

    def _nodes(self, job: Job) -> int:
        return max(2, job.nodes)

    def _finish(self, ckpt: Any) -> None:
        limit = time.monotonic() + WAIT_LIMIT_S
        while "committed peer" not in self.events and ckpt._node.first == ckpt.group.rank:
            if time.monotonic() > limit:
                raise TimeoutError("the version was not protected")
            ckpt.wait()
            time.sleep(0.01)
        ckpt.group.barrier()
        ckpt.abandon()


class OursPersistent(Ours):
    """All nodes are lost."""

    title = "Tierckpt, persistent"
    lost = ("memory", "disks")
    settings: ClassVar[dict[str, Any]] = {
        "persistent_path": "{root}/shared",
        "persistent_every_steps": 1_000_000,
    }

    def _finish(self, ckpt: Any) -> None:
        ckpt.close()


class TorchLoad(Way):
    """Rank 0 loads the file and broadcasts every tensor."""

    title = "torch.load on rank 0, broadcast"

    def leave(self, job: Job) -> None:
        job.iterate()
        if job.rank == 0:
            state = {"model": job.module.state_dict(), "optimizer": job.optimizer.state_dict()}
            torch.save(state, job.root / "state.pt")
        dist.barrier()

    def restore(self, job: Job) -> dict[str, float]:
        state: Any = None
        if job.rank == 0:
            state = torch.load(job.root / "state.pt", weights_only=True)
        shell = [_without_data(state)]
        dist.broadcast_object_list(shell, src=0)
        received = 0
        if job.rank != 0:
            state = _with_room(shell[0])
        for tensor in _tensors(state):
            dist.broadcast(tensor, src=0)
            received += tensor.nbytes if job.rank else 0
        job.module.load_state_dict(state["model"])
        job.optimizer.load_state_dict(state["optimizer"])
        return {"exchanged": received}


class Dcp(Way):
    """torch.distributed.checkpoint, used as in its tutorial."""

    title = "DCP load"
    module = "torch.distributed.checkpoint"

    def leave(self, job: Job) -> None:
        job.iterate()
        importlib.import_module(self.module).save(
            self._state(job), checkpoint_id=str(job.root / "dcp")
        )

    def restore(self, job: Job) -> dict[str, float]:
        state = self._state(job)
        importlib.import_module(self.module).load(state, checkpoint_id=str(job.root / "dcp"))
        helper = importlib.import_module(f"{self.module}.state_dict")
        helper.set_state_dict(
            job.model,
            job.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return {}

    def _state(self, job: Job) -> dict[str, Any]:
        helper = importlib.import_module(f"{self.module}.state_dict")
        model, optimizer = helper.get_state_dict(job.model, job.optimizer)
        return {"model": model, "optimizer": optimizer}


WAYS: dict[str, type[Way]] = {
    "nothing": Way,
    "ours-memory": OursMemory,
    "ours-local": OursLocal,
    "ours-peer": OursPeer,
    "ours-persistent": OursPersistent,
    "torch-load": TorchLoad,
    "dcp": Dcp,
}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        return [tensor for each in values for tensor in _tensors(each)]
    return []


def _without_data(value: Any) -> Any:
    """The same structure with a `_Shape` in place of every tensor."""
    if isinstance(value, torch.Tensor):
        return _Shape(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {k: _without_data(v) for k, v in value.items()}
    return [_without_data(v) for v in value] if isinstance(value, (list, tuple)) else value


def _with_room(value: Any) -> Any:
    if isinstance(value, _Shape):
        return torch.empty(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {k: _with_room(v) for k, v in value.items()}
    return [_with_room(v) for v in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: torch.dtype
