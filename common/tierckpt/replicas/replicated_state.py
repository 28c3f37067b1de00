"""The replicated state: the tensors that are equal on all ranks, their places, slices and digests.

Each look finds the tensors again, as optimizers replace them, or the dicts and lists around them.
It runs C loops over lists that were made once, and hashes a slice of units of the live tensors
while these do not change.

On a CPU a unit is hashed by xxh3. On a GPU its digest is a sum of its elements' bits, each
multiplied by an odd number that depends on its position: integer arithmetic that wraps around, so
any flipped bit changes the sum, and the order of additions does not. Nothing is read back from the
GPU before the next boundary.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
import xxhash

from tierckpt._text import error_text
from tierckpt.errors import UnsupportedStateError
from tierckpt.format.layout import REPLICATED, TensorSpec
from tierckpt.state import tree_codec
from tierckpt.state.training_state import TrainingState, Walk, value_of

from .replica_check import NONE, UNIT_BYTES, Unit, cut, fold, stride_of

__all__ = [
    "GPU_PART_ELEMENTS",
    "Finder",
    "Kept",
    "Look",
    "OutdatedError",
    "Place",
    "ReplicatedState",
    "Slice",
    "places_of",
    "weighted_sum",
]


_SIMPLE = (bool, int, float, str, type(None))
"""Types that contain no tensor."""
_SEQUENCES = (list, tuple, deque)


class OutdatedError(RuntimeError):
    """The state has changed since it was listed."""


class Place(NamedTuple):
    """The place of one tensor."""

    holder: dict[Any, Any]
    """A module's parameters; unused for optimizer state."""
    key: Any
    optimizer: torch.optim.Optimizer | None = None
    """None for a parameter."""
    param: torch.Tensor | None = None
    """The parameter with the state; `key` is in that state."""
    nth: int = -1
    """Index of the tensor within that value (LBFGS keeps lists); -1: the value itself."""
    among: int = 0
    """Number of tensors within the value."""


def places_of(state: TrainingState, walk: Walk) -> list[Place]:
    """The places in the order of `Walk.tensors`."""
    modules = state.module_containers()
    held = {id(p): Place(holder, key) for holder in modules for key, p in holder.items()}
    found = [held.get(id(p)) or Place({"": p}, "") for p in walk.params]
    optimizers = list(state.optimizers.values())
    within = {
        (index, id(param), path): (key, nth, len(paths))
        for param, index, key, _ in walk.odd
        for paths in (_paths(_value(optimizers[index], param, key), key),)
        for nth, path in enumerate(paths)
    }
    for _, param, index, path in walk.state:
        key, nth, count = within.get((index, id(param), path), (path, -1, 0))
        found.append(Place({}, key, optimizers[index], param, nth, count))
    return found


def _entries(value: Any) -> list[tuple[str, torch.Tensor]]:
    entries = tree_codec.Entries()
    tree_codec.pack(value, "", entries)
    return entries.found


def _value(optimizer: torch.optim.Optimizer, param: torch.Tensor, key: str) -> Any:
    return value_of(optimizer.state.get(param) or {}, key)


def _paths(value: Any, key: str) -> list[str]:
    return [f"{key}{path}" for path, _ in _entries(value)]


