"""Digests of slices of the live tensors, hashed while these do not change, for the replica check.

On a CPU a unit is hashed by xxh3. On a GPU its digest is a sum of its elements' bits, each
multiplied by an odd number that depends on its position: integer arithmetic that wraps around, so
any flipped bit changes the sum, and the order of additions does not. Nothing is read back from the
GPU before the next boundary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
import xxhash

from tierckpt.core.replica_check import NONE, Unit, fold
from tierckpt.format.layout import TensorSpec
from tierckpt.state import tree_codec

from .replicated_state import GPU_PART_ELEMENTS, ReplicatedState
from .tensor_places import OutdatedError

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
        self.begin: Callable[[Look], None] | None = None
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
        begin, self.begin = self.begin, None
        if begin is not None and self._shared:
            begin(self)

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
        self.begin = None
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

__all__ = ["Look", "weighted_sum"]
