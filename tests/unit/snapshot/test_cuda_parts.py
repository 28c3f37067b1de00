"""Parts of the CUDA snapshot that can be tested without a GPU."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tierckpt.errors import UnsupportedStateError
from tierckpt.snapshot import cuda
from tierckpt.snapshot.cuda import CudaLane, CudaSnapshot
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
    found = CudaSnapshot._runs(holder, list(sources))
    return [(blocks, source.tolist()) for blocks, source in found]


def test_adjacent_parts_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(12, dtype=torch.uint8)
    parts = {3: tensor[0:4], 4: tensor[4:8], 5: tensor[8:12]}
    assert runs(parts) == [([3, 4, 5], list(range(12)))]
    monkeypatch.setattr(cuda, "BATCH_BYTES", 8)
    assert runs(parts) == [([3, 4], list(range(8))), ([5], list(range(8, 12)))]


def test_parts_that_are_not_adjacent_in_both_places_stay_separate() -> None:
    tensor, other = torch.arange(8, dtype=torch.uint8), torch.arange(4, dtype=torch.uint8)
    assert runs({3: tensor[:4], 5: tensor[4:]}) == [([3], [0, 1, 2, 3]), ([5], [4, 5, 6, 7])]
    assert runs({3: tensor[4:], 4: tensor[:4]}) == [([3], [4, 5, 6, 7]), ([4], [0, 1, 2, 3])]
    assert runs({3: tensor[:2], 4: tensor[4:]}) == [([3], [0, 1]), ([4], [4, 5, 6, 7])]
    assert runs({3: tensor[4:], 4: other}) == [([3], [4, 5, 6, 7]), ([4], [0, 1, 2, 3])]
    assert runs({}) == []
