"""Replica check, the hashing: digests of slices of the live tensors, while these stand still.

`Replicated` knows the tensors, `Look` hashes a slice of them. On a CPU a unit is hashed by xxh3; on
a GPU by a sum of its elements' bits, each times an odd number that depends on its place: in
integers that wrap around, so any bit that flips changes it, and the order of the additions does
not. Nothing is read back from the GPU before the next boundary.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
import xxhash

from . import tree
from .copyplan import as_bytes
from .layout import TensorSpec
from .replicacheck import NONE, UNIT_BYTES, Unit, cut, fold
from .state import TrainingState

INLINE_BYTES = 128 * 1024
"""Less than this is hashed by the barrier: to wake a thread takes longer."""
GPU_PART_ELEMENTS = 1 << 20
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""As a signed number; times a place it is spread over all bits."""

_version_counter = attrgetter("_version")


class Replicated:
    """The tensors that all ranks have alike, cut into slices. Training thread.

    Holds references to parameters; what optimizers keep is looked up anew each time, as some put
    another tensor in its place at every step.
    """

    def __init__(self, state: TrainingState, slices: int) -> None:
        """Of the state as it is. Raises what `TrainingState.entries` raises."""
        state.refresh_names()
        walk = state.walk()
        optimizers = list(state.optimizers.values())
        places: list[tuple[dict[str, Any] | None, str]] = [(None, "") for _ in walk.params]
        places += [(optimizers[i].state[p], key) for _, p, i, key in walk.state]
        found = list(zip(state.entries(walk), places, strict=True))
        found = [(e, place) for e, place in found if id(e[2]) not in walk.own_params]
        self.names = [name for (name, *_), _ in found]
        self.specs = [tree.spec_of(tensor, name) for (name, tensor, _), _ in found]
        sizes = [spec.nbytes for spec in self.specs]
        self.slices = cut(sizes, slices, list(map(_unit_bytes, self.specs)))
        self.lines = [_line(spec) for spec in self.specs]
        """What is to be alike of each tensor besides its content."""
        self.line_hashes = [xxhash.xxh3_64_intdigest(line.encode()) for line in self.lines]
        self.structure = fold((), self.line_hashes)
        self._tensors: list[torch.Tensor | None] = []
        self._places: list[tuple[dict[str, Any], str] | None] = []
        self.nested = False
        """Some are in lists (LBFGS), which cannot be looked up by a key: good for one boundary."""
        for (_, tensor, _), (holder, key) in found:
            by_key = holder is not None and holder.get(key) is tensor
            self.nested |= holder is not None and not by_key
            self._tensors.append(None if by_key else tensor)
            self._places.append((holder, key) if by_key and holder is not None else None)
        self._members = [list(dict.fromkeys(u.tensor for u in units)) for units in self.slices]
        self._containers = state.containers()
        self._keys = list(chain.from_iterable(self._containers))
        self._held = _held_by_modules(state)
        self._groups, self._group_members = state.group_sizes(), state.group_members()

    def stands(self, state: TrainingState) -> bool:
        """True while the state has the same parameters, and optimizers keep the same for each. Some
        30 nanoseconds a tensor."""
        now = state.containers()
        return (
            not self.nested
            and len(now) == len(self._containers)
            and list(chain.from_iterable(now)) == self._keys
            and _same(_held_by_modules(state), self._held)
            and state.group_sizes() == self._groups
            and _same(state.group_members(), self._group_members)
        )

    def tensors_of(self, numbers: Iterable[int]) -> dict[int, torch.Tensor]:
        """Those of a slice, as they are now, by number. Raises KeyError where one is no more."""
        found = {}
        for number in numbers:
            tensor, place = self._tensors[number], self._places[number]
            if place is not None:
                holder, key = place
                tensor = holder[key]
            found[number] = tensor
        return found  # type: ignore[return-value]

    def members(self, which: Sequence[int]) -> list[int]:
        """Numbers of the tensors in these slices."""
        if len(which) == 1:
            return self._members[which[0]]
        return list(dict.fromkeys(chain.from_iterable(self._members[i] for i in which)))


def _unit_bytes(spec: TensorSpec) -> int:
    """On a GPU each costs two launches."""
    return UNIT_BYTES if spec.device == "cpu" else GPU_PART_ELEMENTS * spec.itemsize_bytes


def _line(spec: TensorSpec) -> str:
    order = "" if spec.stride is None else f" in memory order {list(spec.stride)}"
    return f"{spec.name}: {spec.dtype} {list(spec.shape)}{order} on {spec.device}"


def _held_by_modules(state: TrainingState) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, state.module_containers())))


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


