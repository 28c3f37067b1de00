"""Device copies, with the host in place of a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.late_device import LateDevice
from tierckpt.format import digest
from tierckpt.snapshot import CopyPlan, Sources, cuda, describe_engine, find_engine
from tierckpt.snapshot.cuda import DeviceCopyError
from tierckpt.state import TrainingState


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


@pytest.fixture
def order(plan: CopyPlan) -> list[list[int]]:
    """Blocks in three shares, in an order that the training may have released."""
    return [[*range(len(plan.layout.blocks))][i::3] for i in (2, 0, 1)]


def test_what_is_cloned_no_longer_depends_on_the_live_tensors(
    plan: CopyPlan, sources: Sources, device: LateDevice, order: list[list[int]]
) -> None:
    expected, target = image_of(plan), np.zeros(plan.layout.nbytes, np.uint8)
    first, *rest = order
    device.copies.enqueue(sources, first, target.ctypes.data, device.compute)
    left = [b for blocks in rest for b in blocks]
    memory, clone = device.copies.clone(sources, left, device.compute)
    with torch.no_grad():
        for tensor in plan.sources:
            tensor.zero_()
    for blocks in rest:
        device.copies.enqueue(clone, blocks, target.ctypes.data, device.compute)
    assert target.tobytes() == expected
    assert memory.numel() >= sum(plan.layout.blocks[b].nbytes for b in left)


def test_digests_are_those_of_the_blocks(
    plan: CopyPlan, sources: Sources, device: LateDevice
) -> None:
    target = np.frombuffer(image_of(plan), np.uint8)
    blocks = [*range(len(plan.layout.blocks))][::-1]
    expected = [
        digest(target[b.offset : b.offset + b.nbytes].tobytes())
        for b in (plan.layout.blocks[number] for number in blocks)
    ]
    assert device.copies.hash(sources, blocks, target.ctypes.data) == expected


def test_a_refused_copy_is_an_error(plan: CopyPlan, sources: Sources, device: LateDevice) -> None:
    device.error = 700
    target = np.zeros(plan.layout.nbytes, np.uint8)
    with pytest.raises(DeviceCopyError, match="error 700"):
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
