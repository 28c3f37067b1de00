"""A tensor of many that gets another length in its place: only ranks that copy it see that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_ckpt
from tierckpt.snapshot import plan_check

RANKS = 2


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(6)))


def shorten(model: Any) -> None:
    model[3].weight.data = model[3].weight.data[:2].clone()


def trained(path: Path, shm: Path, steps: int) -> Any:
    """The versions lost, the steps that a restore returned, and the weights at the end."""
    model, lost = model_of(), set[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def receive(event: Any) -> None:
        if event.name == "failed":
            lost.add(event.version)

    given = {"path": path, "shm_dir": shm, "local_every_steps": 1, "when_busy": "wait"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_check, "FEW", 0)
        ckpt = ddp_ckpt.Checkpointer(model, optimizer, agent="inline", on_event=receive, **given)
        if not steps:
            shorten(model)
        at = int(ckpt.restore())
        for step in range(steps):
            if step == 3:
                ckpt.complete()
                shorten(model)
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            ckpt.step()
            ckpt.complete()
        ckpt.abandon()
    dist.barrier()
    return sorted(lost), at, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("steps", [6, 8])
def test_all_ranks_have_the_new_layout_at_one_version(
    steps: int, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    pool = ranks(RANKS)
    ended = pool.run(trained, tmp_path / "ckpts", shm_dir, steps)
    lost = {version for versions, _, _ in ended for version in versions}
    assert lost == {4, 5}
    again = pool.run(trained, tmp_path / "ckpts", shm_dir, 0)
    assert [at for _, at, _ in again] == [steps] * RANKS
    assert [weights for *_, weights in again] == [weights for *_, weights in ended]
