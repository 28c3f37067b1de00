"""PieceWriter copies each piece from the windows of a shard to its target."""

from __future__ import annotations

import random

import pytest
import torch

from tierckpt.format import Piece, TensorSpec, decode_header, encode_header, plan_layout
from tierckpt.restore import PieceWriter

LENGTHS = [0, 1000, 0, 0, 24, 1024, 0]
"""Sizes in units of four bytes; empty pieces lie at borders of windows, and at the end."""


@pytest.mark.parametrize("window_bytes", [4, 96, 1000, 4096, 1 << 20])
def test_every_piece_is_met_whatever_the_windows(window_bytes: int) -> None:
    shapes = enumerate((4 * n,) for n in LENGTHS)
    specs = [TensorSpec(f"o/p{i}/s", "uint8", shape, None, 1) for i, shape in shapes]
    layout = plan_layout([], specs, 0, 1)
    header, data_bytes = encode_header(layout, 100, {})
    image = bytearray(header) + bytearray(random.Random(1).randbytes(data_bytes))
    pieces = decode_header(memoryview(image)).pieces
    made = {spec.name: torch.zeros(spec.shape, dtype=torch.uint8) for spec in specs}
    met: set[str] = set()

    def place_of(shard: int, piece: Piece) -> torch.Tensor:
        met.add(piece.spec.name)
        return made[piece.spec.name]

    filler = PieceWriter(place_of)
    low, high = 0, len(header)
    while low < len(image):
        if low == 0 or filler.wants(0, low, high):
            filler.take(0, low, memoryview(image)[low:high])
        low, high = high, min(high + window_bytes, len(image))
    assert met == {spec.name for spec in specs}
    for piece in pieces:
        start = len(header) + piece.offset
        assert made[piece.spec.name].numpy().tobytes() == image[start : start + piece.nbytes]
