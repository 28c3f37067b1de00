"""Tensors that a restore has to make: their memory taken, and filled, in time.

A freshly started optimizer has no state yet, so most of what is loaded goes into new memory, and
the kernel clears each page of it when it is touched first: that takes longer than to copy into it.
What a rank's own headers name is known as soon as they are read, and its thread has nothing to do
until the rest is. Shards are striped: almost every large tensor is named in each of them.

Where the shards are in memory there is nothing to wait for: a page is touched by copying what
belongs there, which is one way to memory, where touching first makes two.

Nobody sees a new tensor before all of the version is verified, so it may be filled while that is
still under way, and thrown away with a version that proves damaged. What is live has to wait.
"""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

import torch

from tierckpt.format.layout import REPLICATED, Piece, TensorSpec
from tierckpt.format.shard_file import ShardHeader, decode_header
from tierckpt.state import tree_codec
from tierckpt.state.names import FIXED, path_of
from tierckpt.state.training_state import TrainingState
from tierckpt.storage.files.mapped_file import populate

from .shard_image import Part

LARGE_BYTES = 256 * 1024
"""Below it memory comes out of the allocator's heap, and most of that was touched before."""


class TensorPreallocator:
    """Makes optimizer state that is not in the live optimizer. One thread calls, but for `fill`."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._made: dict[str, tuple[TensorSpec, torch.Tensor]] = {}
        self._before: dict[str, tuple[TensorSpec, torch.Tensor]] = {}
        """At the last try."""
        self._live: dict[str, torch.Tensor] = {}
        """By name, what there is already; nothing where nothing is wanted."""
        self._untouched: list[torch.Tensor] = []
        self._given: dict[str, TensorSpec] = {}
        """Of those that the caller has."""
        self._filled: dict[int, int] = {}
        """By shard: up to where in its data they have what is theirs."""

    def begin(self, wanted: bool) -> None:
        """Another version, or another try; what was made for the one before is there for it. If it
        is not `wanted`, nothing of this one is foreseen."""
        self._live = {}
        with contextlib.suppress(Exception):
            if wanted:
                self._live = {n: tensor for n, tensor, _ in self._state.entries(self._state.walk())}
        self._before, self._made = self._made, {}
        self._given, self._filled, self._untouched = {}, {}, []

    def foresee(self, header: ShardHeader) -> None:
        """Make the large ones on the host that this shard has pieces of. Before threads bring pages
        of the shard: who maps memory waits for all who do that, and for their disk.

        Guesses: what is not asked for later goes with this object. It never raises, as its rank
        would be alone with that: what is wrong here is met, and told, by the loading.
        """
        with contextlib.suppress(Exception):
            for spec in (piece.spec for piece in header.pieces):
                if not self._wanted(spec):
                    continue
                made, tensor = self._before.pop(spec.name, (None, None))
                if tensor is None or made != spec:
                    tensor = tree_codec.empty(spec, "cpu")
                    self._untouched.append(tensor)
                self._made[spec.name] = spec, tensor

    def foreseen(self, touch: bool) -> None:
        """That was all: what was made before and these shards do not have goes now. `touch` what is
        new, where there is something to wait for meanwhile. Never raises, as `foresee`."""
        new, self._untouched, self._before = self._untouched, [], {}
        with contextlib.suppress(Exception):
            for tensor in new if touch else ():
                touch_memory(tree_codec.as_bytes(tree_codec.flat(tensor)))

    def fill(self, parts: Iterable[Part]) -> None:
        """Copy what `parts` have of them into place: of the version begun last, that may prove
        damaged still. The parts of a shard come in order, the whole header first. Never raises,
        as `foresee`. Any thread, for shards of its own."""
        if not self._made:
            return
        filler = PieceWriter(self._place_of)
        with contextlib.suppress(Exception):
            for shard, offset, window in parts:
                filler.take(shard, offset, window)
                assert filler.header is not None
                self._filled[shard] = offset + len(window) - filler.header.header_bytes

    def _place_of(self, shard: int, piece: Piece) -> torch.Tensor | None:
        spec, tensor = self._made.get(piece.spec.name, (None, None))
        return tensor if spec == piece.spec and piece.placement is REPLICATED else None

    def has(self, shard: int, piece: Piece) -> bool:
        """True where the tensor that `make` gave has that piece already."""
        within = piece.offset + piece.nbytes <= self._filled.get(shard, 0)
        return (
            within
            and piece.placement is REPLICATED
            and self._given.get(piece.spec.name) == piece.spec
        )

    def _wanted(self, spec: TensorSpec) -> bool:
        if spec.nbytes < LARGE_BYTES or spec.name.startswith(FIXED):
            return False
        param = self._live.get(f"model/{path_of(spec.name)[0]}")
        return (
            spec.name not in self._live
            and param is not None
            and param.device.type == spec.device == "cpu"
            and self._made.get(spec.name, (None,))[0] != spec
        )

    def make(self, spec: TensorSpec, device: torch.device | str) -> torch.Tensor:
        """A tensor of which nothing is filled but what it `has`; the caller's."""
        self._given.pop(spec.name, None)
        foreseen, tensor = self._made.pop(spec.name, (None, None))
        if tensor is not None and foreseen == spec and tensor.device == torch.device(device):
            self._given[spec.name] = spec
            return tensor
        return tree_codec.empty(spec, device)


def touch_memory(tensor: torch.Tensor) -> None:
    """Have the kernel give all of a byte tensor's pages; what is in them is lost."""
    if not populate(tensor.data_ptr(), tensor.nbytes):
        tensor[:: mmap.PAGESIZE].zero_()


class PieceWriter:
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
    return tree_codec.as_bytes(tree_codec.flat(target)[piece.start : piece.stop])
