"""Plan check: whether the live tensors are those for which a copy plan was made.

A plan has the addresses of its sources, so it must be given up when a tensor is replaced, moves, or
changes its shape, strides or type in place. To look at all of thousands of tensors takes
milliseconds. So the boundary looks at the dicts that hold them, and at a sample of the tensors. The
thread that copies looks at all of them before it copies any; if one differs, this version fails,
and the next one has a new plan. A state of few tensors is checked at the boundary as a whole.

All ranks look at the same tensors, except for the addresses of those that another rank copies. So
all ranks find a change that affects the layout at the same version.
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
"""A state of at most this many tensors is checked at the boundary as a whole."""
SAMPLE = 32
"""Number of tensors that the boundary looks at otherwise."""
CHUNK = 512
"""Tensors that are checked together, while a core's caches have them; in between another thread may
run."""


class PlanCheck:
    """The state as it was when a plan was made. Each method names its thread."""

    def __init__(self, state: TrainingState, walk: Walk) -> None:
        self._containers = state.containers()
        self._sizes = [*map(len, self._containers)]
        self._keys, self._values = _keys(self._containers), [*_values(self._containers)]
        self._has_odd = bool(walk.odd)
        # With odd state, the optimizers' values need another check.
        of_modules = sum(map(len, state.module_containers()))
        self._settled = of_modules if self._has_odd else len(self._values)
        self._groups, self._members = state.group_sizes(), state.group_members()
        self._tensors = walk.tensors
        self._state_keys = [key for *_, key in walk.state]
        self.odd = walk.odd
        """Odd state, as of the last call of `holds`."""
        chunks = range(0, len(self._tensors), CHUNK)
        self._kinds = [Kinds(self._tensors[low : low + CHUNK]) for low in chunks]
        self._copied, self._addresses = self._tensors, addresses(self._tensors)
        self._whole = self._has_odd or len(self._tensors) <= FEW
        sample = self._tensors[:: -(-len(self._tensors) // SAMPLE) or 1]
        self._sample = sample, Kinds(sample), addresses(sample), self._cells_of(sample)
        self._is_checked = True
        """All was checked at this boundary, or found at it."""
        self.outlived = False
        """True after `confirm` found a difference."""

    def copies(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set the tensors that this rank copies: the addresses of the others have no effect."""
        self._copied, self._addresses = [*tensors], addresses(tensors)

    def _cells_of(self, sample: Iterable[torch.Tensor]) -> tuple[list[Any], ...]:
        """The dicts that hold these tensors, their keys there, and the tensors; those that are in
        no dict (a parameter outside the model) are left out."""
        wanted = set(map(id, sample))
        found = [
            (held, key, value)
            for held in self._containers
            for key, value in held.items()
            if id(value) in wanted
        ]
        return [h for h, _, _ in found], [k for _, k, _ in found], [v for _, _, v in found]

    def holds(self, state: TrainingState, whole: bool = False) -> bool:
        """Training thread, at a boundary: False if the state differs, as far as this looks. `whole`:
        look at everything, so that `confirm` need not."""
        now = state.containers()
        self._is_checked = whole or self._whole
        return (
            _same_objects(now, self._containers)
            and [*map(len, now)] == self._sizes
            and state.group_sizes() == self._groups
            and _same_objects(state.group_members(), self._members)
            and (self._all_hold() if self._is_checked else self._sample_holds())
            and (not self._has_odd or self._odd_holds(state))
        )

    def _sample_holds(self) -> bool:
        sample, kinds, at, (holders, keys, values) = self._sample
        return (
            all(map(is_, map(dict.get, holders, keys), values))
            and kinds.stand()
            and addresses(sample) == at
        )

    def _odd_holds(self, state: TrainingState) -> bool:
        """Compare odd state: numbers are new objects at every step, and lists hold tensors."""
        walk = state.walk()
        self.odd = walk.odd
        return (
            _same_objects(walk.tensors, self._tensors)
            and [key for *_, key in walk.state] == self._state_keys
        )

    def confirm(self) -> bool:
        """Copier thread, before it copies: False if the state differs. Takes the place of what
        `holds` left out."""
        if not self._is_checked:
            try:
                self.outlived = not self._all_hold()
            except RuntimeError:  # a dict changed meanwhile
                self.outlived = True
        return not self.outlived

    def _all_hold(self) -> bool:
        containers, place = self._containers, 0
        for low in range(0, len(containers), CHUNK):
            part = containers[low : low + CHUNK]
            keys = _keys(part)
            if keys != self._keys[place : place + len(keys)]:
                return False
            then = self._values[place : min(place + len(keys), self._settled)]
            if not all(map(is_, islice(_values(part), len(then)), then)):
                return False
            place += len(keys)
        for low in range(0, len(self._copied), CHUNK):
            part_of = self._copied[low : low + CHUNK]
            if addresses(part_of) != self._addresses[low : low + CHUNK]:
                return False
        return all(kinds.stand() for kinds in self._kinds)


class Kinds:
    """The shapes, strides and types of some tensors: what may change while a tensor stays in its
    memory (`.data = `, `t_()`)."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [*tensors]
        self._known = known_kinds(self._tensors)
        self._guard: Any = None
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
        guard = TensorGuards(
            tensor, dynamic_dims_sizes=[[2, 2]], dynamic_dims_strides=[[2, 1]]
        )
        before = guard.check(tensor)
        change(tensor)
        return bool(before and not guard.check(tensor))

    def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
        tensor.data = data

    try:
        from torch._C._dynamo.guards import TensorGuards

        changes: list[Callable[[torch.Tensor], None]] = [
            lambda t: set_data(t, t.data.t()),
            lambda t: set_data(t, t.data.view(4)),
            lambda t: set_data(t, t.data.view(1, 4)),
            lambda t: set_data(t, t.data.view(torch.int32)),
            lambda t: set_data(t, t.data[:1]),
        ]
        return TensorGuards if all(map(finds, changes)) else None
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


def _same_objects(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


__all__ = ["Kinds", "PlanCheck", "addresses"]
