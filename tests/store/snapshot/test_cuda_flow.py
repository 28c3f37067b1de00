"""The CUDA snapshot's order of events, on a machine without a GPU.

The tensors are on the CPU. Where torch copies, a copy is complete when the call returns: that
proves the bookkeeping (feeding, cloning, hashing, sealing after the barrier). Where the engine
copies, the stream is one that copies only when it has to: that proves the order of copies and
training, too.
`tests/gpu` has the real thing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.support.late_device import Compute, LateDevice, LateEvent, Side
from tierckpt.snapshot import CopyPlan, Progress, Sources, cuda, describe_engine, find_engine

pytestmark = pytest.mark.usefixtures("inline_agent")


class CpuLane:
    device = torch.device("cpu")
    workers = 2

    def __init__(self, room: bool, device: LateDevice | None) -> None:
        self.copies = None if device is None else device.copies
        self.stream = Side() if device is None else device.side
        self.hashers = ThreadPoolExecutor(self.workers)
        self.room = room
        self.feeding: set[int] = set()
        """Threads that are enqueueing on the side stream."""
        self.threads: set[str] = set()

    def sources_of(self, plan: CopyPlan) -> Sources | None:
        return None if self.copies is None else Sources.of(plan)

    def use(self) -> None:
        self.threads.add(threading.current_thread().name)

    @contextlib.contextmanager
    def after(self, event: object) -> Iterator[None]:
        self.feeding.add(threading.get_ident())
        yield
        self.feeding.discard(threading.get_ident())

    def has_room(self, nbytes: int) -> bool:
        return self.room

    def close(self) -> None:
        self.hashers.shutdown()


@pytest.fixture(params=["engine", "torch"])
def device(request: pytest.FixtureRequest) -> LateDevice | None:
    """The device of the engine; None where torch copies."""
    if request.param == "torch":
        return None
    engine = find_engine()
    if engine is None:
        pytest.skip(describe_engine())
    return LateDevice(engine)


def all_dense(plan: CopyPlan) -> list[bool]:
    """Blocks that the engine copies: as on a GPU, but also of tensors on the CPU."""
    return [len(block.parts) == 1 for block in plan.layout.blocks]


@pytest.fixture
def lane(device: LateDevice | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuLane]:
    make = CopyPlan.__init__

    def as_on_cuda(self: CopyPlan, *args: Any) -> None:
        make(self, *args)
        self.device = torch.device("cuda")

    monkeypatch.setattr(CopyPlan, "__init__", as_on_cuda)
    compute = device.compute if device is not None else Compute()
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: compute)
    monkeypatch.setattr(cuda, "_direct", all_dense)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda, "CLONE_FROM_BYTES", 0)
    monkeypatch.setattr(cuda, "BATCH_BYTES", 64 * 1024)
    made = CpuLane(room=True, device=device)
    help_ = cuda.CudaEngine.help

    def checked(self: cuda.CudaEngine) -> Progress:
        progress = help_(self)
        if progress is not Progress.ABORTED:
            assert compute.waited_for == made.stream.enqueued  # else training would not wait
        return progress

    monkeypatch.setattr(cuda.CudaEngine, "help", checked)
    yield made
    made.close()


def memory_in_pieces(lane: CpuLane, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has room, but its allocator fails in the middle of the cloning."""
    runs = cuda.CudaEngine._runs

    def run_out(self: cuda.CudaEngine, blocks: list[int]) -> Iterator[Any]:
        for each in runs(self, blocks):
            yield each
            if threading.get_ident() not in lane.feeding:
                raise torch.cuda.OutOfMemoryError("no")

    def has_none(*args: object) -> Any:
        raise torch.cuda.OutOfMemoryError("no")

    monkeypatch.setattr(cuda.CudaEngine, "_runs", run_out)
    monkeypatch.setattr(cuda.DeviceCopies, "clone", has_none)


def attach(lane: CpuLane, tmp_path: Path, shm_dir: Path) -> tuple[Any, ...]:
    """Model, optimizer, checkpointer that leaves everything to the barrier, and its events."""
    model, optimizer = build()
    events: list[tierckpt.Event] = []
    ckpt = tierckpt.Checkpointer(
        model, optimizer, on_event=events.append, **settings(tmp_path, shm_dir)
    )
    ckpt._active.capture.lane = lane  # type: ignore[assignment]
    ckpt._active.release_early = False
    ckpt.restore()
    return model, optimizer, ckpt, events


def settings(tmp_path: Path, shm_dir: Path) -> dict[str, Any]:
    return {"path": tmp_path / "c", "shm_dir": shm_dir, "slots": 3, "local_every_seconds": 0.0}


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


