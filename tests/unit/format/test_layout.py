"""Layout: every byte of the state is in exactly one shard, evenly, the same every time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.format import (
    BLOCK_BYTES,
    PER_RANK,
    REPLICATED,
    UNIT_BYTES,
    Layout,
    TensorSpec,
    plan_layout,
    stripes,
)

KINDS = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1, "complex128": 16}


def spec(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, shape, None, KINDS[dtype])


# Sizes on both sides of a unit and of a block, empty tensors, and scalars.
shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9)),
    st.tuples(st.integers(0, 300_000)),
)
spec_lists = st.lists(st.tuples(shapes, st.sampled_from(sorted(KINDS))), max_size=12).map(
    lambda pairs: [spec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(pairs)]
)
world_sizes = st.one_of(st.integers(1, 9), st.sampled_from([64, 300]))


def all_layouts(
    striped: list[TensorSpec], own: list[TensorSpec], ranks: int, most: int | None = None
) -> list[Layout]:
    return [plan_layout(striped, own, rank, ranks) for rank in range(ranks)[:most]]


def stripe_bounds(striped: list[TensorSpec], ranks: int) -> Iterator[np.ndarray]:
    """Tensor by tensor, the ranges of all ranks."""
    each = zip(*(stripes(striped, rank, ranks) for rank in range(ranks)), strict=True)
    return (np.asarray(bounds) for bounds in each)


@given(spec_lists, spec_lists, world_sizes)
def test_every_element_is_in_exactly_one_shard(
    striped: list[TensorSpec], own: list[TensorSpec], ranks: int
) -> None:
    own = [TensorSpec(f"own {s.name}", *s[1:]) for s in own]
    taken = {s.name: np.zeros(s.numel, dtype=np.int64) for s in striped}
    named = set()
    for layout in all_layouts(striped, own, ranks):
        for piece in layout.pieces:
            if piece.placement is REPLICATED:
                taken[piece.spec.name][piece.start : piece.stop] += 1
                named.add(piece.spec.name)
        mine = [(p.spec, p.start, p.stop) for p in layout.pieces if p.placement is PER_RANK]
        assert sorted(mine, key=str) == sorted(((s, 0, s.numel) for s in own), key=str)
    assert all((counts == 1).all() for counts in taken.values())
    assert named == set(taken), "an empty tensor is somewhere, too, or it could not be made again"


@given(spec_lists, spec_lists, world_sizes)
def test_pieces_follow_each_other_without_holes_and_aligned(
    striped: list[TensorSpec], own: list[TensorSpec], ranks: int
) -> None:
    for layout in all_layouts(striped, own, ranks, most=3):
        offset = 0
        for piece in layout.pieces:
            assert piece.offset == offset
            assert piece.offset % piece.spec.itemsize_bytes == 0
            offset += piece.nbytes
        assert layout.nbytes == offset


@given(spec_lists, spec_lists, world_sizes)
def test_blocks_cover_the_pieces_exactly(
    striped: list[TensorSpec], own: list[TensorSpec], ranks: int
) -> None:
    for layout in all_layouts(striped, own, ranks, most=3):
        offset = 0
        reached = [0] * len(layout.pieces)
        for block in layout.blocks:
            assert block.offset == offset
            assert block.nbytes <= BLOCK_BYTES
            position = block.offset
            for index, low, high in block.parts:
                piece = layout.pieces[index]
                assert low == reached[index], "elements of a piece come in order, none left out"
                assert piece.offset + low * piece.spec.itemsize_bytes == position
                assert piece.placement == block.placement, "a block is copied at one time"
                reached[index] = high
                position += (high - low) * piece.spec.itemsize_bytes
            assert position == block.offset + block.nbytes
            offset = position
        assert offset == layout.nbytes
        assert reached == [p.stop - p.start for p in layout.pieces]


@given(spec_lists, world_sizes)
def test_the_load_is_even_at_any_prefix(striped: list[TensorSpec], ranks: int) -> None:
    """In time as well as in total: whichever layer is being reduced, all have as much to copy."""
    loads = np.zeros(ranks, dtype=np.int64)
    for tensor, bounds in zip(striped, stripe_bounds(striped, ranks), strict=True):
        loads += (bounds[:, 1] - bounds[:, 0]) * tensor.itemsize_bytes
        assert loads.max() - loads.min() <= UNIT_BYTES


@given(spec_lists, world_sizes)
def test_a_tensor_smaller_than_a_unit_goes_to_one_rank_whole(
    striped: list[TensorSpec], ranks: int
) -> None:
    for tensor, bounds in zip(striped, stripe_bounds(striped, ranks), strict=True):
        if tensor.nbytes < UNIT_BYTES:
            sizes = bounds[:, 1] - bounds[:, 0]
            assert np.count_nonzero(sizes) == (1 if tensor.numel else 0)


def test_small_tensors_share_blocks() -> None:
    layout = plan_layout([spec(f"t{i}", (10,)) for i in range(1000)], [], 0, 1)
    assert len(layout.blocks) == 1
    assert len(layout.blocks[0].parts) == 1000


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_job_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="not in a job of 4"):
        plan_layout([], [], rank, 4)
