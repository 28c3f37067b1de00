"""Objects that keep another part of the state on every rank are refused at attach, by name.

The unit tier has look-alikes of the same names; here they are torch's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_ckpt
from tests.support.training import Place
from tierckpt.errors import UnsupportedStateError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))


def wrapped_by_fsdp() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = net()
    model[1] = FullyShardedDataParallel(model[1], device_id=torch.device("cpu"))
    return model, torch.optim.Adam(model.parameters())


def sharded_in_place() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import fully_shard
    model = net()
    fully_shard(model[1], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters())


def sharded_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(net())
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)


def averaging_now_and_then() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = nn.parallel.DistributedDataParallel(net())
    inner = torch.optim.Adam(model.parameters())
    return model, PostLocalSGDOptimizer(inner, PeriodicModelAverager(2, warmup_steps=1))


def test_ranks_that_train_apart_are_refused(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    for text, left in ranks(2).run(refused_apart, Place.under(tmp_path, shm_dir)):
        assert "PostLocalSGDOptimizer lets ranks diverge" in text
        assert left == []


def refused_apart(place: Place) -> tuple[str, list[Path]]:
    with pytest.raises(UnsupportedStateError) as caught:
        ddp_ckpt.Checkpointer(*averaging_now_and_then(), path=place.path, shm_dir=place.shm)
    left = [path for folder in (place.path, place.shm) for path in Path(folder).rglob("*")]
    return str(caught.value), left


def attach(make: Any, place: Place) -> tuple[str, int, list[Path]]:
    """The error, the number of elements in this rank's first moment, and the files that are
    left."""
    model, optimizer = make()
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()  # it trains: only the checkpointer refuses it
    moments = [state["exp_avg"] for state in getattr(optimizer, "optim", optimizer).state.values()]
    here = sum((m.to_local() if hasattr(m, "to_local") else m).numel() for m in moments)
    with pytest.raises(UnsupportedStateError) as caught:
        ddp_ckpt.Checkpointer(model, optimizer, path=place.path, shm_dir=place.shm)
    left = [path for folder in (place.path, place.shm) for path in Path(folder).rglob("*")]
    return str(caught.value), here, left


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (wrapped_by_fsdp, ["'1' is sharded by FSDP", "torch.distributed.checkpoint"]),
        (sharded_in_place, ["'1' is sharded by FSDP", "torch.distributed.checkpoint"]),
        (sharded_optimizer, ["ZeroRedundancyOptimizer", "inner optimizer class"]),
    ],
)
def test_it_is_refused_on_every_rank(
    make: Any, said: list[str], ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    elements = sum(parameter.numel() for parameter in net().parameters())
    for text, here, left in ranks(2).run(attach, make, Place.under(tmp_path, shm_dir)):
        assert all(part in text for part in said), text
        assert 0 < here < elements, "it really is sharded"
        assert left == []