@pytest.mark.parametrize("path_taken", ["cloned", "fed", "fed for want of one piece"])
def test_versions_are_exact_although_sealed_after_the_barrier(
    path_taken: str, lane: CpuLane, tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane.room = path_taken != "fed"
    if path_taken.endswith("piece"):
        memory_in_pieces(lane, monkeypatch)
    cloned: list[bool] = []
    clone_rest = cuda.CudaEngine._clone_rest
    monkeypatch.setattr(
        cuda.CudaEngine, "_clone_rest", lambda self: cloned.append(clone_rest(self)) or cloned[-1]
    )
    model, optimizer, ckpt, events = attach(lane, tmp_path, shm_dir)
    for _ in range(8):
        train_step(model, optimizer)
        ckpt.step()
    assert ckpt.wait(60)
    following = [train_step(model, optimizer) for _ in range(3)]
    ckpt.abandon()
    assert [e.version for e in events if e.name == "sealed"][-1] == 8
    assert not [e for e in events if e.name == "failed" and "still" not in e.message]
    assert any(cloned) == (path_taken == "cloned")
    assert lane.threads == {"tierckpt-copier"}

    model, optimizer = build()
    torch.manual_seed(77)
    again = tierckpt.Checkpointer(model, optimizer, **settings(tmp_path, shm_dir))
    assert again.restore() == 8
    assert [train_step(model, optimizer) for _ in range(3)] == following
    again.close()


def test_a_version_is_sealed_in_an_evaluation_that_releases_no_layer(
    lane: CpuLane, tmp_path: Path, shm_dir: Path
) -> None:
    model, optimizer, ckpt, events = attach(lane, tmp_path, shm_dir)
    for _ in range(4):
        train_step(model, optimizer)
        ckpt.step()
    taken = ckpt._active.snapshot
    taken.wait_done()
    assert (taken.sealed, taken.clock.barrier) == (True, 0.0)
    following = [train_step(model, optimizer)]  # its barrier finds nothing to do
    ckpt.abandon()
    model, optimizer = build()
    again = tierckpt.Checkpointer(model, optimizer, **settings(tmp_path, shm_dir))
    assert again.restore() == 4
    assert [train_step(model, optimizer)] == following
    again.close()
    assert not [e for e in events if e.name == "failed"]


def test_a_slot_is_given_back_only_when_no_copy_can_write_to_it(
    lane: CpuLane, tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, ckpt, events = attach(lane, tmp_path, shm_dir)
    happened: list[str] = []
    filled = ckpt._pool.filled

    def give_back(slot: Any, sealed: Any) -> None:
        happened.append("given back")
        filled(slot, sealed)

    stop = lane.stream.synchronize

    def stand_still(count: int | None = None) -> None:
        if count is None:
            happened.append(f"stood still, failed: {ckpt._active.snapshot.failed}")
        stop(count)

    def break_down(*args: object) -> bytes:
        raise ValueError("bad memory")

    train_step(model, optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(ckpt._pool, "filled", give_back)
        patched.setattr(lane.stream, "synchronize", stand_still)
        patched.setattr(cuda, "digest", break_down)
        patched.setattr(cuda.DeviceCopies, "hash", break_down)
        ckpt.step()
        ckpt._active.snapshot.release_all()
        ckpt._active.snapshot.wait_done()
    assert happened == ["stood still, failed: True", "given back"]
    train_step(model, optimizer)
    ckpt.step()
    assert ckpt.wait(60)
    ckpt.close()
    assert [e.version for e in events if e.name == "sealed"] == [2]
    assert any(e.name == "failed" and "bad memory" in e.message for e in events)


def test_a_step_captured_into_a_graph_costs_the_version_and_says_why(
    lane: CpuLane, tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, ckpt, events = attach(lane, tmp_path, shm_dir)
    train_step(model, optimizer)
    ckpt.step()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        train_step(model, optimizer)
    ckpt.step()
    assert ckpt.wait(60)
    ckpt.close()
    assert [e.version for e in events if e.name == "sealed"] == [2]
    assert any("CUDA graph" in e.message for e in events if e.version == 1)


class Cudart:
    """The page-locking part of the CUDA runtime; `code` is its answer."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.asked: list[str] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.asked.append("lock")
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.asked.append("unlock")
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return "operation not supported"


@pytest.mark.parametrize("code", [0, 801])
def test_slots_that_cannot_be_page_locked_are_used_as_they_are(
    code: int, lane: CpuLane, tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = Cudart(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    model, optimizer, ckpt, events = attach(lane, tmp_path, shm_dir)
    locks = cuda.PageLocks(torch.device("cpu"), ckpt._pool.on_notice)
    ckpt._pool.on_map, ckpt._pool.on_unmap = locks.lock, locks.unlock
    for _ in range(5):
        train_step(model, optimizer)
        ckpt.step()
        ckpt.complete()
    slots = sum(slot is not None for slot in ckpt._pool.slots)
    ckpt.close()
    assert [e.version for e in events if e.name == "sealed"] == [1, 2, 3, 4, 5]
    said = [e for e in events if "page-lock" in e.message]
    if code:
        assert cudart.asked == ["lock"]
        assert len(said) == 1
        assert "operation not supported" in said[0].message
        assert "ulimit -l" in said[0].message
    else:
        assert slots > 1
        assert cudart.asked == ["lock"] * slots + ["unlock"] * slots
        assert not said
