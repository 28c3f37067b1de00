"""`load_from` between the backward passes of a step: other weights below gradients are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
from tierckpt.errors import RestoreError
from tierckpt.testing import raw_bytes, tiny_model

PASSES = 2


def accumulate(root: Path, shm_dir: str) -> list[Any]:
    """Load between the two passes of a step, and after the step, on every rank."""
    torch.manual_seed(3)
    net = DistributedDataParallel(tiny_model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found: list[Any] = []
    with ddp_ckpt.Checkpointer(net, optimizer, path=root / "job", shm_dir=shm_dir) as ckpt:
        for number in range(2 * PASSES):
            steps = number % PASSES == PASSES - 1
            net.require_backward_grad_sync = steps  # as no_sync() does
            net(torch.randn(8, 12)).square().sum().backward()
            if steps:
                optimizer.step()
            elif dist.get_rank() == 0:
                net.zero_grad()  # rank 1 alone has gradients
            ckpt.step()
            before = [raw_bytes(each) for each in net.state_dict().values()]
            try:
                ckpt.load_from(root / "source")
            except RestoreError as error:
                assert [raw_bytes(each) for each in net.state_dict().values()] == before
                found.append(str(error))
                net.zero_grad()
                ckpt.load_from(root / "source")
            if steps:
                found.append([raw_bytes(each) for each in net.state_dict().values()] == before)
                net.zero_grad()
        ckpt.abandon()
    return found


def train_source(root: Path, shm_dir: str) -> None:
    torch.manual_seed(4)
    net = DistributedDataParallel(tiny_model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ddp_ckpt.Checkpointer(net, optimizer, path=root / "source", shm_dir=shm_dir) as ckpt:
        net(torch.randn(8, 12)).square().sum().backward()
        optimizer.step()
        ckpt.step()


def test_ddp_ranks_refuse_other_weights_below_the_gradients_of_one_of_them(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    ranks(2).run(train_source, tmp_path, str(shm_dir))
    for found in ranks(2).run(accumulate, tmp_path, str(shm_dir)):
        refusal, after_a_step, again, after_the_next = found
        assert refusal == again
        assert refusal.startswith("rank 1: load_from() in the middle of a gradient accumulation")
        assert "model.zero_grad() first" in refusal
        assert (after_a_step, after_the_next) == (False, False), "the source was loaded"
