"""A loop that reduces its gradients by hand, and its adapter and group: a third adapter, written
against `tierckpt.checkpointer.adapter` and `tierckpt.group` alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests.support.training import Job, Net, rank
from tierckpt.checkpointer import Handle, PlainAdapter


class ManualReducer:
    """Averages gradients when they are ready, each by its own all-reduce.

    The ranks' weights in the average change from round to round, so a resumed run has to know the
    round that the previous run had reached.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.round = 0
        self.on_launch: Callable[[Sequence[torch.Tensor]], None] | None = None
        self._under_way: list[dist.Work] = []
        for param in params:
            param.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, param: torch.Tensor) -> None:
        assert param.grad is not None
        heavier = (self.round + rank()) % 2 == 0
        param.grad.mul_(0.75 if heavier else 0.25)
        work = dist.all_reduce(param.grad, async_op=True)
        assert work is not None
        self._under_way.append(work)
        if self.on_launch is not None:
            self.on_launch([param])

    def wait(self) -> None:
        """Return when all gradients are averages."""
        for work in self._under_way:
            work.wait()
        self._under_way.clear()
        self.round += 1


class ManualAdapter(PlainAdapter):
    """Releases a layer when its all-reduce was launched, and keeps the reducer's round."""

    releases_by_layer = True

    def __init__(self, reducer: ManualReducer) -> None:
        self.reducer = reducer
        self.agreed: list[int] = []

    def reduced_parameters(self) -> Sequence[torch.Tensor]:
        return self.reducer.params

    def attached(self, handle: Handle) -> None:
        super().attached(handle)
        self.reducer.on_launch = handle.release

    def vote(self) -> int:
        return 1 + self.handle.group.rank

    def boundary_passed(self, agreed_vote: int) -> None:
        self.agreed.append(agreed_vote)

    def pack(self) -> dict[str, int]:
        return {"round": self.reducer.round}

    def load(self, value: dict[str, int]) -> None:
        self.reducer.round = value["round"]

    def closed(self) -> None:
        self.reducer.on_launch = None


class _Minimum:
    def __init__(self, buffer: torch.Tensor, work: dist.Work) -> None:
        self._buffer, self._work = buffer, work

    def wait(self) -> list[int]:
        self._work.wait()
        return [int(value) for value in self._buffer.tolist()]


class ManualGroup:
    """All ranks of the job, over a process group of its own."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo")

    def all_gather_object(self, value: Any) -> list[Any]:
        everyone = [None] * self.size
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        dist.broadcast(buffer, source, group=self._group)

    def all_reduce_min(self, values: list[int]) -> _Minimum:
        buffer = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(buffer, dist.ReduceOp.MIN, group=self._group, async_op=True)
        assert work is not None
        return _Minimum(buffer, work)

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def meet(self, timeout_seconds: float) -> bool:
        try:
            dist.monitored_barrier(self._group, timeout=timedelta(seconds=timeout_seconds))
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = None


class Centred(Net):
    """A net with centres that each rank learns from its own data, without a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        return super().forward(x, use_branch) - self.centres


@dataclass
class ManualJob(Job):
    """Objects of a training script."""

    adapter: str = "tierckpt"
    reducer: ManualReducer | None = None

    def backward(self, iteration: int) -> None:
        self.optimizer.zero_grad()
        self.loss(iteration).backward()

    def iterate(self, iteration: int) -> str:
        self.backward(iteration)
        assert self.reducer is not None
        self.reducer.wait()
        self.optimizer.step()
        return ""

    def as_given(self) -> dict[str, Any]:
        """Arguments of its Checkpointer."""
        assert self.reducer is not None
        return {"adapter": ManualAdapter(self.reducer), "group": ManualGroup()}


def make_manual_job(seed: int = 1) -> ManualJob:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = Centred()
    torch.manual_seed(1000 * seed + rank())
    reducer = ManualReducer([p for p in model.parameters() if p is not model.centres])
    return ManualJob(model, [torch.optim.Adam(model.parameters(), lr=0.01)], reducer=reducer)
