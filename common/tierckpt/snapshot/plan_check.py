"""Plan check: whether the live tensors are those for which a copy plan was made.

A plan has the addresses of its sources, so it must be given up when a tensor is replaced, moves, or
changes its shape, strides or type in place. Every boundary compares the dicts that hold the
tensors, on all ranks. A rank looks into the tensors themselves only if it copies them: that takes a
few misses of the cache for each. It does so once, and reads autograd's version counters on the way.

So a rank that copies no part of a tensor does not see that it changed in its place. That matters
only if its length changed, as the layout depends on it: see `Staging`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from operator import attrgetter, eq, is_
from typing import Any

import torch

from tierckpt.state.training_state import TrainingState, Walk

FEW = 128
"""In a state of at most this many tensors every rank looks into all, see `is_small`."""
CHUNK = 512
"""Tensors that are looked into together, while a core's caches have them."""


def is_small(tensors: Sequence[torch.Tensor]) -> bool:
    """True if every rank looks into all of these tensors, not only into those that it copies."""
    return len(tensors) <= FEW


class PlanCheck:
    """The state as it was when a plan was made. Training thread, except `counters`."""

    def __init__(self, state: TrainingState, walk: Walk, copied: Sequence[torch.Tensor]) -> None:
        """`copied`: the striped tensors of which this rank copies a part; all striped tensors of a
        small state."""
        self._containers = state.containers()
        self._sizes = [*map(len, self._containers)]
        self._has_odd = bool(walk.odd)
        filled = [held for held in self._containers if held]
        # With odd state, the optimizers' values need another check.
        settled = sum(map(bool, state.module_containers())) if self._has_odd else len(filled)
        self._contents = [
            _Contents(filled[low : low + CHUNK], settled - low)
            for low in range(0, len(filled), CHUNK)
        ]
        self._groups, self._members = state.group_sizes(), state.group_members()
        self._tensors = walk.tensors
        self._state_keys = [key for *_, key in walk.state]
        self.odd = walk.odd
        """Odd state, as of the last call of `holds`."""
        counted = [t for t in copied if not t.is_inference()]
        seen = self._tensors if is_small(self._tensors) else copied
        others = set(map(id, seen)).difference(map(id, counted))
        self._parts = [
            *(_Part(counted[low : low + CHUNK], True) for low in range(0, len(counted), CHUNK)),
            *([_Part([t for t in seen if id(t) in others], False)] if others else []),
        ]
        self.baseline = self.counters()
        """Autograd's version counters at the last boundary, see `counters`."""
        self.lengths = [*map(torch.Tensor.numel, self._tensors)]
        """Numbers of elements of all tensors when the plan was made."""
        self.only_here = False
        """True if `holds` found a change that other ranks may not see."""

    def holds(self, state: TrainingState, whole: bool = False) -> bool:
        """At a boundary: True if the state is the same. Reads the counters. `whole`: look at the
        lengths of all tensors."""
        self.only_here = False
        now = state.containers()
        for_all = (
            same_objects(now, self._containers)
            and [*map(len, now)] == self._sizes
            and all(contents.stand() for contents in self._contents)
            and state.group_sizes() == self._groups
            and same_objects(state.group_members(), self._members)
            and (not whole or [*map(torch.Tensor.numel, self._tensors)] == self.lengths)
            and (not self._has_odd or self._odd_holds(state))
        )
        if not for_all:
            return False
        holds = self._look()
        self.only_here = not holds and not is_small(self._tensors)
        return holds

    def _odd_holds(self, state: TrainingState) -> bool:
        """Compare odd state: numbers are new objects at every step, and lists hold tensors."""
        walk = state.walk()
        self.odd = walk.odd
        return (
            same_objects(walk.tensors, self._tensors)
            and [key for *_, key in walk.state] == self._state_keys
        )

    def _look(self) -> bool:
        found: list[int] = []
        for part in self._parts:
            found += part.counters()
            if not part.stands():
                return False
        self.baseline = found
        return True

    def counters(self) -> list[int]:
        """Autograd's version counters of the tensors that are copied. Any thread."""
        return [*chain.from_iterable(part.counters() for part in self._parts)]


