"""Values of foreign classes in a tree: classes other than Python's, numpy's and torch's own.

Members of an `enum.Enum`, named tuples, and tensor subclasses that consist of plain tensors (as
torchao's 8-bit state does) are stored as the name of their class and their parts. To make them
again, nothing is imported and no constructor is called: the class is looked up among the modules
that the script has imported. If it is not there, as for `tierckpt.load`, a `ForeignValue` stands
for the value.
"""

from __future__ import annotations

import enum
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import torch

FACTORIES: dict[str, Any] = {each.__name__: each for each in (dict, list, set, int, float, str)}
"""Factories of default dicts that can be stored."""


def name_of(kind: type) -> str:
    """Name of a class, for `find`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find(name: str, base: type) -> Any:
    """The class of that name, a subclass of `base`, if its module is imported; else None."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, base) else None


@dataclass
class ForeignValue:
    """Stands for a value of a class without an import here."""

    kind: str
    """Module and name of the class."""
    parts: Any
    """An Enum's value, a tuple's members by name, or a tensor's inner tensors."""

    def __hash__(self) -> int:
        """Hash of the class name: members of sets, and keys, must be hashable."""
        return hash(self.kind)


@dataclass
class Parts:
    """Parts of a tensor subclass, while some of its tensors are still `tree_codec.Entry`s."""

    kind: str
    inner: dict[str, Any]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def made(self) -> Any:
        """Make the tensor, once all its parts are tensors."""
        return made_tensor(self)


def is_named_tuple(value: Any) -> bool:
    """True for a value of `collections.namedtuple` or `typing.NamedTuple`."""
    return isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple)


def is_made_of_tensors(value: Any) -> bool:
    """True for a tensor subclass that lists its inner tensors, except for a DTensor."""
    kind = type(value)
    plain = (torch.Tensor, torch.nn.Parameter)
    return (
        isinstance(value, torch.Tensor)
        and kind not in plain
        and kind.__name__ != "DTensor"
        and find(name_of(kind), torch.Tensor) is kind
        and callable(getattr(kind, "__tensor_flatten__", None))
        and callable(getattr(kind, "__tensor_unflatten__", None))
    )


def taken_apart(value: torch.Tensor) -> Parts:
    """The inverse of `made_tensor`; inner tensors are the live ones."""
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(value, name) for name in names}
    size, stride = tuple(value.size()), tuple(value.stride())
    return Parts(name_of(type(value)), inner, context, size, stride)


def made_tensor(parts: Parts) -> Any:
    """A tensor subclass, made from its inner tensors."""
    kind = find(parts.kind, torch.Tensor)
    if kind is None or not callable(getattr(kind, "__tensor_unflatten__", None)):
        return ForeignValue(parts.kind, {**parts.inner, "context": parts.context})
    size, stride = torch.Size(parts.size), parts.stride
    return kind.__tensor_unflatten__(parts.inner, parts.context, size, stride)


def cloned(value: Any) -> Any:
    """A copy of a tree with clones of its tensors and new containers."""
    if isinstance(value, torch.Tensor):
        if not is_made_of_tensors(value):
            return value.detach().clone()
        parts = taken_apart(value)
        return made_tensor(replace(parts, inner=cloned(parts.inner)))
    if type(value) is dict:
        return {key: cloned(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(cloned, value))
    return value if isinstance(value, (int, float, str, bytes, NoneType)) else deepcopy(value)


def made_member(name: str, value: Any) -> Any:
    """The member of an Enum with that value."""
    kind = find(name, enum.Enum)
    if kind is None:
        return ForeignValue(name, value)
    try:
        return kind(value)
    except ValueError:  # the script's Enum has no such member any more
        return ForeignValue(name, value)


def made_tuple(name: str, fields: list[str], values: list[Any]) -> Any:
    """A named tuple."""
    kind = find(name, tuple)
    if kind is None or list(getattr(kind, "_fields", ())) != fields:
        return ForeignValue(name, dict(zip(fields, values, strict=True)))
    return tuple.__new__(kind, values)


def made_default(factory: str | None, items: list[tuple[Any, Any]]) -> Any:
    """A defaultdict."""
    return defaultdict(FACTORIES[factory] if factory else None, items)


def foreign_values(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The path to each `ForeignValue` in a decoded tree, and its class, as `name_of` names it."""
    if isinstance(value, ForeignValue) or (
        isinstance(value, Parts) and find(value.kind, torch.Tensor) is None
    ):
        yield path, value.kind
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from foreign_values(key, f"a key of {path}")
            yield from foreign_values(each, f"{path}[{key!r}]" if path else str(key))
    elif isinstance(value, (list, tuple, deque)):
        for number, each in enumerate(value):
            yield from foreign_values(each, f"{path}[{number}]")
    elif isinstance(value, (set, frozenset)):
        for each in value:
            yield from foreign_values(each, f"a member of {path}")


def same_type(value: Any, members: Iterator[Any]) -> Any:
    """A list, tuple or set of these members, of the type of `value`."""
    if is_named_tuple(value):
        return tuple.__new__(type(value), members)
    make: Callable[[Iterator[Any]], Any] = type(value)
    return make(members)


__all__ = [
    "FACTORIES",
    "ForeignValue",
    "Parts",
    "cloned",
    "find",
    "foreign_values",
    "is_made_of_tensors",
    "is_named_tuple",
    "made_default",
    "made_member",
    "made_tensor",
    "made_tuple",
    "name_of",
    "same_type",
    "taken_apart",
]
