"""Shard summaries: enough for all ranks to refuse a version, and no larger than its tensors."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddp_ckpt.torch_group import gathered_bytes
from tierckpt.format import (
    RankState,
    ShardHeader,
    ShardSummary,
    TensorSpec,
    VersionSummary,
    counts,
    decode_header,
    encode_header,
    lacking,
    plan_layout,
)

NOTHING = RankState(b"", b"", ())


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "float32", shape, None, 4)


def headers_of(
    striped: Sequence[TensorSpec], own: Sequence[TensorSpec], ranks: int
) -> list[ShardHeader]:
    found = []
    for rank in range(ranks):
        encoded, _ = encode_header(plan_layout(striped, own, rank, ranks), 10, {"adam": {}})
        found.append(decode_header(encoded))
    return found


def contents_of(headers: Sequence[ShardHeader]) -> VersionSummary:
    return VersionSummary(
        [ShardSummary.of(shard, header) for shard, header in enumerate(headers)], NOTHING
    )


@given(
    st.lists(st.lists(st.integers(0, 200), max_size=2), max_size=9),
    st.integers(1, 7),
)
def test_every_tensor_is_listed_once_and_a_complete_list_is_recognized(
    shapes: list[list[int]], ranks: int
) -> None:
    striped = [spec(f"model/{number}", *shape) for number, shape in enumerate(shapes)]
    own = [spec("buffer/mean", 3)]
    headers = headers_of(striped, own, ranks)
    contents = contents_of(headers)
    assert contents.specs == {each.name: each for each in striped}
    assert sum(len(each.starting) for each in contents.outlines) == len(striped)
    assert contents.whole()
    assert lacking(contents.specs, [counts([header]) for header in headers]) == []
    assert contents.nbytes == sum(h.header_bytes + h.data_bytes for h in headers)
    assert contents.structure == {"adam": {}}
    assert [each.structure is None for each in contents.outlines] == [False] + [True] * (ranks - 1)
    assert RankState.of(b"m", b"t", headers[-1]).specs == tuple(own)


@pytest.mark.parametrize(
    ("beginning", "said"),
    [
        (True, "model/a: no shard has its first element"),
        (False, "model/a: only 65536 of 98304 elements are in the shards"),
    ],
)
def test_missing_tensors_are_named(beginning: bool, said: str) -> None:
    headers = headers_of([spec("model/a", 3 << 15), spec("model/b", 1 << 14)], [], 3)
    gone = next(
        piece
        for header in headers
        for piece in header.pieces
        if piece.spec.name == "model/a" and (piece.start == 0) == beginning
    )
    headers = [replace(h, pieces=tuple(p for p in h.pieces if p is not gone)) for h in headers]
    contents = contents_of(headers)
    assert not contents.whole()
    assert said in lacking(contents.specs, [counts(headers)])


def test_elements_of_one_tensor_do_not_stand_for_anothers() -> None:
    """The total of elements is right, but each tensor's is wrong."""
    headers = headers_of([spec("model/a", 1 << 14), spec("model/b", 1 << 14)], [], 1)
    a, b = headers[0].pieces
    shorter, longer = a._replace(stop=a.stop - 8), b._replace(stop=b.stop + 8)
    contents = contents_of([replace(headers[0], pieces=(shorter, longer))])
    assert not contents.whole()


def test_ten_thousand_ranks_make_a_short_summary() -> None:
    """1,200 tensors with a piece on every rank; all headers would be a gigabyte."""
    ranks, tensors = 10_000, 1_200
    striped = [spec(f"blocks.{n}.attention.weight", 4096, 40_000) for n in range(tensors)]
    one, other = (
        encode_header(plan_layout(striped, [], rank, ranks), 10, {})[0] for rank in (0, 1)
    )
    outlines = ShardSummary.of(0, decode_header(one)), ShardSummary.of(1, decode_header(other))
    assert sorted(len(outline.starting) for outline in outlines) == [0, tensors]
    small, large = sorted(len(pickle.dumps(outline)) for outline in outlines)
    assert ranks * len(one) > 1e9
    assert large + (ranks - 1) * small < 5e6
    # gloo gathers equal sizes: the short ones of all ranks at once, then the rest of the largest.
    width = gathered_bytes([large] + [small] * (ranks - 1))
    assert width == small
    assert ranks * width + large < 5e6
