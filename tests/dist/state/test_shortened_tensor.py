"""A tensor of many that gets another length in its place: only ranks that copy it see that.

The others learn it from the votes, one boundary later, or more of them when a copy takes long.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_ckpt
from tierckpt.coordination import Agreement
from tierckpt.core import MEMORY
from tierckpt.snapshot import copy_plan

RANKS = 2


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(6)))


def shorten(model: Any) -> None:
    model[3].weight.data = model[3].weight.data[:2].clone()


def vote_late(patch: pytest.MonkeyPatch, boundaries: int) -> None:
    """Vote as a rank that copies version 3 for so many boundaries more."""
    vote, left = Agreement._vote_about, [boundaries]

    def voted(self: Agreement, level: Any, version: Any, *more: Any) -> Any:
        if level != MEMORY or version is None or version.id.version != 3 or not left[0]:
            return vote(self, level, version, *more)
        left[0] -= 1
        kept = version.here(level)
        version.start(level)
        try:
            return vote(self, level, version, *more)
        finally:
            version.tell(level, kept)

    patch.setattr(Agreement, "_vote_about", voted)


Weights = list[Any]


def trained(path: Path, shm: Path, steps: int, late: int) -> tuple[set[int], dict[int, Weights]]:
    """The versions lost on this rank, and the weights at each version."""
    model, lost, weights = model_of(), set[int](), dict[int, Weights]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def receive(event: Any) -> None:
        if event.name == "failed":
            lost.add(event.version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_plan, "FEW", 0)
        if dist.get_rank() == 0:
            vote_late(patch, late)
        ckpt = checkpointer(model, optimizer, path, shm, on_event=receive)
        ckpt.restore()
        for step in range(steps):
            if step == 3:
                ckpt.complete()
                shorten(model)
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            ckpt.step()
            ckpt.complete()
            weights[step + 1] = [p.tolist() for p in model.parameters()]
        ckpt.abandon()
    dist.barrier()
    return lost, weights


def checkpointer(model: Any, optimizer: Any, path: Path, shm: Path, **more: Any) -> Any:
    given = {"path": path, "shm_dir": shm, "local_every_steps": 1, "local_keep": 99}
    return ddp_ckpt.Checkpointer(
        model, optimizer, agent="inline", when_busy="wait", **given, **more
    )


def restored(path: Path, shm: Path, versions: list[int]) -> dict[int, Weights]:
    """The weights of the newest version, and of these."""
    model, found = model_of(), dict[int, Weights]()
    shorten(model)
    ckpt = checkpointer(model, torch.optim.SGD(model.parameters(), lr=0.1), path, shm)
    for version in (None, *versions):
        at = ckpt.restore(version=version).version
        found[at] = [p.tolist() for p in model.parameters()]
    ckpt.abandon()
    dist.barrier()
    return found


@pytest.mark.parametrize(("more", "late"), [(2, 0), (0, 1), (0, 2)])
def test_all_ranks_have_the_new_layout_at_one_version(
    more: int, late: int, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    pool, steps = ranks(RANKS), 6 + late + more
    ended = pool.run(trained, tmp_path / "ckpts", shm_dir, steps, late)
    lost = {version for versions, _ in ended for version in versions}
    assert {4, 5} <= lost <= {*range(4, 6 + late)}
    kept = sorted({*range(4, steps + 1)} - lost)
    assert kept[-1] == steps
    again = pool.run(restored, tmp_path / "ckpts", shm_dir, kept)
    wanted = [{version: weights[version] for version in kept} for _, weights in ended]
    assert again == wanted
