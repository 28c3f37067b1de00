"""New optimizer state of a restore: allocated early, from the headers."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from tierckpt.format import ShardHeader, TensorSpec, decode_header, encode_header, plan_layout
from tierckpt.restore import Part, TensorPreallocator
from tierckpt.state import TrainingState, as_bytes, flat, label_optimizers, spec_of

WIDTH = 512  # a square of float32 is four times LARGE_BYTES
WIDEST = 3072  # larger than any allocation from the allocator's heap


def live(width: int = WIDTH, steps: int = 0) -> TrainingState:
    model = nn.Linear(width, width)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
    return TrainingState(model, label_optimizers(optimizer))


def specs_of(state: TrainingState) -> dict[str, TensorSpec]:
    return {n: spec_of(t, n) for n, t, _ in state.entries(state.walk())}


def header_of(state: TrainingState, rank: int = 1) -> ShardHeader:
    layout = plan_layout(list(specs_of(state).values()), [], rank, 2)
    blocks = tuple(block.nbytes for block in layout.blocks)
    return ShardHeader(layout.pieces, blocks, 0, layout.nbytes, state.structure())


def pages_there(tensor: torch.Tensor) -> int:
    """The number of whole pages of a tensor's memory that the kernel has allocated."""
    low = -(-tensor.data_ptr() // mmap.PAGESIZE)
    high = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(8 * low)
        entries = memoryview(pagemap.read(8 * (high - low))).cast("Q")
    return sum(bool(entry >> 62) for entry in entries)  # in memory, or swapped out


def foresee(new: TensorPreallocator, *headers: ShardHeader) -> None:
    """As a restore does for each attempt."""
    new.start(wanted=True)
    for header in headers:
        new.foresee(header)
    new.foreseen(touch=True)


def test_foreseen_tensors_have_their_memory_and_others_are_made_when_asked_for() -> None:
    saved = live(WIDEST, steps=1)
    specs = specs_of(saved)
    large = specs["optimizer/weight/exp_avg"]
    new = TensorPreallocator(live(WIDEST))
    foresee(new, header_of(saved))
    # All are kept: the allocator could give the memory of a freed one again.
    made = {name: new.make(spec, "cpu") for name, spec in specs.items()}
    for name, tensor in made.items():
        assert spec_of(tensor, name) == specs[name]
        if name.startswith("optimizer/weight/exp_avg"):
            assert pages_there(tensor) >= tensor.nbytes // mmap.PAGESIZE - 1
    assert pages_there(new.make(large, "cpu")) < large.nbytes // mmap.PAGESIZE // 2  # a second one


def test_no_tensor_is_made_for_values_that_exist_or_fit_nothing() -> None:
    saved = header_of(live(steps=1))
    for state in (live(steps=1), TrainingState(nn.ReLU(), {})):
        new = TensorPreallocator(state)
        foresee(new, saved)
        assert new._made == {}


def test_another_version_foreseen_later_takes_the_place_of_the_first() -> None:
    new = TensorPreallocator(live())
    foresee(new, header_of(live(steps=1)))
    wider = live(WIDTH + 16, steps=1)
    foresee(new, header_of(wider))
    spec = specs_of(wider)["optimizer/weight/exp_avg"]
    assert new.make(spec, "cpu").shape == (WIDTH + 16, WIDTH + 16)


@pytest.mark.parametrize("stride", [None, (0, 0)], ids=["no memory", "no memory to touch it in"])
def test_a_lie_in_a_header_is_left_to_the_loading(stride: tuple[int, ...] | None) -> None:
    saved = header_of(live(steps=1))
    huge = TensorSpec("optimizer/weight/huge", "float32", (1 << 25, 1 << 25), stride, 4)
    piece = next(p for p in saved.pieces if p.spec.name == "optimizer/weight/exp_avg")
    pieces = (type(piece)(huge, 0, 1, 0, False), *saved.pieces)
    new = TensorPreallocator(live())
    foresee(new, ShardHeader(pieces, saved.block_bytes, 0, saved.data_bytes, saved.structure))
    assert new.make(piece.spec, "cpu").shape == (WIDTH, WIDTH)


def test_a_tensor_made_for_one_try_serves_the_next_or_is_freed() -> None:
    header = header_of(live(steps=1))
    new = TensorPreallocator(live())
    foresee(new, header)
    made = {name: tensor for name, (_, tensor) in new._made.items()}
    foresee(new, header)
    assert made
    assert all(new._made[name][1] is tensor for name, tensor in made.items())
    foresee(new)
    assert new._made == new._before == {}


def parts_of(state: TrainingState) -> tuple[ShardHeader, list[Part]]:
    """The only shard of a version, in parts of a page."""
    entries = {name: tensor for name, tensor, _ in state.entries(state.walk())}
    layout = plan_layout(list(specs_of(state).values()), [], 0, 1)
    encoded, data_bytes = encode_header(layout, 0, state.structure())
    shard = bytearray(len(encoded) + data_bytes)
    shard[: len(encoded)] = encoded
    for piece in layout.pieces:
        low = len(encoded) + piece.offset
        shard[low : low + piece.nbytes] = bytes(as_bytes(flat(entries[piece.spec.name])).numpy())
    bounds = [0, *range(len(encoded), len(shard), mmap.PAGESIZE), len(shard)]
    parts = [(0, a, memoryview(shard)[a:b]) for a, b in itertools.pairwise(bounds)]
    return decode_header(memoryview(shard)), parts


def test_filled_values_are_in_the_given_tensor() -> None:
    saved = live(steps=1)
    header, parts = parts_of(saved)
    new = TensorPreallocator(live())
    foresee(new, header)
    new.fill(parts)
    entries = {name: tensor for name, tensor, _ in saved.entries(saved.walk())}
    large = [p for p in header.pieces if p.spec.name.startswith("optimizer/weight/exp")]
    assert len(large) == 2
    assert not any(new.has(0, piece) for piece in header.pieces), "nobody has the tensors yet"
    for piece in large:
        assert new.make(piece.spec, "cpu").equal(entries[piece.spec.name])
    assert [piece for piece in header.pieces if new.has(0, piece)] == large
    assert not any(new.has(1, piece) for piece in large)
    another = new.make(large[0].spec, "cpu")
    assert not new.has(0, large[0]), f"there is nothing in {another.shape}"


def test_a_piece_of_which_a_part_is_missing_is_not_there() -> None:
    header, parts = parts_of(live(steps=1))
    large = [p for p in header.pieces if p.spec.name.startswith("optimizer/weight/exp")]
    end = header.header_bytes + large[0].offset + large[0].nbytes
    new = TensorPreallocator(live())
    foresee(new, header)
    new.fill(part for part in parts if part[1] + len(part[2]) <= end - 1)
    new.make(large[0].spec, "cpu")
    assert not new.has(0, large[0])


def test_values_filled_from_one_version_are_not_those_of_the_next() -> None:
    header, parts = parts_of(live(steps=1))
    new = TensorPreallocator(live())
    foresee(new, header)
    new.fill(parts)
    foresee(new, header)  # another version, of the same headers
    large = [p for p in header.pieces if p.spec.name.startswith("optimizer/weight/exp")]
    for piece in large:
        new.make(piece.spec, "cpu")
        assert not new.has(0, piece)
    new.start(wanted=False)  # no memory for them beside the fetched shards
    new.foresee(header)
    assert new._made == {}
