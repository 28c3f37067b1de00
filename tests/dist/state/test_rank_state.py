"""The own state of modules is stored by each rank for itself, like buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
import tierckpt
from tests.support.state_matrix.layers import Filled
from tests.support.state_matrix.ownstates import hooked

RANKS = 2


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), hooked(), Filled())


def facts(model: nn.Module) -> list[Any]:
    """Values that differ between ranks."""
    own = [model[2].count, *(each.tolist() for each in model[2].seen)]
    return [*own, *(buffer.tolist() for buffer in model.buffers())]


def trained(path: Path, shm: Path, steps: int) -> tuple[list[Any], list[Any]]:
    """This rank's values after its restore, and at the end."""
    inner = model_of(seed=1 if steps else 2)
    inner[2].count = 10 * dist.get_rank()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"path": path, "shm_dir": shm, "local_every_steps": 1}
    with ddp_ckpt.Checkpointer(model, optimizer, agent="inline", **given) as ckpt:
        ckpt.restore()
        started = facts(inner)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            ckpt.step()
    return started, facts(inner)


def test_each_rank_has_its_own_back(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """A single rank gets rank 0's."""
    path = tmp_path / "ckpts"
    pool = ranks(RANKS)
    ends = [end for _, end in pool.run(trained, path, shm_dir, 3)]
    assert ends[0][0] != ends[1][0]
    assert [started for started, _ in pool.run(trained, path, shm_dir, 0)] == ends
    alone = model_of(seed=3)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    ckpt = tierckpt.Checkpointer(alone, optimizer, path=path, shm_dir=shm_dir, agent="inline")
    assert ckpt.restore() == 3
    assert facts(alone) == ends[0]
    ckpt.abandon()
