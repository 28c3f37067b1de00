"""New tensors of a restore: memory is allocated, and filled, while shards are still being read.

A new optimizer has no state yet, so most of the data is loaded into new memory. The kernel clears
each new page when it is first touched, which takes longer than the copy. The tensors are known as
soon as this rank's own headers are read, and the training thread is idle until the rest is read.
Shards are striped: almost every large tensor is named in each of them.

If the shards are in memory there is no wait to use: copying touches each page, which passes over
the memory once, and touching first would make it twice.

New tensors are unused until the whole version is verified, so they may be filled before that, and
dropped if the version proves damaged. Live tensors must wait for the verification.
"""

from __future__ import annotations

import contextlib
import ctypes
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

SMALL_BYTES = 64 * 1024
"""torch takes longer to prepare the copy of so few bytes than to copy them."""

LARGE_BYTES = 256 * 1024
"""Smaller tensors come from the allocator's heap, most of which was touched before."""


class TensorPreallocator:
    """Makes optimizer state that is not in the live optimizer. One thread makes all calls but
    `fill`."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._made: dict[str, tuple[TensorSpec, torch.Tensor]] = {}
        self._before: dict[str, tuple[TensorSpec, torch.Tensor]] = {}
        """Tensors of the previous attempt."""
        self._live: dict[str, torch.Tensor] | None = {}
        """Live tensors by name, None until they are needed; empty if preallocation is not
        wanted."""
        self._untouched: list[torch.Tensor] = []
        self._given: dict[str, TensorSpec] = {}
        """Specs of the tensors that were handed to the caller."""
        self._filled: dict[int, int] = {}
        """By shard: offset in its data up to which its pieces were copied."""

    def begin(self, wanted: bool) -> None:
        """Begin another version, or another attempt; tensors made for the previous one are reused.
        If not `wanted`, nothing is preallocated for this one."""
        self._live = None if wanted else {}
        self._before, self._made = self._made, {}
        self._given, self._filled, self._untouched = {}, {}, []

    def foresee(self, header: ShardHeader) -> None:
        """Allocate the large host tensors that this shard has pieces of. Call it before threads
        read pages of the shard: mapping memory waits for all page faults of the process, and for
        their disk.

        This is a guess: tensors that are not asked for later are freed with this object. Never
        raises, as only this rank would fail: loading meets the same problem again, and reports it.
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
        """End the preallocation: tensors of the previous attempt that these shards do not have are
        freed. `touch` the new ones if there is time to use, because shards are still being read.
        Never raises, like `foresee`."""
        new, self._untouched, self._before = self._untouched, [], {}
        with contextlib.suppress(Exception):
            for tensor in new if touch else ():
                touch_memory(tree_codec.as_bytes(tree_codec.flat(tensor)))

    def fill(self, parts: Iterable[Part]) -> None:
        """Copy the pieces of new tensors in `parts` into place, although this version may still
        prove damaged. The parts of a shard come in order, the whole header first. Never raises,
        like `foresee`. Any thread; each shard belongs to one thread."""
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
        """True if the tensor that `make` returned already has that piece."""
        if shard not in self._filled:
            return False
        within = piece.offset + piece.nbytes <= self._filled[shard]
        return (
            within
            and piece.placement is REPLICATED
            and self._given.get(piece.spec.name) == piece.spec
        )

    def _wanted(self, spec: TensorSpec) -> bool:
        if spec.nbytes < LARGE_BYTES or spec.name.startswith(FIXED):
            return False
        live = self._live_tensors()
        param = live.get(f"model/{path_of(spec.name)[0]}")
        return (
            spec.name not in live
            and param is not None
            and param.device.type == spec.device == "cpu"
            and self._made.get(spec.name, (None,))[0] != spec
        )

    def _live_tensors(self) -> dict[str, torch.Tensor]:
        if self._live is None:
            self._live = {}  # also if this raises
            self._live = {n: tensor for n, tensor, _ in self._state.entries(self._state.walk())}
        return self._live

    def make(self, spec: TensorSpec, device: torch.device | str) -> torch.Tensor:
        """A tensor for the caller; it contains only the pieces for which `has` is True."""
        self._given.pop(spec.name, None)
        if not self._made:
            return tree_codec.empty(spec, device)
        foreseen, tensor = self._made.pop(spec.name, (None, None))
        if tensor is not None and foreseen == spec and tensor.device == torch.device(device):
            self._given[spec.name] = spec
            return tensor
        return tree_codec.empty(spec, device)


def touch_memory(tensor: torch.Tensor) -> None:
    """Have the kernel allocate all pages of a byte tensor; its contents are lost."""
    if not populate(tensor.data_ptr(), tensor.nbytes):
        tensor[:: mmap.PAGESIZE].zero_()


class PieceWriter:
    """Copies pieces of shards into tensors. Shards come one after the other, each in windows; the
    caller keeps ownership of all arguments."""

    header: ShardHeader | None = None
    """Header of the latest shard."""

    def __init__(self, place_of: Callable[[int, Piece], torch.Tensor | None]) -> None:
        """`place_of(shard, piece)` returns the tensor for the piece, in the memory order of its
        spec; None to skip the piece."""
        self._place_of = place_of
        self._ends: list[int] = []
        """Ends of the header's pieces in the data."""

    def take(self, shard: int, offset: int, window: memoryview) -> None:
        """Copy the pieces in this part of a shard, from byte `offset` on, into place. Parts come in
        order, and the first has the whole header."""
        if offset == 0:
            self.header = decode_header(window)
            self._ends = [piece.offset + piece.nbytes for piece in self.header.pieces]
        header = self.header
        assert header is not None
        low = offset - header.header_bytes
        data = torch.frombuffer(window, dtype=torch.uint8)
        source = data.data_ptr() - low
        for piece, target, begin, end in self._going(shard, low, low + len(window)):
            count, size = end - begin, piece.spec.itemsize_bytes
            first = piece.start * size + begin - piece.offset
            inside = first >= 0 and first + count <= target.nbytes
            if count < SMALL_BYTES and target.is_cpu and inside:
                ctypes.memmove(target.data_ptr() + first, source + begin, count)
            else:  # torch refuses a range that is not inside
                part = slice(begin - piece.offset, end - piece.offset)
                _bytes_of(target, piece)[part].copy_(data[begin - low : end - low])

    def wants(self, shard: int, low: int, high: int) -> bool:
        """Whether `take` needs these bytes, which follow the header of the current shard."""
        assert self.header is not None
        begin = self.header.header_bytes
        return any(True for _ in self._going(shard, low - begin, high - begin))

    def _going(
        self, shard: int, low: int, high: int
    ) -> Iterator[tuple[Piece, torch.Tensor, int, int]]:
        """The pieces to copy in this range of the data: piece, target, and its begin and end in the
        data."""
        assert self.header is not None
        pieces, ends = self.header.pieces, self._ends
        for number in range(bisect_left(ends, low), len(pieces)):
            piece, stop = pieces[number], ends[number]
            begin = piece.offset
            if begin + (stop > begin) > high:  # an empty one may lie at the end
                break
            target = self._place_of(shard, piece)
            begin, end = max(begin, low), min(stop, high)
            if target is not None and begin < end:
                yield piece, target, begin, end


def _bytes_of(target: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece's bytes in its tensor; both have the same memory order."""
    return tree_codec.as_bytes(tree_codec.flat(target)[piece.start : piece.stop])
