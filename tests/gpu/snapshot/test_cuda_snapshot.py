"""Snapshots on a GPU: exact, and the barrier holds on every path of the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.support.cuda_job import OPTIMIZERS
from tierckpt.snapshot import cuda
from tierckpt.storage import Slot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PATHS = ("fed", "cloned", "forward")
"""Paths of the bytes: fed at the barrier, cloned there, or fed from the forward pass on."""


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
    return float(loss.detach())


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [*model.state_dict().values()]
    for values in optimizer.state_dict()["state"].values():
        tensors += [v for _, v in sorted(values.items()) if isinstance(v, torch.Tensor)]
    return [t.detach().cpu().clone() for t in tensors]


@pytest.fixture(params=PATHS)
def path_taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The path that the bytes must take; checked at the end."""
    monkeypatch.setattr(cuda, "CLONE_FROM_BYTES", 0 if request.param == "cloned" else 1 << 60)
    cloned = watch_clones(monkeypatch)
    yield str(request.param)
    assert any(cloned) == (request.param == "cloned")


def watch_clones(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """True for every barrier that cloned its remaining blocks, False for the others."""
    cloned: list[bool] = []
    clone_rest = cuda.CudaEngine._clone_rest

    def watched(self: cuda.CudaEngine) -> bool:
        cloned.append(clone_rest(self))
        return cloned[-1]

    monkeypatch.setattr(cuda.CudaEngine, "_clone_rest", watched)
    return cloned


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
    ckpt._active.release_early = path_taken == "forward"
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


def test_where_a_clone_would_crowd_the_training_the_rest_is_fed(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "CLONE_FROM_BYTES", 0)
    cloned = watch_clones(monkeypatch)
    settings: dict[str, Any] = {
        "path": tmp_path / "c",
        "shm_dir": shm_dir,
        "local_every_seconds": 0.0,
    }
    model, optimizer = build("adamw-fused")
    ckpt = tierckpt.Checkpointer(model, optimizer, **settings)
    ckpt._active.release_early = False
    ckpt.restore()
    train_step(model, optimizer)
    free, total = torch.cuda.mem_get_info()
    spare = int(total * cuda.SPARE_DEVICE_FRACTION * 0.8)
    ballast = torch.empty(max(free - spare, 0), dtype=torch.uint8, device="cuda")
    for _ in range(4):
        ckpt.step()
        train_step(model, optimizer)
    ckpt.step()
    expected = state_of(model, optimizer)
    assert ckpt.wait(60)
    ckpt.abandon()
    del ballast
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # the next tests find room for clones
    assert cloned
    assert not any(cloned)

    model, optimizer = build("adamw-fused")
    again = tierckpt.Checkpointer(model, optimizer, **settings)
    assert again.restore() == 5
    assert all(map(torch.equal, expected, state_of(model, optimizer)))
    again.close()


def test_a_loop_on_a_stream_of_its_own_is_followed(
    path_taken: str, tmp_path: Path, shm_dir: Path
) -> None:
    settings: dict[str, Any] = {
        "path": tmp_path / "c",
        "shm_dir": shm_dir,
        "local_every_seconds": 0.0,
    }
    model, optimizer = build("adamw-fused")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    ckpt = tierckpt.Checkpointer(model, optimizer, **settings)
    ckpt._active.release_early = path_taken == "forward"
    ckpt.restore()
    with torch.cuda.stream(stream):
        for _ in range(5):
            train_step(model, optimizer)
            ckpt.step()
        expected = state_of(model, optimizer)
        train_step(model, optimizer)
        assert ckpt.wait(60)
    ckpt.abandon()
    torch.cuda.synchronize()

    model, optimizer = build("adamw-fused")
    again = tierckpt.Checkpointer(model, optimizer, **settings)
    assert again.restore() == 5
    assert all(map(torch.equal, expected, state_of(model, optimizer)))
    again.close()


def test_memory_that_cannot_be_page_locked_is_reported_and_blamed_on_nobody_else() -> None:
    slot = Slot.create(None, "twice", 4096, 1 << 20)
    notices: list[tuple[str, int]] = []
    device = torch.device("cuda", torch.cuda.current_device())
    first = cuda.PageLocks(device, lambda *notice: notices.append(notice))
    second = cuda.PageLocks(device, lambda *notice: notices.append(notice))
    first.lock(slot)
    address, slot.registered_address = slot.registered_address, 0
    assert address
    assert not notices
    second.lock(slot)  # refused: it is locked already
    assert not slot.registered_address
    assert "cannot page-lock" in notices[0][0]
    assert float(torch.ones(3, device="cuda").sum()) == 3  # a kernel that finds no old error
    slot.registered_address = address
    first.unlock(slot)
    slot.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_one_process_with_two_gpus_is_refused_when_attaching(tmp_path: Path, shm_dir: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4).cuda(0), torch.nn.Linear(4, 4).cuda(1))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(tierckpt.UnsupportedStateError, match="one process per GPU"):
        tierckpt.Checkpointer(model, optimizer, path=tmp_path / "c", shm_dir=shm_dir)
