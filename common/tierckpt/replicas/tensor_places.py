"""Places of tensors for the replica check.

Each look finds the tensors again, as optimizers replace them, or the dicts and lists around them.
It runs C loops over lists that were made once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from tierckpt._text import in_words
from tierckpt.errors import UnsupportedStateError
from tierckpt.state import tree_codec
from tierckpt.state.training_state import TrainingState, Walk, value_of

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
            raise OutdatedError(in_words(error)) from error
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


__all__ = ["Finder", "Kept", "OutdatedError", "Place", "places_of"]
