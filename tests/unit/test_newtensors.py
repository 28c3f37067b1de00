"""Optimizer state that a restore has to make: foreseen from headers, its memory there in time."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import nn

from tierckpt import tree
from tierckpt.layout import TensorSpec, plan_layout
from tierckpt.newtensors import LARGE_BYTES, NewTensors
from tierckpt.shardfile import ShardHeader
from tierckpt.state import TrainingState, label_optimizers

WIDTH = 512  # a square of float32 is four times LARGE_BYTES
WIDEST = 3072  # and of this, more than the allocator ever takes out of its heap


def live(width: int = WIDTH, steps: int = 0) -> TrainingState:
    model = nn.Linear(width, width)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
    return TrainingState(model, label_optimizers(optimizer))


def specs_of(state: TrainingState) -> dict[str, TensorSpec]:
    return {n: tree.spec_of(t, n) for n, t, _ in state.entries(state.walk())}


def header_of(state: TrainingState, rank: int = 1) -> ShardHeader:
    layout = plan_layout(list(specs_of(state).values()), [], rank, 2)
    blocks = tuple(block.nbytes for block in layout.blocks)
    return ShardHeader(layout.pieces, blocks, 0, layout.nbytes, state.structure())


def pages_there(tensor: torch.Tensor) -> int:
    """How many whole pages of a tensor's memory the kernel has given."""
    low = -(-tensor.data_ptr() // mmap.PAGESIZE)
    high = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(8 * low)
        entries = memoryview(pagemap.read(8 * (high - low))).cast("Q")
    return sum(bool(entry >> 62) for entry in entries)  # in memory, or swapped out


def test_foreseen_tensors_have_their_memory_and_others_are_made_when_asked_for() -> None:
    saved = live(WIDEST, steps=1)
    specs = specs_of(saved)
    large = specs["optimizer/weight/exp_avg"]
    new = NewTensors(live(WIDEST))
    new.foresee([header_of(saved)])
    for name, spec in specs.items():
        tensor = new.make(spec, "cpu")
        assert tree.spec_of(tensor, name) == spec
        if name.startswith("optimizer/weight/exp_avg"):
            assert pages_there(tensor) >= tensor.nbytes // mmap.PAGESIZE - 1
    assert pages_there(new.make(large, "cpu")) < large.nbytes // mmap.PAGESIZE // 2  # a second one


def test_memory_of_one_foreseen_is_given_once() -> None:
    saved = live(steps=1)
    new = NewTensors(live())
    new.foresee([header_of(saved, 0), header_of(saved, 1)])
    spec = specs_of(saved)["optimizer/weight/exp_avg"]
    assert spec.nbytes == 4 * LARGE_BYTES
    assert new.make(spec, "cpu").data_ptr() != (again := new.make(spec, "cpu")).data_ptr()
    assert tree.spec_of(again, spec.name) == spec


def test_nothing_is_made_for_what_is_there_or_fits_nothing() -> None:
    saved = header_of(live(steps=1))
    for state in (live(steps=1), TrainingState(nn.ReLU(), {})):
        new = NewTensors(state)
        new.foresee([saved])
        assert new._made == {}


def test_another_version_foreseen_later_takes_the_place_of_the_first() -> None:
    new = NewTensors(live())
    new.foresee([header_of(live(steps=1))])
    wider = live(WIDTH + 16, steps=1)
    new.foresee([header_of(wider)])
    spec = specs_of(wider)["optimizer/weight/exp_avg"]
    assert new.make(spec, "cpu").shape == (WIDTH + 16, WIDTH + 16)


def test_a_lie_in_a_header_is_left_to_the_loading() -> None:
    saved = header_of(live(steps=1))
    huge = TensorSpec("optimizer/weight/huge", "float32", (1 << 50,), None, 4)
    piece = next(p for p in saved.pieces if p.spec.name == "optimizer/weight/exp_avg")
    pieces = (type(piece)(huge, 0, 1, 0, False), *saved.pieces)
    new = NewTensors(live())
    new.foresee([ShardHeader(pieces, saved.block_bytes, 0, saved.data_bytes, saved.structure)])
    assert new.make(piece.spec, "cpu").shape == (WIDTH, WIDTH)
