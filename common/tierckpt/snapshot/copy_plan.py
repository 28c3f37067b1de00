"""The plan of a snapshot: live source tensors and target offsets, block by block.

One `CopyPlan` serves many snapshots. At every boundary only a few C loops run, over lists that were
made once.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from tierckpt._text import some
from tierckpt.format.layout import (
    BLOCK_BYTES,
    PER_RANK,
    REPLICATED,
    Layout,
    TensorSpec,
    plan_layout,
)
from tierckpt.format.shard_file import MODEL, encode_header
from tierckpt.state import tree_codec
from tierckpt.state.modules import changing_buffers
from tierckpt.state.names import named_buffers
from tierckpt.state.training_state import TrainingState, Walk
from tierckpt.storage.memory.slots import Slot

from .copy_engine import Table
from .plan_check import Kinds, PlanCheck, addresses, is_small, same_objects
from .tensor_memory import KindsOfTensors, kinds_of, requires_grad

Part = Callable[[int, int], torch.Tensor]
"""Bytes of elements `[low, high)` of a piece."""


HEADERS = 4
"""Limit of cached headers, one for each length of the rank's tree, and for each set of trained
parameters."""


def _growth_bytes(rank_state_bytes: int) -> int:
    """Room for the tree to grow. Small trees vary by digits from step to step, and lists of metrics
    grow; a header of another length takes time to make, and its slot may not fit."""
    return min(rank_state_bytes // 4, 64 * 1024) + rank_state_bytes // 64


class CopyPlan:
    """A layout with its live tensors: the sources of all copies.

    Valid until the state's structure changes, or a tensor moves or is replaced in its memory: see
    `fits`. All work at a boundary runs in C loops over lists made here, so thousands of small
    tensors do not stall the training.
    """

    def __init__(self, state: TrainingState, walk: Walk, rank: int, ranks: int) -> None:
        state.refuse_odd_keys()
        kinds = kinds_of(walk.tensors)
        entries = state.entries(walk, kinds and kinds.first)
        specs = _specs_of(entries, kinds)
        some_of_each = range(len(entries)) if kinds is None else kinds.first
        self._dense = all(
            t.is_cpu and tree_codec.is_dense(t) for t in (entries[i][1] for i in some_of_each)
        )
        """All striped tensors are on the CPU and dense."""
        own: list[tuple[str, torch.Tensor]] = []
        if walk.placements:
            own = [(n, t) for n, t, p in entries if walk.placement(p) is PER_RANK]
            entries = [entry for entry in entries if walk.placement(entry[2]) is REPLICATED]
            striped = {name for name, *_ in entries}
            specs = [spec for spec in specs if spec.name in striped]
        self.buffers = _Buffers([*state.buffer_entries(walk), *own])
        self.layout: Layout = plan_layout(specs, self.buffers.specs, rank, ranks)
        self.structure, self._tied = state.structure(), state.tied()
        self.began: dict[str, Any] = {}
        if state.has_buffers():
            self.began = changing_buffers.changed(state.first_buffers, state.model)
        self.shared = tree_codec.Packed(state.optimizer_tree.shared(walk.state))
        self.device = next((t.device for t in walk.tensors if t.is_cuda), torch.device("cpu"))
        self.own = own
        """Name and tensor of parameters, and their optimizer state, that each rank has alone."""
        self._buffer_slots, self._held = state.buffer_slots(), state.live_buffers()
        pieces = {p.spec.name for p in self.layout.pieces if p.placement is REPLICATED}
        everything = is_small(walk.tensors)
        copied = [(n, t) for n, t, _ in entries if everything or n in pieces]
        self._copied = [n for n, _ in copied]
        self._check = PlanCheck(state, walk, [t for _, t in copied])
        state.options.look(self._check.touched)
        self._own_params = [(n, t) for n, t in own if n.startswith(MODEL)]
        self._trained_first = state.trained_first
        self.trained = self._trained_now()
        """1 for each tensor that is copied and requires a gradient, else 0; as of the last call of
        `fits`."""
        self._headers: dict[tuple[int, bytes], tuple[bytes, int]] = {}
        self.own_blocks = [i for i, b in enumerate(self.layout.blocks) if b.placement is PER_RANK]
        self.striped_blocks = {*range(len(self.layout.blocks))}.difference(self.own_blocks)
        self._params = [(n, id(p)) for n, _, p in entries]
        aliases = dict(zip(self._copied, self._check.aliases, strict=True))
        self.sources = [
            self.buffers.staged[piece.spec.name]
            if piece.placement is PER_RANK
            else aliases[piece.spec.name]
            for piece in self.layout.pieces
        ]
        """The tensor of each piece: an alias, which keeps the memory alive if the live tensor gets
        another one."""
        self._block_sources: dict[int, tuple[list[torch.Tensor], list[int]]] = {}
        self._table: Table | None = None
        self._storages: set[int] | None = None
        """See `reads`."""

    @functools.cached_property
    def blocks_of(self) -> dict[int, list[int]]:
        """Striped blocks by the `id()` of the parameter to which their data belongs. Made with the
        first release of a single layer: a small state has none."""
        found: dict[int, list[int]] = {}
        param_of, pieces = dict(self._params), self.layout.pieces
        for index, block in enumerate(self.layout.blocks):
            if block.placement is PER_RANK:
                continue
            for number, _, _ in block.parts:
                blocks = found.setdefault(param_of[pieces[number].spec.name], [])
                if not blocks or blocks[-1] != index:
                    blocks.append(index)
        return found

    def _bytes_of(self, index: int) -> torch.Tensor | Part:
        """A piece's bytes: a view, or a function that copies if no view is possible."""
        piece, tensor = self.layout.pieces[index], self.sources[index]
        if tree_codec.is_dense(tensor):
            return tree_codec.as_bytes(tree_codec.flat(tensor)[piece.start : piece.stop])
        return _row_major(tensor, piece.start)  # strided with gaps: made row-major by the copy

    @property
    def odd(self) -> list[Any]:
        """Odd state, as of the last call of `fits`."""
        return self._check.odd

    def differs_alone(self, new: CopyPlan) -> bool:
        """True if other ranks may still have this plan's layout, which `new` has not: `fits` found
        another length of a tensor in its place."""
        return self._check.only_here and self._check.lengths != new._check.lengths

    def fits(self, state: TrainingState, whole: bool = False) -> bool:
        """True while all tensors are the same objects, and those that this rank copies are at the
        same addresses, with the same kinds, as when the plan was made. `whole`: also compare the
        lengths of those that it does not copy."""
        if not (self._check.holds(state, whole) and self._buffers_fit(state)):
            return False
        self.trained = self._trained_now()
        if touched := self._check.touched:
            state.options.look(touched)
        return True

    def _trained_now(self) -> bytes:
        if not self._own_params:
            return self._check.trained
        return self._check.trained + bytes(requires_grad(t) for _, t in self._own_params)

    def trained_parameters(self) -> dict[str, int]:
        """Of each parameter that this rank stores a part of, `ShardHeader.trained`; as of the last
        call of `fits`."""
        names = [*self._copied, *(name for name, _ in self._own_params)]
        flags = zip(names, self.trained, strict=True)
        first = self._trained_first
        return {
            name: flag + 2 * first.get(name, flag) for name, flag in flags if name.startswith(MODEL)
        }

    def _buffers_fit(self, state: TrainingState) -> bool:
        """Accept buffers that were replaced by others of the same names and kinds."""
        slots = state.buffer_slots()
        held = [holder.get(name) for holder, name in slots]
        if slots is self._buffer_slots and same_objects(held, self._held) and self.buffers.stand():
            return True
        if not self.buffers.follow([*named_buffers(state.model), *self.own]):
            return False
        self._buffer_slots, self._held = slots, held
        return True

    @property
    def baseline(self) -> bytes:
        """The result of `counters` at the last call of `fits`."""
        return self._check.baseline

    def read_counters(self) -> None:
        """Read the baseline again, if other code has run since. Raises RuntimeError if that moved
        the memory of a tensor."""
        self._check.baseline = self._check.counters()
        if not self._check.baseline and (names := self.moved()):
            raise RuntimeError(f"{some(names)}: a state_dict() moved their memory")

    def reads(self, storage: torch.UntypedStorage) -> bool:
        """True if this plan copies from the memory of a storage. Any thread."""
        if self._storages is None:
            self._storages = {each.untyped_storage()._cdata for each in self.sources}
        return storage._cdata in self._storages

    def counters(self) -> bytes:
        """Autograd's version counters of the striped tensors that this rank copies: a cheap check
        for torn copies. Empty if the memory of one was moved or freed since the plan was made."""
        return self._check.counters()

    def changed_since(self, counters: bytes) -> list[str]:
        """Names of the tensors with changed counters."""
        both = zip(self._copied, _numbers(counters), _numbers(self.counters()), strict=True)
        return [name for name, then, now in both if then != now]

    def moved(self) -> list[str]:
        """Names of the tensors that have other memory than when the plan was made, which has
        freed the memory that this plan copies from. Any thread."""
        return [self._copied[number] for number in self._check.moved()]

    def header(self, rank_state_bytes: int) -> tuple[bytes, int]:
        """The shard's header and the length of its data, with some room for the tree to grow."""
        growth_bytes = _growth_bytes(rank_state_bytes)
        trained = self.trained
        for room, flags in self._headers:
            fits = rank_state_bytes <= room <= rank_state_bytes + 4 * growth_bytes
            if fits and flags == trained:
                return self._headers[room, flags]
        if len(self._headers) == HEADERS:
            del self._headers[next(iter(self._headers))]
        room = rank_state_bytes + growth_bytes
        self._headers[room, trained] = self._encode_header(room)
        return self._headers[room, trained]

    def encoded_header(self, room_bytes: int) -> bytes:
        """A new header, not cached, for a shard with `room_bytes` for the tree."""
        return self._encode_header(room_bytes)[0]

    def _encode_header(self, room_bytes: int) -> tuple[bytes, int]:
        trained = self.trained_parameters()
        return encode_header(self.layout, room_bytes, self.structure, self._tied, trained)

    def source(self, block: int) -> tuple[list[torch.Tensor], list[int]]:
        """The bytes of a block, in order, and their lengths."""
        known = self._block_sources.get(block)
        if known is not None:
            return known
        parts, views = [], True
        for index, low, high in self.layout.blocks[block].parts:
            piece, source = self.layout.pieces[index], self._bytes_of(index)
            if not isinstance(source, torch.Tensor):
                views = False
                parts.append(source(low, high))
                continue
            size = piece.spec.itemsize_bytes
            whole = high - low == piece.stop - piece.start
            parts.append(source if whole else source[low * size : high * size])
        found = (parts, [p.numel() for p in parts])
        if views:
            self._block_sources[block] = found
        return found

    def table(self) -> Table | None:
        """Addresses of all sources, for the copy engine; None if some are on another device, or
        have gaps. Right for as long as the plan fits, which keeps the memory alive as well."""
        staged = self.buffers.staged.values()
        if self._table is None and self._dense and all(each.is_cpu for each in staged):
            self._table = Table(*self.addresses())
        return self._table

    def addresses(self) -> tuple[np.ndarray, np.ndarray]:
        """Segments and blocks of a `Table`. Only dense sources have a right address."""
        pieces = self.layout.pieces
        sizes = np.array([p.spec.itemsize_bytes for p in pieces], np.uint64)
        starts = np.array([p.start for p in pieces], np.uint64)
        begins = np.array(addresses(self.sources), np.uint64) + starts * sizes
        blocks = self.layout.blocks
        parts = np.array([p for b in blocks for p in b.parts], np.uint64).reshape(-1, 3)
        piece, low, high = parts.T
        lengths = (high - low) * sizes[piece]
        segments = np.stack([begins[piece] + low * sizes[piece], lengths], axis=1)
        counts = [len(b.parts) for b in blocks]
        firsts = accumulate(counts, initial=0)
        rows = [
            (first, count, block.offset, block.nbytes)
            for first, count, block in zip(firsts, counts, blocks, strict=False)
        ]
        return segments, np.array(rows, np.uint64).reshape(-1, 4)


