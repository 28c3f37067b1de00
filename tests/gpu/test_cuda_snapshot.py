"""Snapshots on a GPU: exact, and the barrier holds whatever path the bytes take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw-capturable": lambda p: torch.optim.AdamW(p, capturable=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}
PATHS = ("fed", "cloned", "forward")
"""How the bytes leave the device: fed at the barrier, cloned there, or fed from the forward on."""


def build(optimizer: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048),
        torch.nn.BatchNorm1d(2048),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(2048, 512),
    ).cuda()
    return model, OPTIMIZERS[optimizer](model.parameters())


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x = torch.randn(64, 512, device="cuda")
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [*model.state_dict().values()]
    for values in optimizer.state_dict()["state"].values():
        tensors += [v for v in values.values() if isinstance(v, torch.Tensor)]
    return [t.detach().cpu().clone() for t in tensors]


@pytest.fixture(params=PATHS)
def path_taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    from tierckpt import cuda

    monkeypatch.setattr(cuda, "CLONE_FROM_BYTES", 0 if request.param == "cloned" else 1 << 60)
    return str(request.param)


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_every_version_restores_bit_for_bit(
    optimizer_name: str, path_taken: str, tmp_path: Path, shm_dir: Path
) -> None:
    settings: dict[str, Any] = {
        "path": tmp_path / "c",
        "shm_dir": shm_dir,
        "local_every_seconds": 0.0,
    }
    model, optimizer = build(optimizer_name)
    ckpt = tierckpt.Checkpointer(model, optimizer, **settings)
    # Without a hook everything is released at once; withheld, it is left to the barrier.
    ckpt._release_early = path_taken == "forward"
    ckpt.restore()
    for _ in range(5):
        train_step(model, optimizer)
        ckpt.step()
    expected, rng = state_of(model, optimizer), torch.cuda.get_rng_state()
    following = [train_step(model, optimizer) for _ in range(3)]
    assert ckpt.wait(60)
    ckpt.abandon()

    model, optimizer = build(optimizer_name)
    torch.manual_seed(99)
    again = tierckpt.Checkpointer(model, optimizer, **settings)
    assert again.restore() == 5
    assert again.restored.levels == {"memory": 1}
    assert all(map(torch.equal, expected, state_of(model, optimizer)))
    assert torch.equal(rng, torch.cuda.get_rng_state())
    assert [train_step(model, optimizer) for _ in range(3)] == following
    again.close()
    assert not any(shm_dir.iterdir())


def test_slots_are_page_locked_and_copies_asynchronous(tmp_path: Path, shm_dir: Path) -> None:
    model, optimizer = build("adamw-fused")
    ckpt = tierckpt.Checkpointer(
        model, optimizer, path=tmp_path / "c", shm_dir=shm_dir, local_every_seconds=0.0
    )
    ckpt.restore()
    for _ in range(4):
        train_step(model, optimizer)
        ckpt.step()
    assert ckpt.wait(60)
    used = [s for s in ckpt._pool.slots if s is not None]
    assert used
    for slot in used:
        assert torch.frombuffer(slot.image(), dtype=torch.uint8).is_pinned()
    ckpt.close()


def test_gpu_checkpoint_restores_on_the_cpu(tmp_path: Path, shm_dir: Path) -> None:
    model, optimizer = build("adamw-foreach")
    ckpt = tierckpt.Checkpointer(
        model, optimizer, path=tmp_path / "c", shm_dir=shm_dir, local_every_steps=1
    )
    ckpt.restore()
    for _ in range(3):
        train_step(model, optimizer)
        ckpt.step()
    ckpt.close()
    expected = state_of(model, optimizer)
    model = model.cpu()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    again = tierckpt.Checkpointer(model, optimizer, path=tmp_path / "c", shm_dir=shm_dir)
    assert again.restore() == 3
    assert all(map(torch.equal, expected, state_of(model, optimizer)))
    again.close()
