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

INLINE_BYTES = 1024 * 1024
"""Less than this is hashed by the barrier: to wake a thread takes longer."""
SHARE_BYTES = 256 * 1024
"""Whoever hashes beside another thread takes so much at a time."""
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
        self.lines = [_line(spec) for spec in self.specs]
        """What is to be alike of each tensor besides its content."""
        self.line_hashes = [xxhash.xxh3_64_intdigest(line.encode()) for line in self.lines]
        self.structure = fold((), self.line_hashes)
        self.nested = False
        """Some are in lists (LBFGS), which cannot be looked up by a key: good for one boundary."""
        self.places: list[tuple[dict[str, Any], str]] = []
        """Where each tensor is found under a key."""
        for (_, tensor, _), (holder, key) in found:
            by_key = holder is not None and holder.get(key) is tensor
            self.nested |= holder is not None and not by_key
            self.places.append((holder, key) if by_key and holder is not None else ({0: tensor}, 0))  # type: ignore[dict-item,arg-type]
        sizes = [spec.nbytes for spec in self.specs]
        dealt = cut(sizes, slices, list(map(_unit_bytes, self.specs)))
        self.slices = [_Slice(self, units) for units in dealt]
        self.changed = threading.Condition()
        """For looks, of which one at a time is under way."""
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

    def slice_of(self, which: Sequence[int]) -> _Slice:
        """One slice, or several as one."""
        if len(which) == 1:
            return self.slices[which[0]]
        return _Slice(self, list(chain.from_iterable(self.slices[i].units for i in which)))


