"""Ways to come back: what each leaves behind before a restart, and what it does after it.

Used by both runs of `restart.py`'s ranks. All calls are collective.
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
    """The training of one rank. `root` and `memory` are the way's own folders; disk, tmpfs."""

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
    """Start afresh: nothing is left, nothing comes back. What a restart costs in any case."""

    title = "no restart: start afresh"
    module = "torch"
    lost: ClassVar[tuple[str, ...]] = ()
    """What is gone between the lives: `memory`, `node` (the last one's disk), `disks`."""
    warm = True
    """Also measured with its files in the page cache, as after the death of processes alone."""
    ours = False

    def leave(self, job: Job) -> None:
        """Leave something behind that holds the state as it is on return."""

    def come_back(self, job: Job) -> dict[str, float]:
        """Have that state in the live objects; counts of `read` and `exchanged` bytes, if known."""
        return {}

    def close(self) -> None:
        """After the first step."""


class Ours(Way):
    """One of our levels."""

    module = "ddp_ckpt"
    ours = True
    settings: ClassVar[dict[str, Any]] = {}

    def _attach(self, job: Job) -> Any:
        self.heard: set[str] = set()
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
            on_event=lambda event: self.heard.add(f"{event.name} {event.level}"),
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

    def come_back(self, job: Job) -> dict[str, float]:
        self._ckpt = self._attach(job)
        restored = self._ckpt.restore()
        if restored.version < 1:
            raise RuntimeError("nothing was restored")
        phases = {f"seconds.{name}": value for name, value in restored.seconds.items()}
        return {"read": restored.read_bytes, "exchanged": restored.exchanged_bytes, **phases}

    def close(self) -> None:
        self._ckpt.abandon()


class OursMemory(Ours):
    """Processes died; their slots are in shared memory."""

    title = "ours, memory"


class OursLocal(Ours):
    """Nodes were rebooted; their disks are there."""

    title = "ours, local"
    lost = ("memory",)


class OursPeer(Ours):
    """The last node is gone with its disk, and all memory; its shards are rebuilt."""

    title = "ours, peer (a node is lost)"
    lost = ("memory", "node")
    settings: ClassVar[dict[str, Any]] = {
        "peer_redundancy": "partner",
        "peer_interface": "lo",
        "agent_linger_seconds": 0.0,  # they are lost with their nodes
    }

    def _nodes(self, job: Job) -> int:
        return max(2, job.nodes)

    def _finish(self, ckpt: Any) -> None:
        limit = time.monotonic() + WAIT_LIMIT_S
        while "committed peer" not in self.heard and ckpt._node.first == ckpt.group.rank:
            if time.monotonic() > limit:
                raise TimeoutError("the version was not protected")
            ckpt.wait()
            time.sleep(0.01)
        ckpt.group.barrier()
        ckpt.abandon()


class OursPersistent(Ours):
    """All nodes are gone."""

    title = "ours, persistent"
    lost = ("memory", "disks")
    settings: ClassVar[dict[str, Any]] = {
        "persistent_path": "{root}/shared",
        "persistent_every_steps": 1_000_000,
    }

    def _finish(self, ckpt: Any) -> None:
        ckpt.close()


class TorchLoad(Way):
    """Rank 0 loads, then every tensor is broadcast."""

    title = "torch.load on rank 0, broadcast"

    def leave(self, job: Job) -> None:
        job.iterate()
        if job.rank == 0:
            state = {"model": job.module.state_dict(), "optimizer": job.optimizer.state_dict()}
            torch.save(state, job.root / "state.pt")
        dist.barrier()

    def come_back(self, job: Job) -> dict[str, float]:
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
    """torch.distributed.checkpoint, as its tutorial has it."""

    title = "DCP load"
    module = "torch.distributed.checkpoint"

    def leave(self, job: Job) -> None:
        job.iterate()
        importlib.import_module(self.module).save(
            self._state(job), checkpoint_id=str(job.root / "dcp")
        )

    def come_back(self, job: Job) -> dict[str, float]:
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


class TorchSnapshot(Way):
    """torchsnapshot, everything replicated."""

    title = "torchsnapshot restore"
    module = "torchsnapshot"

    def leave(self, job: Job) -> None:
        job.iterate()
        importlib.import_module(self.module).Snapshot.take(
            path=str(job.root / "snapshot"), app_state=self._state(job), replicated=["**"]
        )

    def come_back(self, job: Job) -> dict[str, float]:
        snapshot = importlib.import_module(self.module).Snapshot(str(job.root / "snapshot"))
        for group in job.optimizer.param_groups:  # it restores in place, so there must be a place
            for param in group["params"]:
                param.grad = torch.zeros_like(param)
        job.optimizer.step()
        job.optimizer.zero_grad()
        snapshot.restore(app_state=self._state(job))
        return {}

    def _state(self, job: Job) -> dict[str, Any]:
        return {"model": job.module, "optimizer": job.optimizer}


WAYS: dict[str, type[Way]] = {
    "nothing": Way,
    "ours-memory": OursMemory,
    "ours-local": OursLocal,
    "ours-peer": OursPeer,
    "ours-persistent": OursPersistent,
    "torch-load": TorchLoad,
    "dcp": Dcp,
    "torchsnapshot": TorchSnapshot,
}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        return [tensor for each in values for tensor in _tensors(each)]
    return []


def _without_data(value: Any) -> Any:
    """The same with (shape, dtype) for every tensor."""
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
