"""Parts of the CUDA snapshot that can be tested without a GPU."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.late_device import LateDevice
from tierckpt.errors import UnsupportedStateError
from tierckpt.snapshot import CopyPlan, Sources, cuda, describe_engine, find_engine
from tierckpt.snapshot.cuda import CudaEngine, CudaLane
from tierckpt.state import TrainingState, training_state

GIB = 1 << 30


# --- several GPUs --------------------------------------------------------------------------------


def test_state_on_two_gpus_is_refused_by_name_with_the_way_out() -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    host = torch.device("cpu")
    training_state.refuse_several_gpus([("step", host), ("weight", first), ("bias", first)])
    training_state.refuse_several_gpus([("weight", second)])
    with pytest.raises(UnsupportedStateError) as caught:
        training_state.refuse_several_gpus([("step", host), ("weight", first), ("bias", second)])
    assert str(caught.value).startswith("weight is on cuda:0, bias on cuda:1;")
    assert "one process per GPU" in str(caught.value)


@pytest.mark.parametrize(
    "elsewhere", ["model/0.weight", "optimizer/0.bias/momentum_buffer", "buffer/1.running_mean"]
)
def test_parameters_optimizer_state_and_buffers_are_all_looked_at(
    elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    refuse = training_state.refuse_several_gpus

    def as_on_gpus(named: Sequence[tuple[str, torch.device]]) -> None:
        refuse([(name, torch.device("cuda", int(name == elsewhere))) for name, _ in named])

    monkeypatch.setattr(training_state, "refuse_several_gpus", as_on_gpus)
    found = TrainingState(model, {"optimizer": optimizer})
    with pytest.raises(UnsupportedStateError, match=f"{elsewhere} (is )?on cuda:1"):
        found.entries(found.walk())


# --- room for a clone ----------------------------------------------------------------------------


class Device:
    """A GPU's memory as reported by the driver and torch's allocator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.total, self.reserved, self.peak = 40 * GIB, 80 * GIB, 40 * GIB, 30 * GIB
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, self.total))
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: self.stats())

    def stats(self) -> dict[str, Any]:
        return {
            "reserved_bytes": {"all": {"current": self.reserved}},
            "allocated_bytes": {"all": {"peak": self.peak}},
        }


@pytest.fixture
def lane() -> CudaLane:
    made = CudaLane.__new__(CudaLane)
    made.device = torch.device("cuda", 0)
    made._peak_bytes = made._cloned_bytes = 0
    return made


