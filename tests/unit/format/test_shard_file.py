"""Shard file: read back as written, and open to any tool that reads safetensors."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.errors import FormatError
from tierckpt.format import (
    BLOCK_BYTES,
    PAGE_BYTES,
    RANK_STATE,
    Layout,
    TensorSpec,
    decode_header,
    encode_header,
    encode_table,
    plan_layout,
)
from tierckpt.state import flat, spec_of

names = st.text(min_size=1, max_size=12)
structures = st.dictionaries(names, st.lists(names, max_size=3), max_size=3)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    specs = []
    for name in draw(st.lists(names, unique=True, max_size=8)):
        shape = tuple(draw(st.lists(st.integers(0, 90), max_size=3)))
        dtype, size = draw(st.sampled_from([("float32", 4), ("bool", 1), ("float8_e4m3fnuz", 1)]))
        specs.append(
            TensorSpec(name, dtype, shape, None, size, draw(st.sampled_from(["cpu", "cuda"])))
        )
    cut = draw(st.integers(0, len(specs)))
    ranks = draw(st.integers(1, 3))
    return plan_layout(specs[:cut], specs[cut:], draw(st.integers(0, ranks - 1)), ranks)


@given(layouts(), st.integers(0, 3 * PAGE_BYTES) | st.integers(0, 4 * BLOCK_BYTES), structures)
def test_a_header_comes_back_as_it_was(
    layout: Layout, rank_state_bytes: int, structure: dict[str, object]
) -> None:
    encoded, data_bytes = encode_header(layout, rank_state_bytes, structure)
    header = decode_header(encoded + bytes(data_bytes))
    assert header.pieces == layout.pieces
    assert header.structure == structure
    assert header.header_bytes == len(encoded)
    assert header.data_bytes == data_bytes == sum(header.block_bytes)
    cut = len(layout.blocks)
    assert header.block_bytes[:cut] == tuple(b.nbytes for b in layout.blocks)
    assert all(n == BLOCK_BYTES for n in header.block_bytes[cut:-1])
    assert all(0 < n <= BLOCK_BYTES for n in header.block_bytes[cut:])
    assert header.tree_offset == len(encoded) + layout.nbytes
    assert header.tree_offset + rank_state_bytes <= len(encoded) + data_bytes
    assert len(encoded) % PAGE_BYTES == data_bytes % PAGE_BYTES == 0


NEWER = [getattr(torch, name) for name in ("float8_e8m0fnu",) if hasattr(torch, name)]
"""Not in the oldest supported torch."""
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    *NEWER,
]
AS_BYTES = {
    torch.complex128,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    *NEWER,
}


def with_random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(high, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8)
    tensor.view(-1).view(torch.uint8).copy_(raw) if tensor.numel() else None
    return tensor


def shard_of(tensors: dict[str, torch.Tensor], rank: int, ranks: int) -> bytes:
    """Build a shard's bytes by the rules: header, then each piece's flat bytes."""
    specs = [spec_of(t, n) for n, t in tensors.items()]
    layout = plan_layout(specs, [], rank, ranks)
    encoded, data_bytes = encode_header(layout, 10, {})
    data = bytearray(data_bytes)
    for piece in layout.pieces:
        values = flat(tensors[piece.spec.name])[piece.start : piece.stop]
        if values.numel():
            raw = values.contiguous().view(torch.uint8).numpy().tobytes()
            data[piece.offset : piece.offset + piece.nbytes] = raw
    return encoded + bytes(data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_reads_whole_tensors_of_every_type(dtype: torch.dtype) -> None:
    tensors = {
        "matrix": with_random_bits((5, 7), dtype),
        "scalar": with_random_bits((), dtype),
        "none": with_random_bits((3, 0), dtype),
    }
    loaded = safetensors.torch.load(shard_of(tensors, 0, 1))
    assert set(loaded) == {*tensors, RANK_STATE}
    for name, tensor in tensors.items():
        if dtype in AS_BYTES:
            assert loaded[name].dtype is torch.uint8
        else:
            assert loaded[name].dtype is dtype
            assert loaded[name].shape == tensor.shape
        if tensor.numel():
            ours = tensor.view(-1).view(torch.uint8)
            assert torch.equal(loaded[name].view(-1).view(torch.uint8), ours)


def test_safetensors_reads_the_stripes_of_a_divided_tensor() -> None:
    tensor = torch.randn(300, 100)
    found = {}
    for rank in range(3):
        found.update(safetensors.torch.load(shard_of({"big": tensor}, rank, 3)))
    del found[RANK_STATE]
    ranges = sorted((*map(int, n[4:-1].split(":")), n) for n in found)
    assert torch.equal(torch.cat([found[n] for _, _, n in ranges]), tensor.view(-1))


def test_a_transposed_tensor_is_stored_flat_in_memory_order_with_its_strides() -> None:
    tensor = torch.randn(4, 6).t()
    shard = shard_of({"t": tensor}, 0, 1)
    assert torch.equal(safetensors.torch.load(shard)["t"], tensor.t().reshape(-1))
    (piece,) = decode_header(shard).pieces
    assert (piece.spec.shape, piece.spec.stride) == ((6, 4), (1, 6))


def rewritten(shard: bytes, **metadata: object) -> bytes:
    length = int.from_bytes(shard[:8], "little")
    header = json.loads(shard[8 : 8 + length])
    header["__metadata__"].update(metadata)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def test_a_newer_major_version_is_refused_with_the_remedy() -> None:
    shard = shard_of({"a": torch.ones(2)}, 0, 1)
    with pytest.raises(FormatError, match=r"this shard has format version 3\.1.*newer"):
        decode_header(rewritten(shard, format_version="3.1"))
    assert (
        decode_header(rewritten(shard, format_version="1.8")).pieces == decode_header(shard).pieces
    )


def test_an_unknown_placement_is_refused() -> None:
    """As of a sharded tensor: its elements would be taken for all of it."""
    shard = shard_of({"a": torch.ones(2)}, 0, 1)
    (piece,) = decode_header(shard).pieces
    own, other = (encode_table([piece._replace(placement=number)]) for number in (1, 2))
    assert decode_header(rewritten(shard, pieces=own)).pieces[0].placement == 1
    with pytest.raises(FormatError, match="2 is not a valid Placement"):
        decode_header(rewritten(shard, pieces=other))


def test_bytes_that_are_no_shard_are_refused() -> None:
    good = shard_of({"a": torch.ones(2)}, 0, 1)
    foreign = safetensors.torch.save({"a": torch.ones(2)})
    huge = (2**60).to_bytes(8, "little") + b"{}"
    broken = rewritten(good, pieces="[[1]]")
    for data in (
        b"",
        b"abc",
        bytes(100),
        huge,
        foreign,
        broken,
        good[:100],
        b"\x02" + bytes(7) + b"[]",
    ):
        with pytest.raises(FormatError):
            decode_header(data)