class _Contents:
    """Some dicts, with their keys and values."""

    def __init__(self, held: list[dict[Any, Any]], settled: int) -> None:
        """The values of the dicts from number `settled` on may change."""
        self._held = held
        self._keys, self._values = _keys(held), [*_values(held[: max(settled, 0)])]

    def stand(self) -> bool:
        values = islice(_values(self._held), len(self._values))
        return _keys(self._held) == self._keys and all(map(is_, values, self._values))


class _Part:
    """Some tensors, and what a plan needs to know of them."""

    def __init__(self, tensors: list[torch.Tensor], counted: bool) -> None:
        self._tensors, self._counted = tensors, counted
        self._kinds, self._addresses = Kinds(tensors), addresses(tensors)

    def counters(self) -> list[int]:
        return list(map(_version_counter, self._tensors)) if self._counted else []

    def stands(self) -> bool:
        return addresses(self._tensors) == self._addresses and self._kinds.stand()


_version_counter = attrgetter("_version")


class Kinds:
    """The shapes, strides and types of some tensors: what may change while a tensor stays in its
    memory (`.data = `, `t_()`)."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [*tensors]
        self._known = known_kinds(self._tensors)
        self._guard = _guard_of(self._tensors)
        """torch's check of these properties and some more, in one call for all tensors."""

    def stand(self) -> bool:
        """True while all are the same. Any thread."""
        if self._guard is not None and self._guard.check(*self._tensors):
            return True
        if not all(map(eq, kinds(self._tensors), self._known)):
            return False
        self._guard = _guard_of(self._tensors)
        return True


def _guard_of(tensors: Sequence[torch.Tensor]) -> Any:
    """A guard; None if this torch has none that can be relied on."""
    if (guards := _guards()) is None:
        return None
    sizes, strides = [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors]
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


@functools.cache
def _guards() -> Any:
    """The class of torch's guards, which is internal to torch, if it finds all changes."""

    def finds(change: Callable[[torch.Tensor], None]) -> bool:
        tensor = torch.zeros(2, 2)
        guard = guards(tensor, dynamic_dims_sizes=[[2, 2]], dynamic_dims_strides=[[2, 1]])
        before = guard.check(tensor)
        change(tensor)
        return bool(before and not guard.check(tensor))

    def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
        tensor.data = data

    try:
        from torch._C._dynamo import guards as internal

        guards: Any = internal.TensorGuards
        changes: list[Callable[[torch.Tensor], None]] = [
            lambda t: set_data(t, t.data.t()),
            lambda t: set_data(t, t.data.view(4)),
            lambda t: set_data(t, t.data.view(1, 4)),
            lambda t: set_data(t, t.data.view(torch.int32)),
            lambda t: set_data(t, t.data[:1]),
        ]
        return guards if all(map(finds, changes)) else None
    except Exception:
        return None


_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


def kinds(tensors: list[torch.Tensor]) -> Iterable[tuple[Any, ...]]:
    """Shape, strides and type of each tensor."""
    return zip(
        map(_shape, tensors),
        map(torch.Tensor.stride, tensors),
        map(_dtype, tensors),
        strict=True,
    )


def known_kinds(tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Kinds, equal ones as one object: one for each tensor would not fit into a core's cache."""
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    return [known.setdefault(kind, kind) for kind in kinds(tensors)]


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Addresses of the tensors' memory."""
    return list(map(torch.Tensor.data_ptr, tensors))


def _keys(containers: list[dict[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(containers))


def _values(containers: list[dict[Any, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(dict.values, containers))


def same_objects(now: list[Any], then: list[Any]) -> bool:
    """True if both lists have the same objects in the same order."""
    return len(now) == len(then) and all(map(is_, now, then))


__all__ = ["Kinds", "PlanCheck", "addresses", "is_small", "same_objects"]
