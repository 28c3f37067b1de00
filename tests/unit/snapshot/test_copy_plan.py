"""A plan's headers: enough room for the rank's tree to vary, and no more."""

from __future__ import annotations

import pytest
import torch

from tierckpt.errors import UnsupportedStateError
from tierckpt.format import PAGE_BYTES
from tierckpt.snapshot import CopyPlan
from tierckpt.state import TrainingState

KIB, MIB = 2**10, 2**20


@pytest.fixture
def plan() -> CopyPlan:
    model = torch.nn.Linear(5, 7)
    state = TrainingState(model, {"optimizer": torch.optim.SGD(model.parameters())})
    return CopyPlan(state, state.walk(), rank=0, ranks=1)


def room(plan: CopyPlan, tree_bytes: int) -> int:
    """Number of bytes after the tree."""
    _, data_bytes = plan.header(tree_bytes)
    return data_bytes - plan.layout.nbytes - tree_bytes


@pytest.mark.parametrize("tree_bytes", [8, 4000, 100 * KIB, 5 * MIB, 300 * MIB])
def test_the_room_to_grow_is_a_small_part_of_a_large_tree(plan: CopyPlan, tree_bytes: int) -> None:
    """All of it is zeros, which are written and hashed at every version."""
    assert 0 <= room(plan, tree_bytes) <= 64 * KIB + tree_bytes // 64 + PAGE_BYTES


@pytest.mark.parametrize("tree_bytes", [100 * KIB, 5 * MIB, 300 * MIB])
def test_so_it_is_when_the_tree_has_become_smaller(plan: CopyPlan, tree_bytes: int) -> None:
    plan.header(2 * tree_bytes)
    assert room(plan, tree_bytes) <= 4 * (64 * KIB + tree_bytes // 64) + PAGE_BYTES


@pytest.mark.parametrize("tree_bytes", [4000, 100 * KIB, 5 * MIB])
def test_a_tree_that_varies_a_little_has_one_header_and_one_length(
    plan: CopyPlan, tree_bytes: int
) -> None:
    """A slot as a file must have exactly the length, and a codec's base the same blocks."""
    first, length = plan.header(tree_bytes)
    for varied in (tree_bytes - 90, tree_bytes + 90, tree_bytes * 101 // 100, tree_bytes):
        again, its_length = plan.header(varied)
        assert again is first
        assert its_length == length


def test_a_tree_that_keeps_growing_leaves_no_stale_headers(plan: CopyPlan) -> None:
    for tree_bytes in range(KIB, 2 * MIB, 3 * KIB):
        plan.header(tree_bytes)
    assert len(plan._headers) <= 4


class Masked(torch.nn.Module):
    """A model with a buffer that a forward pass may replace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(3, 3))


def test_a_replaced_buffer_keeps_the_plan_and_is_staged() -> None:
    model = Masked()
    state = TrainingState(model, {"optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    plan = CopyPlan(state, state.walk(), 0, 1)
    assert plan.fits(state)
    model.mask = torch.full((3, 3), 2.0)
    assert plan.fits(state)
    plan.buffers.stage()
    assert plan.buffers.staged["buffer/mask"].tolist() == [2.0] * 9
    model.mask = torch.ones(2, 2)
    assert not plan.fits(state)


def test_a_buffer_replaced_by_one_without_memory_of_its_own_is_refused_by_name() -> None:
    model = Masked()
    state = TrainingState(model, {"optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    plan = CopyPlan(state, state.walk(), 0, 1)
    assert plan.fits(state)
    model.mask = torch.ones(3, 3).to_sparse()
    with pytest.raises(UnsupportedStateError, match="buffer/mask is of layout"):
        plan.fits(state)
