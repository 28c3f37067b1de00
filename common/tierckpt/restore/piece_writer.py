"""Filling: what windows of shards have of each piece, copied into the tensors it belongs to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

import torch

from tierckpt.format.layout import Piece
from tierckpt.format.shard_file import ShardHeader, decode_header
from tierckpt.snapshot.copy_plan import as_bytes
from tierckpt.state import tree_codec


class Filler:
    """Shards come one after the other, each in windows; what it is given stays its owner's."""

    header: ShardHeader | None = None
    """Of the shard that came last."""

    def __init__(self, place_of: Callable[[int, Piece], torch.Tensor | None]) -> None:
        """`place_of(shard, piece)`: the tensor that the piece goes into, in the memory order that
        its spec tells; None: nowhere."""
        self._place_of = place_of
        self._offsets: list[int] = []
        """Of the header's pieces."""

    def take(self, shard: int, offset: int, window: memoryview) -> None:
        """Copy what a part of a shard, from byte `offset` on, has of its pieces into place. Parts
        come in order, and the first has the whole header."""
        if offset == 0:
            self.header = decode_header(window)
            self._offsets = [piece.offset for piece in self.header.pieces]
        header = self.header
        assert header is not None
        low = offset - header.header_bytes
        data = torch.frombuffer(window, dtype=torch.uint8)
        for piece, target, begin, end in self._going(shard, low, low + len(window)):
            part = slice(begin - piece.offset, end - piece.offset)
            _bytes_of(target, piece)[part].copy_(data[begin - low : end - low])

    def wants(self, shard: int, low: int, high: int) -> bool:
        """Whether `take` has any use for these bytes, behind the header of the shard it is at."""
        assert self.header is not None
        begin = self.header.header_bytes
        return any(True for _ in self._going(shard, low - begin, high - begin))

    def _going(
        self, shard: int, low: int, high: int
    ) -> Iterator[tuple[Piece, torch.Tensor, int, int]]:
        """Of these bytes of the data what goes somewhere: its piece, where to, and from where up to
        where it lies in the data."""
        assert self.header is not None
        first = max(bisect_left(self._offsets, low) - 1, 0)
        for piece in self.header.pieces[first:]:
            if piece.offset + min(piece.nbytes, 1) > high:  # an empty one may lie at the end
                break
            target = self._place_of(shard, piece)
            begin, end = max(piece.offset, low), min(piece.offset + piece.nbytes, high)
            if target is not None and begin < end:
                yield piece, target, begin, end


def _bytes_of(target: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece's bytes in the tensor it belongs to; both are in the same memory order."""
    return as_bytes(tree_codec.flat(target)[piece.start : piece.stop])


__all__ = ["Filler"]
