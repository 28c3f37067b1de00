"""The CUDA snapshot's order of events, on a machine without a GPU.

Streams and events that do nothing stand in for CUDA's, and the tensors are on the CPU, where a copy
is complete when the call returns: so this proves the bookkeeping (feeding, cloning, hashing,
sealing after the barrier), and nothing about asynchrony. That is `tests/gpu`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tierckpt import cuda, snapshot


class NoEvent:
    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


class NoStream:
    def wait_event(self, event: object) -> None: ...


class CpuLane:
    device = torch.device("cpu")

    def __init__(self, room: bool) -> None:
        self.stream = NoStream()
        self.hashers = ThreadPoolExecutor(2)
        self.room = room

    @contextlib.contextmanager
    def after(self, event: object) -> Iterator[None]:
        yield

    def has_room(self, nbytes: int) -> bool:
        return self.room

    def close(self) -> None:
        self.hashers.shutdown()


@pytest.fixture(params=["cloned", "fed"])
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuLane]:
    make = snapshot.Plan.__init__

    def as_on_cuda(self: snapshot.Plan, *args: Any) -> None:
        make(self, *args)
        self.device = torch.device("cuda")

    monkeypatch.setattr(snapshot.Plan, "__init__", as_on_cuda)
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: NoStream())
    monkeypatch.setattr(cuda, "CLONE_FROM_BYTES", 0)
    monkeypatch.setattr(cuda, "BATCH_BYTES", 64 * 1024)
    made = CpuLane(room=request.param == "cloned")
    yield made
    made.close()


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 64)
    )
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x = torch.randn(16, 64)
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_versions_are_exact_although_sealed_after_the_barrier(
    lane: CpuLane, tmp_path: Path, shm_dir: Path
) -> None:
    settings: dict[str, Any] = {"path": tmp_path / "c", "shm_dir": shm_dir, "slots": 3}
    model, optimizer = build()
    events: list[tierckpt.Event] = []
    ckpt = tierckpt.Checkpointer(
        model, optimizer, on_event=events.append, local_every_seconds=0.0, **settings
    )
    ckpt._capture.lane = lane  # type: ignore[assignment]
    ckpt._release_early = False  # leave everything to the barrier
    ckpt.restore()
    for _ in range(8):
        train_step(model, optimizer)
        ckpt.step()
    assert ckpt.wait(60)
    following = [train_step(model, optimizer) for _ in range(3)]
    ckpt.abandon()
    assert [e.version for e in events if e.name == "sealed"][-1] == 8
    assert not [e for e in events if e.name == "failed" and "still" not in e.message]

    model, optimizer = build()
    torch.manual_seed(77)
    again = tierckpt.Checkpointer(model, optimizer, local_every_seconds=0.0, **settings)
    assert again.restore() == 8
    assert [train_step(model, optimizer) for _ in range(3)] == following
    again.close()