class Look:
    """The digests of some slices at one boundary. Methods say which thread calls them."""

    def __init__(
        self, replicated: Replicated, which: Sequence[int], turn: int, version: int
    ) -> None:
        """Training thread, at the boundary. Raises KeyError where a tensor is no more."""
        self.replicated, self.which = replicated, which
        self.turn, self.version = turn, version
        self.units: list[Unit] = list(chain.from_iterable(replicated.slices[i] for i in which))
        self.digests: list[int] = [0] * len(self.units)
        self.digest = NONE
        """Of all; NONE before the end, and where there is none."""
        self.begin: Callable[[Look], None] | None = None
        """Has a copier `run` it; called once at the most."""
        self._tensors = replicated.tensors_of(replicated.members(which))
        self._counted = [t for t in self._tensors.values() if not t.is_inference()]
        self._counters = list(map(_version_counter, self._counted))
        self._changed = threading.Condition()
        self._in_flight = 0
        self._failed = self._over = False
        on_gpu = [
            i for i, u in enumerate(self.units) if self._tensors[u.tensor].device.type != "cpu"
        ]
        self._gpu = _GpuSums(self, on_gpu) if on_gpu else None
        rest = set(on_gpu)
        self._todo = deque(i for i in range(len(self.units)) if i not in rest)
        nbytes = sum(self.units[i].high - self.units[i].low for i in self._todo)
        self.worth_a_thread = nbytes >= INLINE_BYTES

    def wake(self) -> None:
        """Training thread: the tensors stand still, and nobody is in the way of a copier."""
        begin, self.begin = self.begin, None
        if begin is not None and self.worth_a_thread:
            begin(self)

    def run(self) -> None:
        """Copier thread."""
        while self._work():
            pass

    def fail(self, error: BaseException) -> None:
        """There is no digest. Any thread."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def _work(self) -> bool:
        """Hash one unit, if one is left."""
        with self._changed:
            if self._over or self._failed or not self._todo:
                return False
            index = self._todo.popleft()
            self._in_flight += 1
        try:
            self.digests[index] = self._hash(self.units[index])
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            with self._changed:
                self._in_flight -= 1
                if not self._in_flight:
                    self._changed.notify_all()
        return True

    def _hash(self, unit: Unit) -> int:
        number, low, high = unit
        # An alias keeps the memory, whatever somebody makes of the tensor meanwhile (`.data = `).
        tensor, spec = self._tensors[number].detach(), self.replicated.specs[number]
        if not _is_like(tensor, spec):
            raise RuntimeError(f"{spec.name} is another one")
        if tensor.is_contiguous() or tree.is_dense(tensor):
            size = high - low
            memory = (ctypes.c_char * size).from_address(tensor.data_ptr() + low)
            return xxhash.xxh3_64_intdigest(memory)
        item = spec.itemsize_bytes
        part = as_bytes(tree.row_major(tensor, low // item, high // item))
        memory = (ctypes.c_char * (high - low)).from_address(part.data_ptr())
        return xxhash.xxh3_64_intdigest(memory)

    def finish(self) -> None:
        """Training thread, before anything changes the tensors: what is not hashed yet is hashed
        here. Afterwards nobody looks at the tensors any more."""
        if self._over:
            return
        self.begin = None
        try:
            self.run()
            with self._changed:
                self._changed.wait_for(lambda: not self._in_flight)
        finally:
            with self._changed:
                self._over = True
        # Else it was changed under our eyes, and ranks have looked at different moments.
        still = list(map(_version_counter, self._counted)) == self._counters
        self._failed |= not still
        self._tensors, self._counted = {}, []

    def fetch(self) -> int:
        """Training thread, at the next boundary: the digest, NONE if there is none."""
        if not self._failed and self.digest == NONE:
            if self._gpu is not None:
                for index, value in self._gpu.fetch():
                    self.digests[index] = value
                self._gpu = None
            head = (self.turn, self.version, self.replicated.structure)
            self.digest = fold(head, self.digests)
        return self.digest

    def tensor(self, number: int) -> torch.Tensor:
        """One of those that are looked at."""
        return self._tensors[number]


def _is_like(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    return (
        tensor.shape == spec.shape
        and tensor.element_size() == spec.itemsize_bytes
        and tensor.device.type == spec.device
    )


class _GpuSums:
    """Sums of units that are on a GPU, under way. Training thread.

    They are on the current stream, in front of all that follows there: no step comes before them.
    """

    def __init__(self, look: Look, indices: Sequence[int]) -> None:
        self._indices = indices
        sums = []
        for index in indices:
            number, low, high = look.units[index]
            tensor, spec = look.tensor(number), look.replicated.specs[number]
            item = spec.itemsize_bytes
            flat = tree.flat(tensor)[low // item : high // item]
            sums.append(weighted_sum(flat))
        together = torch.stack(sums)
        self._arrived: torch.cuda.Event | None = None
        if together.is_cuda:
            self._host = torch.empty(len(sums), dtype=torch.int64, pin_memory=True)
            self._host.copy_(together, non_blocking=True)
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record()
        else:
            self._host = together.cpu()

    def fetch(self) -> Iterable[tuple[int, int]]:
        """(unit's place in the look, digest). It was launched an iteration ago."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return zip(self._indices, (v % (1 << 64) for v in self._host.tolist()), strict=True)


_weights: dict[torch.device, torch.Tensor] = {}


def weighted_sum(flat: torch.Tensor) -> torch.Tensor:
    """The sum of a 1-d tensor's bits as integers, each times its place's odd number; 64 bits, which
    wrap around. On the tensor's device; nothing waits."""
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

__all__ = ["Look", "Replicated", "weighted_sum"]
