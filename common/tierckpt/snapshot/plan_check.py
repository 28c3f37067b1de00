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
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from operator import attrgetter, eq, is_
from typing import Any

import torch

from tierckpt.state.training_state import TrainingState, Walk

from .tensor_memory import TensorRecords, records_of, requires_grad, tags_of

FEW = 128
"""In a state of at most this many tensors every rank looks into all, see `is_small`."""
CHUNK = 512
"""Tensors that are looked into together, while a core's caches have them."""


def is_small(tensors: Sequence[torch.Tensor]) -> bool:
    """True if every rank looks into all of these tensors, not only into those that it copies."""
    return len(tensors) <= FEW


class PlanCheck:
    """The state as it was when a plan was made. Training thread, except `counters` and `moved`."""

    def __init__(self, state: TrainingState, walk: Walk, copied: Sequence[torch.Tensor]) -> None:
        """`copied`: the striped tensors of which this rank copies a part; all striped tensors of a
        small state."""
        self._containers = state.containers()
        self._has_odd = bool(walk.odd)
        # With odd state, the optimizers' values need another check.
        settled = len(state.module_containers()) if self._has_odd else len(self._containers)
        self._dicts = _Dicts(self._containers, settled, state.options.attributes)
        self._groups, self._members = state.group_sizes(), state.group_members()
        self._tensors = walk.tensors
        self._state_keys = [key for *_, key in walk.state]
        self.odd = walk.odd
        """Odd state, as of the last call of `holds`."""
        self.aliases = list(map(torch.Tensor.detach, copied))
        """Aliases of `copied`. They keep the storages that the plan copies from, whatever becomes
        of the tensors."""
        self._copied = _view_of([*copied], self.aliases)
        self._others: _ByMemory | _ByMethods | None = None
        if is_small(self._tensors):
            known = set(map(id, copied))
            self._others = _view_of([t for t in self._tensors if id(t) not in known])
        self.baseline = self._copied.counters()
        """Autograd's version counters at the last boundary, see `counters`."""
        self.lengths = [*map(torch.Tensor.numel, self._tensors)]
        """Numbers of elements of all tensors when the plan was made."""
        self.only_here = False
        """True if `holds` found a change that other ranks may not see."""

    def holds(self, state: TrainingState, whole: bool = False) -> bool:
        """At a boundary: True if the state is the same. Reads the counters. `whole`: look at the
        lengths of all tensors."""
        self.only_here = False
        for_all = (
            same_objects(state.containers(), self._containers)
            and self._dicts.stand()
            and state.group_sizes() == self._groups
            and same_objects(state.group_members(), self._members)
            and (not whole or [*map(torch.Tensor.numel, self._tensors)] == self.lengths)
            and (not self._has_odd or self._odd_holds(state))
        )
        if not for_all:
            return False
        found = self._copied.stand()
        self.only_here = found is None and not is_small(self._tensors)
        if found is None or (self._others is not None and self._others.stand() is None):
            return False
        self.baseline = found
        return True

    @property
    def touched(self) -> Iterable[int]:
        """Numbers of the modules whose attributes may have changed between the last two calls of
        `holds`."""
        return self._dicts.touched

    @property
    def trained(self) -> bytes:
        """1 for each tensor that is copied and requires a gradient, else 0; as of the last call of
        `holds`. The same object while nothing has changed."""
        return self._copied.trained

    def _odd_holds(self, state: TrainingState) -> bool:
        """Compare odd state: numbers are new objects at every step, and lists hold tensors."""
        walk = state.walk()
        self.odd = walk.odd
        return (
            same_objects(walk.tensors, self._tensors)
            and [key for *_, key in walk.state] == self._state_keys
        )

    def counters(self) -> bytes:
        """Autograd's version counters of the tensors that are copied, 32 bits each, 0 for inference
        tensors; empty if the memory of one was moved or freed since the plan was made. Any
        thread."""
        return self._copied.counters()

    def moved(self) -> list[int]:
        """Numbers of the tensors, of those that are copied, with other memory than when the plan
        was made. Any thread."""
        return self._copied.moved()