def test_a_clone_leaves_the_training_the_memory_of_its_peak(
    lane: CudaLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    Device(monkeypatch)
    room = 80 * GIB - 30 * GIB - 4 * GIB  # all, less the peak, less the twentieth
    assert not lane.has_room(room)
    assert lane.has_room(room - 1)


def test_memory_cached_for_the_next_forward_pass_does_not_count_as_free(
    lane: CudaLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    device.free, device.reserved, device.peak = 0, 80 * GIB, 79 * GIB
    assert not lane.has_room(1)


def test_our_own_clones_are_not_taken_for_the_trainings_need(
    lane: CudaLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    assert lane.has_room(40 * GIB)
    device.peak = 70 * GIB  # with the clone of 40
    assert lane.has_room(40 * GIB)
    device.peak = 80 * GIB  # so the training needed 40 itself
    assert not lane.has_room(40 * GIB)
    device.peak = 1  # the statistics were reset
    assert not lane.has_room(40 * GIB)


# --- runs of blocks ------------------------------------------------------------------------------


def runs(sources: dict[int, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    holder: Any = types.SimpleNamespace(_parts=lambda block: [sources[block]])
    found = CudaEngine._runs(holder, list(sources))
    return [(blocks, source.tolist()) for blocks, source in found]


def test_adjacent_parts_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(12, dtype=torch.uint8)
    parts = {3: tensor[0:4], 4: tensor[4:8], 5: tensor[8:12]}
    assert runs(parts) == [([3, 4, 5], list(range(12)))]
    monkeypatch.setattr(cuda, "BATCH_BYTES", 8)
    assert runs(parts) == [([3, 4], list(range(8))), ([5], list(range(8, 12)))]


# --- device copies, with the host in place of a GPU ----------------------------------------------


@pytest.fixture
def device() -> LateDevice:
    engine = find_engine()
    if engine is None:
        pytest.skip(describe_engine())
    return LateDevice(engine)


@pytest.fixture
def plan() -> CopyPlan:
    torch.manual_seed(1)
    large = [torch.nn.Linear(1000, 700) for _ in range(2)]
    small = [torch.nn.LayerNorm(33) for _ in range(50)]
    model = torch.nn.Sequential(*large, *small, torch.nn.BatchNorm1d(9))
    state = TrainingState(model, {"optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    made = CopyPlan(state, state.walk(), 0, 1)
    made.buffers.stage()
    return made


@pytest.fixture
def sources(plan: CopyPlan) -> Sources:
    return Sources.of(plan)


def image_of(plan: CopyPlan) -> bytes:
    found = bytearray(plan.layout.nbytes)
    for number, block in enumerate(plan.layout.blocks):
        data = b"".join(p.numpy().tobytes() for p in plan.source(number)[0])
        found[block.offset : block.offset + block.nbytes] = data
    return bytes(found)


def test_all_blocks_arrive_and_adjacent_ones_are_one_copy(
    plan: CopyPlan, sources: Sources, device: LateDevice
) -> None:
    target = np.zeros(plan.layout.nbytes, np.uint8)
    everything = range(len(plan.layout.blocks))
    device.copies.enqueue(sources, everything, target.ctypes.data, device.compute)
    assert target.tobytes() == image_of(plan)
    assert 1000 * 700 * 4 in device.sizes  # a weight of several blocks
    assert len(device.sizes) < sum(len(b.parts) for b in plan.layout.blocks)


def test_tensors_with_adjacent_memory_are_copied_apart(device: LateDevice) -> None:
    memory = torch.randn(2, 300, 300)
    layers = [torch.nn.Linear(300, 300, bias=False) for _ in range(2)]
    for layer, part in zip(layers, memory, strict=True):
        layer.weight = torch.nn.Parameter(part)
        low = part.data_ptr()
        device.allocations.append((low, low + part.nbytes))
    model = torch.nn.Sequential(*layers)
    state = TrainingState(model, {"optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    plan = CopyPlan(state, state.walk(), 0, 1)
    target = np.zeros(plan.layout.nbytes, np.uint8)
    blocks = range(len(plan.layout.blocks))
    device.copies.enqueue(Sources.of(plan), blocks, target.ctypes.data, device.compute)
    assert target.tobytes() == image_of(plan)
    assert device.sizes == [300 * 300 * 4] * 2


def test_a_copy_has_a_limit(
    plan: CopyPlan, sources: Sources, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "MAX_COPY_BYTES", 1 << 20)
    target = np.zeros(plan.layout.nbytes, np.uint8)
    device.copies.enqueue(
        sources, range(len(plan.layout.blocks)), target.ctypes.data, device.compute
    )
    assert max(device.sizes) == 1 << 20
    assert target.tobytes() == image_of(plan)


def test_a_refused_copy_is_an_error(plan: CopyPlan, sources: Sources, device: LateDevice) -> None:
    device.error = 700
    target = np.zeros(plan.layout.nbytes, np.uint8)
    with pytest.raises(cuda.DeviceCopyError, match="error 700"):
        device.copies.enqueue(sources, [0, 1], target.ctypes.data, device.compute)
    assert len(device.sizes) == 1


def test_tensors_on_the_host_with_gaps_or_small_are_left_to_torch(
    plan: CopyPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any(Sources.of(plan).direct)  # no block is on a GPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = Sources.of(plan)
    for block, direct in zip(plan.layout.blocks, found.direct, strict=True):
        mean_bytes = block.nbytes / len(block.parts)
        assert direct == (len(block.parts) == 1 or mean_bytes >= cuda.MIN_SEGMENT_BYTES)
    assert {True, False} == {*found.direct}
    assert found.split([0, len(found.direct) - 1])[0] == [0]
    gap = next(i for i, t in enumerate(plan.sources) if t.dim() == 2)
    plan.sources[gap] = plan.sources[gap][:, ::2]
    with_gap = Sources.of(plan).direct
    for block, direct in zip(plan.layout.blocks, with_gap, strict=True):
        assert not (direct and gap in [part[0] for part in block.parts])
