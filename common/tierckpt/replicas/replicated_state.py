"""The replicated state: the tensors that are equal on all ranks, cut into slices of units.

Each look runs C loops over lists that were made once.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
import xxhash

from tierckpt.core.replica_check import UNIT_BYTES, Unit, cut, fold, stride_of
from tierckpt.format.layout import REPLICATED, TensorSpec
from tierckpt.state import tree_codec
from tierckpt.state.training_state import TrainingState

from .tensor_places import Finder, Kept, OutdatedError, places_of

GPU_PART_ELEMENTS = 1 << 20
"""Limit of a unit on a GPU; each unit costs two launches."""


class ReplicatedState:
    """The tensors that are equal on all ranks, cut into slices. Training thread."""

    def __init__(self, state: TrainingState, slices: int) -> None:
        """List the tensors of the state as it is. Raises as `TrainingState.entries` does."""
        state.refresh_names()
        walk = state.walk()
        found = list(zip(state.entries(walk), places_of(state, walk), strict=True))
        found = [(e, place) for e, place in found if walk.placement(e[2]) is REPLICATED]
        self.names = [name for (name, *_), _ in found]
        self.specs = [tree_codec.spec_of(tensor, name) for (name, tensor, _), _ in found]
        self.lines = [_line(spec) for spec in self.specs]
        """For each tensor, its properties that must be equal besides its content."""
        self.line_hashes = [xxhash.xxh3_64_intdigest(line.encode()) for line in self.lines]
        self.structure = fold((), self.line_hashes)
        self.places = [place for _, place in found]
        self.outdated = False
        """True after a look found something else in place of one of these."""
        sizes = [spec.nbytes for spec in self.specs]
        dealt = cut(sizes, slices, list(map(_unit_bytes, self.specs)))
        self.slices = [Slice(self, units) for units in dealt]
        self.stride = stride_of(sizes, slices)
        """Looks cover this many slices, at every `stride`-th boundary."""
        self._joined: dict[int, Slice] = {}
        self.changed = threading.Condition()
        """For looks; one at a time is in progress."""
        self._kept = Kept(state, walk)
        self._held = _held_by_modules(state)
        self._groups, self._group_members = state.group_sizes(), state.group_members()

    def stands(self, state: TrainingState) -> bool:
        """True while the state has the same parameters, and optimizers the same keys for each."""
        return (
            not self.outdated
            and self._kept.stands(state)
            and _same(_held_by_modules(state), self._held)
            and state.group_sizes() == self._groups
            and _same(state.group_members(), self._group_members)
        )

    def slice_of(self, which: range) -> Slice:
        """One slice, or several as one."""
        if len(which) == 1:
            return self.slices[which[0]]
        joined = self._joined.get(which[0]) if len(which) == self.stride else None
        if joined is None:
            joined = Slice(self, list(chain.from_iterable(self.slices[i].units for i in which)))
            if len(which) == self.stride:
                self._joined[which[0]] = joined
        return joined


class Slice:
    """Some units, and the places of their tensors. Each look runs C loops over lists that were made
    once."""

    def __init__(self, replicated: ReplicatedState, units: Sequence[Unit]) -> None:
        self.units = units
        places = {unit.tensor: replicated.places[unit.tensor] for unit in units}
        self._finder = Finder(places)
        numbers = self._finder.numbers
        self._at = {number: i for i, number in enumerate(numbers)}
        self._specs = [replicated.specs[number] for number in numbers]
        self.on_host = [spec.device == "cpu" for spec in self._specs]
        self.nbytes = sum(u.high - u.low for u in units if self.on_host[self._at[u.tensor]])
        """Bytes on the host."""
        self._pointers: list[int] = []
        self._sizes: list[int] = []
        self._strides: list[tuple[int, ...]] = []
        """Empty if all are contiguous."""
        self._memory: list[Any] = []

    def tensors(self) -> list[torch.Tensor]:
        """The tensors as they are now. Raises OutdatedError if one is gone."""
        return self._finder.find()

    def parts(
        self, tensors: list[torch.Tensor]
    ) -> list[tuple[int, torch.Tensor, Unit, TensorSpec]]:
        """(number in the slice, tensor, unit, spec) of the units that are not on the host. Raises
        OutdatedError if a tensor has changed its properties."""
        found = []
        for index, unit in enumerate(self.units):
            at = self._at[unit.tensor]
            if not self.on_host[at]:
                _check(tensors[at], self._specs[at])
                found.append((index, tensors[at], unit, self._specs[at]))
        return found

    def memory(self, tensors: list[torch.Tensor]) -> list[Any]:
        """By unit its bytes, None if it is not on the host. Valid while the tensors exist. Raises
        OutdatedError if a tensor has changed its properties."""
        try:
            pointers = list(map(torch.Tensor.data_ptr, tensors))
            if pointers == self._pointers and self._is_same_memory(tensors):
                return self._memory
        except (TypeError, RuntimeError) as error:
            raise OutdatedError(f"not a tensor: {error}") from error
        for tensor, spec in zip(tensors, self._specs, strict=True):
            _check(tensor, spec)
        dense = [
            not host or tree_codec.is_dense(t)
            for host, t in zip(self.on_host, tensors, strict=True)
        ]
        memory = [self._of(tensors[self._at[u.tensor]], u, dense) for u in self.units]
        if all(dense):  # otherwise some are copies of this moment
            contiguous = all(map(torch.Tensor.is_contiguous, tensors))
            self._pointers, self._sizes = pointers, list(map(_nbytes, tensors))
            self._strides = [] if contiguous else list(map(torch.Tensor.stride, tensors))
            self._memory = memory
        return memory

    def _is_same_memory(self, tensors: list[torch.Tensor]) -> bool:
        """Whether the tensors have the same memory, given equal pointers."""
        if list(map(_nbytes, tensors)) != self._sizes:
            return False
        if self._strides:
            return list(map(torch.Tensor.stride, tensors)) == self._strides
        return all(map(torch.Tensor.is_contiguous, tensors))

    def _of(self, tensor: torch.Tensor, unit: Unit, dense: list[bool]) -> Any:
        at, size = self._at[unit.tensor], unit.high - unit.low
        if not self.on_host[at]:
            return None
        if dense[at]:
            return (ctypes.c_char * size).from_address(tensor.data_ptr() + unit.low)
        item = self._specs[at].itemsize_bytes
        part = tree_codec.as_bytes(
            tree_codec.row_major(tensor, unit.low // item, unit.high // item)
        )
        return ctypes.create_string_buffer(ctypes.string_at(part.data_ptr(), size), size)


def _unit_bytes(spec: TensorSpec) -> int:
    return UNIT_BYTES if spec.device == "cpu" else GPU_PART_ELEMENTS * spec.itemsize_bytes


def _line(spec: TensorSpec) -> str:
    order = "" if spec.stride is None else f" in memory order {list(spec.stride)}"
    return f"{spec.name}: {spec.dtype} {list(spec.shape)}{order} on {spec.device}"


def _held_by_modules(state: TrainingState) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, state.module_containers())))


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


_nbytes = attrgetter("nbytes")


def _check(tensor: Any, spec: TensorSpec) -> None:
    """Raise OutdatedError if the tensor has other properties."""
    if not (
        isinstance(tensor, torch.Tensor)
        and tensor.shape == spec.shape
        and str(tensor.dtype).removeprefix("torch.") == spec.dtype
        and tensor.device.type == spec.device
    ):
        raise OutdatedError(f"{spec.name} was replaced by another tensor")


__all__ = ["GPU_PART_ELEMENTS", "ReplicatedState", "Slice"]