def _specs_of(
    entries: list[tuple[str, torch.Tensor, torch.Tensor]], kinds: KindsOfTensors | None
) -> list[TensorSpec]:
    if kinds is None:
        return tree_codec.specs_of([(name, tensor) for name, tensor, _ in entries])
    rest = [tree_codec.spec_of(entries[number][1], "")[1:] for number in kinds.first]
    pairs = zip(entries, kinds.of_tensor, strict=True)
    return [TensorSpec(name, *rest[kind]) for (name, *_), kind in pairs]


class _Buffers:
    """Staging memory of buffers, and of other tensors that differ between ranks: one tensor per
    dtype and device, filled by one call each."""

    def __init__(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.specs = [tree_codec.spec_of(t, n) for n, t in named]
        self._live = [t for _, t in named]
        self.staged: dict[str, torch.Tensor] = {}
        """By name, flat in memory order."""
        self._batches: list[tuple[torch.Tensor, list[int]]] = []
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(self._live):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
        for (dtype, device), members in kinds.items():
            sizes = [self._live[i].numel() for i in members]
            staging = torch.empty(sum(sizes), dtype=dtype, device=device)
            self._batches.append((staging, members))
            for i, part in zip(members, staging.split(sizes), strict=True):
                self.staged[named[i][0]] = part
        self._look()

    def _look(self) -> None:
        self._pointers = addresses(self._live)
        self._kinds = Kinds(self._live)
        self._flat = [tree_codec.flat(t) for t in self._live]
        self._views = all(
            f.data_ptr() == p for f, p in zip(self._flat, self._pointers, strict=True)
        )

    def stand(self) -> bool:
        """True while the known buffers have the same addresses and kinds."""
        return addresses(self._live) == self._pointers and self._kinds.stand()

    def follow(self, named: list[tuple[str, torch.Tensor]]) -> bool:
        """Use these buffers instead, if they have the same kinds; else return False."""
        if [tree_codec.spec_of(t, n) for n, t in named] != self.specs:
            return False
        self._live = [t for _, t in named]
        self._look()
        return True

    def stage(self) -> None:
        """Copy the buffers aside, on their own devices."""
        if not self._views:  # the flat form of a buffer that is not dense is a copy
            self._flat = [tree_codec.flat(t) for t in self._live]
        for staging, members in self._batches:
            torch.cat([self._flat[i] for i in members], out=staging)


def _numbers(counters: bytes) -> list[int]:
    return array("I", counters).tolist()


def _row_major(tensor: torch.Tensor, start: int) -> Part:
    """Function that copies a range of the piece beginning at element `start`."""
    return lambda low, high: tree_codec.as_bytes(
        tree_codec.row_major(tensor, start + low, start + high)
    )


def copy_parts(target: torch.Tensor, parts: list[torch.Tensor], sizes: list[int]) -> None:
    """Copy the result of `CopyPlan.source` to `target`, which has the same length."""
    if len(parts) == 1:
        target.copy_(parts[0])
    else:
        torch._foreach_copy_(list(target.split(sizes)), parts)


class Binding:
    """A view of a slot's image, which keeps it mapped."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.view = slot.image()

    @functools.cached_property
    def tensor(self) -> torch.Tensor:
        """The image as bytes."""
        return torch.frombuffer(self.view, dtype=torch.uint8)

    def copy_block(self, plan: CopyPlan, block: int, start: int) -> memoryview:
        """Copy one block to `start` bytes past its offset (the header's length); returns it."""
        layout_block = plan.layout.blocks[block]
        low = start + layout_block.offset
        target = self.tensor.narrow(0, low, layout_block.nbytes)
        copy_parts(target, *plan.source(block))
        return self.view[low : low + layout_block.nbytes]

    def copy_tree(
        self, encoded: tree_codec.EncodedTree, begin: int, end: int, block: int
    ) -> memoryview:
        """Copy one block of the rank's tree and of the zeros after it, which fill the bytes from
        `begin` to `end`; returns it."""
        low = begin + block * BLOCK_BYTES
        high = min(low + BLOCK_BYTES, end)
        encoded.copy(low - begin, self.tensor[low:high])
        return self.view[low:high]