class _Dicts:
    """The dicts that hold the tensors. Only those with another tag are compared, if this Python has
    tags."""

    touched: Iterable[int]
    """Numbers of the `watched` dicts that may have changed, as of the last call of `stand`."""

    def __init__(
        self,
        held: list[dict[Any, Any]],
        settled: int,
        watched: Sequence[dict[str, Any]] = (),
    ) -> None:
        """The values of the dicts from number `settled` on may change; those of `watched` are only
        looked for."""
        self._contents = [
            _Contents(held[low : low + CHUNK], settled - low) for low in range(0, len(held), CHUNK)
        ]
        self._count, self.touched = len(held), range(len(watched))
        self._tags = tags_of([*held, *watched])

    def stand(self) -> bool:
        if self._tags is None:
            return all(contents.stand() for contents in self._contents)
        changed = self._tags.changed()
        self.touched = [number - self._count for number in changed if number >= self._count]
        numbers = {number // CHUNK for number in changed if number < self._count}
        if not all(self._contents[number].stand() for number in numbers):
            return False
        self._tags.accept()
        return True


class _Contents:
    """Some dicts, with their keys and values."""

    def __init__(self, held: list[dict[Any, Any]], settled: int) -> None:
        """The values of the dicts from number `settled` on may change."""
        self._held, self._sizes = held, [*map(len, held)]
        self._keys, self._values = _keys(held), [*_values(held[: max(settled, 0)])]

    def stand(self) -> bool:
        values = islice(_values(self._held), len(self._values))
        return (
            [*map(len, self._held)] == self._sizes
            and _keys(self._held) == self._keys
            and all(map(is_, values, self._values))
        )


def _view_of(
    tensors: list[torch.Tensor], aliases: list[torch.Tensor] | None = None
) -> _ByMemory | _ByMethods:
    """The faster way to look into tensors that works here."""
    aliases = list(map(torch.Tensor.detach, tensors)) if aliases is None else aliases
    records = records_of(tensors)
    if records is None:
        return _ByMethods(tensors, aliases)
    return _ByMemory(tensors, aliases, records)


class _ByMemory:
    """Looks into tensors by their memory, see `tensor_memory`."""

    def __init__(
        self, tensors: list[torch.Tensor], aliases: list[torch.Tensor], records: TensorRecords
    ) -> None:
        self._tensors, self._aliases, self._records = tensors, aliases, records

    @property
    def trained(self) -> bytes:
        return self._records.trained

    def stand(self) -> bytes | None:
        """The version counters, if all tensors are as they were."""
        if self._records.look() is not None and not self._stand_by_methods():
            return None
        return self._records.counted()

    def _stand_by_methods(self) -> bool:
        """A second opinion: torch may keep more in that memory than what matters here."""
        if self._records.counters() is None or not _same_tensors(self._tensors, self._aliases):
            return False
        again = records_of(self._tensors)
        if again is None or again.look() is not None:
            return False
        self._records = again
        return True

    def counters(self) -> bytes:
        return self._records.counters() or b""

    def moved(self) -> list[int]:
        return self._records.moved()


class _ByMethods:
    """Looks into tensors by torch's methods, some at a time."""

    def __init__(self, tensors: list[torch.Tensor], aliases: list[torch.Tensor]) -> None:
        chunks = range(0, len(tensors), CHUNK)
        self._parts = [_Part(tensors[low : low + CHUNK]) for low in chunks]
        self._tensors = tensors
        self._aliases, self._addresses = aliases, addresses(aliases)
        self.trained = bytes(map(requires_grad, tensors))

    def stand(self) -> bytes | None:
        """The version counters, if all tensors are as they were."""
        if (trained := bytes(map(requires_grad, self._tensors))) != self.trained:
            self.trained = trained
        found = []
        for part in self._parts:
            found.append(part.counters())
            if not part.stands():
                return None
        return b"".join(found)

    def counters(self) -> bytes:
        if addresses(self._aliases) != self._addresses:
            return b""
        return b"".join(part.counters() for part in self._parts)

    def moved(self) -> list[int]:
        both = zip(addresses(self._aliases), self._addresses, strict=True)
        return [number for number, (now, then) in enumerate(both) if now != then]


class _Part:
    """Some tensors, and what a plan needs to know of them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._uncounted = any(map(torch.Tensor.is_inference, tensors))
        self._kinds, self._addresses = Kinds(tensors), addresses(tensors)

    def counters(self) -> bytes:
        if not self._uncounted:
            return array("I", map(_version_counter, self._tensors)).tobytes()
        counted = (0 if t.is_inference() else t._version for t in self._tensors)
        return array("I", counted).tobytes()

    def stands(self) -> bool:
        return addresses(self._tensors) == self._addresses and self._kinds.stand()


def _same_tensors(tensors: list[torch.Tensor], aliases: list[torch.Tensor]) -> bool:
    """True if all have the storages, shapes, strides and types of their aliases."""
    return addresses(tensors) == addresses(aliases) and all(
        t.untyped_storage()._cdata == a.untyped_storage()._cdata and kind == known
        for t, a, kind, known in zip(tensors, aliases, kinds(tensors), kinds(aliases), strict=True)
    )


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


def kinds(tensors: Sequence[torch.Tensor]) -> Iterable[tuple[Any, ...]]:
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