class _Slice:
    """Some units, and where their tensors are. What goes round at every look are C loops over
    lists that were made once."""

    def __init__(self, replicated: Replicated, units: Sequence[Unit]) -> None:
        self.units = units
        numbers = list(dict.fromkeys(unit.tensor for unit in units))
        self._at = {number: i for i, number in enumerate(numbers)}
        self._specs = [replicated.specs[number] for number in numbers]
        self._holders = [replicated.places[number][0] for number in numbers]
        self._keys = [replicated.places[number][1] for number in numbers]
        self.on_host = [spec.device == "cpu" for spec in self._specs]
        self.nbytes = sum(u.high - u.low for u in units if self.on_host[self._at[u.tensor]])
        """Of those on the host."""
        self._known: list[Any] = []
        self._memory: list[Any] = []

    def tensors(self) -> list[torch.Tensor]:
        """As they are now. Raises KeyError where one is no more."""
        return list(map(dict.__getitem__, self._holders, self._keys))

    def parts(
        self, tensors: list[torch.Tensor]
    ) -> list[tuple[int, torch.Tensor, Unit, TensorSpec]]:
        """(number in the slice, tensor, unit, spec) of those that are not on the host."""
        found = []
        for index, unit in enumerate(self.units):
            at = self._at[unit.tensor]
            if not self.on_host[at]:
                found.append((index, tensors[at], unit, self._specs[at]))
        return found

    def memory(self, tensors: list[torch.Tensor]) -> list[Any]:
        """By unit: its bytes, None for what is not on the host. Good while the tensors are there.
        Raises RuntimeError where one is not what it was."""
        now = [list(map(look, tensors)) for look in _LOOKS]
        if now == self._known:
            return self._memory
        for tensor, spec in zip(tensors, self._specs, strict=True):
            if not _is_like(tensor, spec):
                raise RuntimeError(f"{spec.name} is another one")
        dense = [
            not host or tree.is_dense(t) for host, t in zip(self.on_host, tensors, strict=True)
        ]
        memory = [self._of(tensors[self._at[u.tensor]], u, dense) for u in self.units]
        if all(dense):  # else some are copies, of this moment
            self._known, self._memory = now, memory
        return memory

    def _of(self, tensor: torch.Tensor, unit: Unit, dense: list[bool]) -> Any:
        at, size = self._at[unit.tensor], unit.high - unit.low
        if not self.on_host[at]:
            return None
        if dense[at]:
            return (ctypes.c_char * size).from_address(tensor.data_ptr() + unit.low)
        item = self._specs[at].itemsize_bytes
        part = as_bytes(tree.row_major(tensor, unit.low // item, unit.high // item))
        return ctypes.create_string_buffer(ctypes.string_at(part.data_ptr(), size), size)


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
        self.begin: Callable[[Look], None] | None = None
        """Has a copier `run` it; called once at the most."""
        self._slice = replicated.slice_of(which)
        self.units = self._slice.units
        self.digests: list[int] = []
        """By unit, when all are there."""
        self._digest = NONE
        self._tensors = self._slice.tensors()
        self._counters = self._count()
        self._gpu: _GpuSums | None = None
        if not all(self._slice.on_host):
            self._gpu = _GpuSums(self._slice.parts(self._tensors))
        self._shared = self._slice.nbytes >= INLINE_BYTES
        """Between a copier and the barrier, unit by unit."""
        if self._shared:
            # Aliases keep the memory, whatever somebody makes of a tensor meanwhile (`.data = `).
            self._tensors = list(map(torch.Tensor.detach, self._tensors))
        self._memory: list[Any] | None = None
        self._found: dict[int, int] = {}
        self._todo: deque[int] = deque(range(len(self.units)) if self._shared else ())
        self._in_flight = 0
        self._failed = self._over = False

    def _count(self) -> list[int]:
        """Autograd's version counters."""
        try:
            return list(map(_version_counter, self._tensors))
        except RuntimeError:  # tensors that were made in inference mode have none
            return [t._version for t in self._tensors if not t.is_inference()]

    def wake(self) -> None:
        """Training thread: the tensors stand still, and a copier would be in nobody's way."""
        begin, self.begin = self.begin, None
        if begin is not None and self._shared:
            begin(self)

    def run(self) -> None:
        """Copier thread, or the barrier: hash what nobody has begun."""
        while self._work():
            pass

    def fail(self, error: BaseException) -> None:
        """There is no digest. Any thread."""
        with self.replicated.changed:
            self._failed = True
            self.replicated.changed.notify_all()

    def _work(self) -> bool:
        """Hash a share of what is left."""
        changed = self.replicated.changed
        with changed:
            if self._over or self._failed or not self._todo:
                return False
            share = self._take_share()
            self._in_flight += 1
        try:
            with changed:
                if self._memory is None:
                    self._memory = self._slice.memory(self._tensors)
            memory = [(i, self._memory[i]) for i in share]
            mine = {i: xxhash.xxh3_64_intdigest(part) for i, part in memory if part is not None}
            with changed:
                self._found.update(mine)
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
        """Training thread, before anything changes the tensors: what is not hashed yet is hashed
        here. Afterwards nobody looks at the tensors any more."""
        if self._over:
            return
        self.begin = None
        try:
            if self._shared:
                self.run()
                with self.replicated.changed:
                    self.replicated.changed.wait_for(lambda: not self._in_flight)
            else:
                self._hash_all()
        except Exception as error:
            self.fail(error)
        finally:
            with self.replicated.changed:
                self._over = True
        # Else it was changed under our eyes, and ranks have looked at different moments.
        self._failed |= self._count() != self._counters
        self._tensors, self._memory = [], None

    def _hash_all(self) -> None:
        memory = self._slice.memory(self._tensors)
        if self._gpu is None:
            self.digests = list(map(xxhash.xxh3_64_intdigest, memory))
            return
        for index, part in enumerate(memory):
            if part is not None:
                self._found[index] = xxhash.xxh3_64_intdigest(part)

    def fetch(self) -> int:
        """Training thread, at the next boundary: the digest, NONE if there is none."""
        if not self._failed and self._over and self._digest == NONE:
            if self._gpu is not None:
                self._found.update(self._gpu.fetch())
                self._gpu = None
            if len(self.digests) != len(self.units):
                self.digests = [self._found[i] for i in range(len(self.units))]
            head = (self.turn, self.version, self.replicated.structure)
            self._digest = fold(head, self.digests)
        return self._digest


_LOOKS = (
    torch.Tensor.data_ptr,
    torch.Tensor.numel,
    torch.Tensor.element_size,
    torch.Tensor.stride,
)
"""What of a tensor tells which memory it has."""


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

    def __init__(self, parts: list[tuple[int, torch.Tensor, Unit, TensorSpec]]) -> None:
        """Of these units, see `_Slice.parts`."""
        self._indices = [index for index, *_ in parts]
        sums = []
        for _, tensor, unit, spec in parts:
            item = spec.itemsize_bytes
            flat = tree.flat(tensor)[unit.low // item : unit.high // item]
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
