"""Copies of a DDP module with a checkpointer: they train as other copies, without a
checkpointer."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.support.rank_pool import RankPool
from tests.support.training import Job, Place, attach, make_job, train


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.save": pickled,
    "copy.deepcopy": copy.deepcopy,
}


def copied(way: str, boundary: str, place: Place) -> dict[str, Any]:
    job = make_job()
    attached = attach(job, place, boundary=boundary)
    train(job, attached.ckpt, range(3))
    model = COPIES[way](job.model)
    other = Job(model, [torch.optim.Adam(model.parameters(), lr=0.01)])
    assert {p.data_ptr() for p in model.parameters()}.isdisjoint(
        p.data_ptr() for p in job.model.parameters()
    )
    streams = torch.get_rng_state()
    gradients = []
    for each in (other, job):
        torch.set_rng_state(streams)
        each.optimizer.zero_grad()
        each.loss(5).backward()
        gradients.append(each.bare.head.weight.grad)
    told: dict[str, Any] = {"same": torch.equal(*gradients)}
    attached.ckpt.abandon()
    # It can have a checkpointer of its own, and after that a hook.
    again = attach(other, Place(f"{place.path} copy", place.shm))
    told["by layer"] = again.ckpt.adapter.releases_by_layer
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(other, again.ckpt, range(2))
    told["version"] = again.ckpt.version
    again.ckpt.abandon()
    return told


@pytest.mark.parametrize(
    ("way", "boundary"), [("torch.save", "explicit"), ("copy.deepcopy", "forward")]
)
def test_a_copy_of_the_module_trains_by_itself(
    way: str, boundary: str, pool: RankPool, place: Place
) -> None:
    for told in pool.run(copied, way, boundary, place):
        assert told["same"]
        assert told["by layer"]
        assert told["version"] == 2