def _within(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, in the order of a walk."""
    if type(value) in _SEQUENCES and all(type(each) in tree_codec.PLAIN for each in value):
        return list(value)
    return [tensor for _, tensor in _entries(value)]


class Finder:
    """Finds the tensors at given places."""

    def __init__(self, places: Mapping[int, Place]) -> None:
        """Take the places by number."""
        of_params = {n: p for n, p in places.items() if p.optimizer is None}
        plain = {n: p for n, p in places.items() if p.optimizer is not None and p.nth < 0}
        nested: dict[tuple[Any, ...], list[tuple[int, Place]]] = {}
        for number, place in places.items():
            if place.nth >= 0:
                value = (id(place.optimizer), id(place.param), place.key)
                nested.setdefault(value, []).append((number, place))
        self.numbers = [*of_params, *plain, *(n for each in nested.values() for n, _ in each)]
        """Numbers of the tensors, in the order of `find`."""
        self._holders = [place.holder for place in of_params.values()]
        self._keys = [place.key for place in of_params.values()]
        self._owners: list[tuple[torch.optim.Optimizer, torch.Tensor]] = []
        """Optimizers, and the parameters with state in them."""
        indices: dict[tuple[int, int], int] = {}

        def owner(place: Place) -> int:
            assert place.optimizer is not None
            assert place.param is not None
            at = indices.setdefault((id(place.optimizer), id(place.param)), len(indices))
            if at == len(self._owners):
                self._owners.append((place.optimizer, place.param))
            return at

        self._at = [owner(place) for place in plain.values()]
        self._state_keys = [place.key for place in plain.values()]
        self._nested = [
            (owner(each[0][1]), each[0][1].key, each[0][1].among, [p.nth for _, p in each])
            for each in nested.values()
        ]

    def find(self) -> list[Any]:
        """The objects at the places now, in the order of `numbers`; one may no longer be a tensor.
        Raises OutdatedError if one is missing."""
        try:
            found: list[Any] = list(map(dict.__getitem__, self._holders, self._keys))
            kept: list[Any] = [optimizer.state.get(param) for optimizer, param in self._owners]
            found += map(dict.__getitem__, map(kept.__getitem__, self._at), self._state_keys)
            for at, key, count, which in self._nested:
                within = _within(value_of(kept[at], key))
                if len(within) != count:
                    raise OutdatedError(f"there are {len(within)} tensors in {key!r}, not {count}")
                found += map(within.__getitem__, which)
        except (KeyError, TypeError, AttributeError, UnsupportedStateError) as error:
            raise OutdatedError(error_text(error)) from error
        return found


class Kept:
    """A snapshot of the optimizer state's structure: keys, types, and nested tensors."""

    def __init__(self, state: TrainingState, walk: Walk) -> None:
        containers = state.containers()
        self._keys, self._types = _keys(containers), _types(containers)
        optimizers = list(state.optimizers.values())
        values = [
            (optimizers[i], p, key, _value(optimizers[i], p, key)) for p, i, key, _ in walk.odd
        ]
        self._nests = [
            (optimizer, param, key, _paths(value, key))
            for optimizer, param, key, value in values
            if not isinstance(value, _SIMPLE)
        ]

    def stands(self, state: TrainingState) -> bool:
        """True while the structure is the same. Takes some 60 nanoseconds per tensor, 2
        microseconds for one in a list."""
        now = state.containers()
        if _keys(now) != self._keys or _types(now) != self._types:
            return False
        try:
            return all(_paths(_value(o, p, key), key) == paths for o, p, key, paths in self._nests)
        except UnsupportedStateError:
            return False


def _keys(containers: Sequence[dict[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(containers))


def _types(containers: Sequence[dict[Any, Any]]) -> list[type]:
    return list(map(type, chain.from_iterable(map(dict.values, containers))))


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


INLINE_BYTES = 1024 * 1024
"""Less than this is hashed at the boundary: waking a thread takes longer, and so does hashing
later, when the data has left the caches."""
SHARE_BYTES = 256 * 1024
"""A thread that hashes beside another one takes this much at a time."""
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""As a signed number. Multiplied by a position it is spread over all bits."""

_version_counter = attrgetter("_version")


class Look:
    """The digests of some slices at one boundary. Methods document their threads."""

    def __init__(self, replicated: ReplicatedState, which: range, turn: int, version: int) -> None:
        """Start the look. Training thread, at the boundary."""
        self.replicated, self.which = replicated, which
        self.turn, self.version = turn, version
        self.submit: Callable[[Look], None] | None = None
        """Makes a copier `run` it; called at most once."""
        self._slice = replicated.slice_of(which)
        self.units = self._slice.units
        self.digests: list[int] = []
        """By unit, once all are computed."""
        self._digest = NONE
        self._tensors: list[torch.Tensor] = []
        self._counters: list[int] = []
        self._gpu: _GpuSums | None = None
        self._shared = self._slice.nbytes >= INLINE_BYTES
        """True if a copier and the barrier share the work, unit by unit."""
        self._memory: list[Any] | None = None
        self._found: dict[int, int] = {}
        self._todo: deque[int] = deque()
        self._in_flight = 0
        self._failed = False
        self.over = False
        """True when no thread reads the tensors any more."""
        try:
            self._start()
        except (OutdatedError, TypeError, AttributeError):  # a tensor is no longer a tensor
            self._failed = self.over = replicated.outdated = True

    def _start(self) -> None:
        """Hash a small slice at once, while the caches have it from the optimizer's step. Raises
        OutdatedError."""
        tensors = self._slice.tensors()
        if not all(self._slice.on_host):
            self._gpu = _GpuSums(self._slice.parts(tensors))
        if not self._shared:
            self._hash_all(self._slice.memory(tensors))
            self.over = True
            if self._gpu is None:
                self._fold()
            return
        self._counters = self._count(tensors)
        # Aliases keep the memory alive if a tensor is replaced in the meantime (`.data = `).
        self._tensors = list(map(torch.Tensor.detach, tensors))
        self._todo.extend(range(len(self.units)))

    def _count(self, tensors: list[torch.Tensor]) -> list[int]:
        """Read autograd's version counters."""
        try:
            return list(map(_version_counter, tensors))
        except RuntimeError:  # tensors made in inference mode have none
            return [t._version for t in tensors if not t.is_inference()]

    def wake(self) -> None:
        """Training thread: the tensors do not change now, and a copier may run without delaying
        anything."""
        submit, self.submit = self.submit, None
        if submit is not None and self._shared:
            submit(self)

    def run(self) -> None:
        """Hash all units that no thread has started. Copier thread, or the barrier."""
        while self._work():
            pass

    def fail(self, error: BaseException) -> None:
        """Record that there is no digest. Any thread."""
        self.replicated.outdated |= isinstance(error, OutdatedError)
        with self.replicated.changed:
            self._failed = True
            self.replicated.changed.notify_all()

    def _work(self) -> bool:
        """Hash a share of the remaining units; returns False if there are none."""
        changed = self.replicated.changed
        with changed:
            if self.over or self._failed or not self._todo:
                return False
            share = self._take_share()
            self._in_flight += 1
        try:
            with changed:
                if self._memory is None:
                    self._memory = self._slice.memory(self._tensors)
            memory = [(i, self._memory[i]) for i in share]
            digests = {i: xxhash.xxh3_64_intdigest(part) for i, part in memory if part is not None}
            with changed:
                self._found.update(digests)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            with changed:
                self._in_flight -= 1
                if not self._in_flight:
                    changed.notify_all()
        return True

    def _take_share(self) -> list[int]:
        share, nbytes = [], 0
        while self._todo and nbytes < SHARE_BYTES:
            index = self._todo.popleft()
            nbytes += self.units[index].high - self.units[index].low
            share.append(index)
        return share

    def finish(self) -> None:
        """Hash the remaining units. Training thread, before anything changes the tensors. On return
        no thread reads the tensors any more."""
        if self.over:
            return
        self.submit = None
        try:
            self.run()
            with self.replicated.changed:
                self.replicated.changed.wait_for(lambda: not self._in_flight)
        except Exception as error:
            self.fail(error)
        finally:
            with self.replicated.changed:
                self.over = True
        # A changed counter: a tensor changed during the look, so ranks have hashed different
        # states.
        self._failed |= self._count(self._tensors) != self._counters
        self._tensors, self._memory = [], None

    def _hash_all(self, memory: list[Any]) -> None:
        if self._gpu is None:
            self.digests = list(map(xxhash.xxh3_64_intdigest, memory))
            return
        for index, part in enumerate(memory):
            if part is not None:
                self._found[index] = xxhash.xxh3_64_intdigest(part)

    def fetch(self) -> int:
        """The digest, or NONE if there is none. Training thread, at the next boundary."""
        if not self._failed and self.over and self._digest == NONE:
            if self._gpu is not None:
                self._found.update(self._gpu.fetch())
                self._gpu = None
            self._fold()
        return self._digest

    def _fold(self) -> None:
        if len(self.digests) != len(self.units):
            self.digests = [self._found[i] for i in range(len(self.units))]
        head = (self.turn, self.version, self.replicated.structure)
        self._digest = fold(head, self.digests)


class _GpuSums:
    """Sums of units on a GPU, being computed. Training thread.

    They are queued on the current stream before everything later, so no step comes before them.
    """

    def __init__(self, parts: list[tuple[int, torch.Tensor, Unit, TensorSpec]]) -> None:
        """`parts` come from `Slice.parts`."""
        self._indices = [index for index, *_ in parts]
        sums = []
        for _, tensor, unit, spec in parts:
            item = spec.itemsize_bytes
            flat = tree_codec.flat(tensor)[unit.low // item : unit.high // item]
            sums.append(weighted_sum(flat))
        stacked = torch.stack(sums)
        self._arrived: torch.cuda.Event | None = None
        if stacked.is_cuda:
            self._host = torch.empty(len(sums), dtype=torch.int64, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record()
        else:
            self._host = stacked.cpu()

    def fetch(self) -> Iterable[tuple[int, int]]:
        """Pairs (unit's index in the look, digest). They were launched an iteration ago."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return zip(self._indices, (v % (1 << 64) for v in self._host.tolist()), strict=True)


_weights: dict[torch.device, torch.Tensor] = {}


def weighted_sum(flat: torch.Tensor) -> torch.Tensor:
    """The sum of a 1-d tensor's bits as 64-bit integers, each times its position's odd number. It
    wraps around. Computed on the tensor's device without waiting."""
    bits = (
        flat.view(_INTEGERS[flat.element_size()])
        if flat.element_size() <= 8
        else (torch.view_as_real(flat).view(torch.int64).reshape(-1))
    )
    weights = _weights.get(flat.device)
    if weights is None or len(weights) < len(bits):
        places = torch.arange(max(len(bits), GPU_PART_ELEMENTS), device=flat.device)
        weights = _weights[flat.device] = (places + 1) * _GOLDEN | 1
    return torch.mul(bits, weights[: len(bits)]).sum()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
