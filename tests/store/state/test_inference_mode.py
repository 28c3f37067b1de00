"""Evaluations run in inference mode; its tensors cannot be changed outside of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tierckpt
from tierckpt.testing import TinyJob


@pytest.mark.parametrize("before", [1, 5], ids=["first version", "later version"])
def test_a_version_asked_for_there_costs_no_other(before: int, path: Path, shm_dir: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    settings = {"path": path, "shm_dir": shm_dir, "agent": "inline", "memory_every_steps": 4}
    with tierckpt.Checkpointer(model, optimizer, **settings) as ckpt:
        for step in range(12):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            ckpt.step()
            if step + 1 == before:
                with torch.inference_mode():
                    ckpt.save(now=True)
    assert ckpt._log.counts.get("failed", 0) == 0
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    with tierckpt.Checkpointer(model, optimizer, **settings) as again:
        assert again.restore().version == 12
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())


def test_tensors_restored_in_inference_mode_can_be_trained(path: Path, shm_dir: Path) -> None:
    expected = TinyJob(None).run(5).fingerprint()
    with TinyJob(path, shm_dir=shm_dir, agent="inline") as job:
        job.run(3)
    with TinyJob(path, seed=1, shm_dir=shm_dir, agent="inline") as again:
        with torch.inference_mode():
            again.restore()
        assert again.iteration == 3
        assert again.run(5).fingerprint() == expected
