"""Nested optimizers: optimizers inside other ones, and their wrappers.

A wrapper (SAM, Lookahead, ScheduleFree, Accelerate's) steps an optimizer in one of its attributes.
The inner optimizer's state belongs to the training as well, whether or not the wrapper's
`state_dict()` includes it. If the wrapper's own step is never called, the inner optimizer's steps
are the training's steps.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tierckpt.errors import UnsupportedStateError

_HOOKS = tuple(
    f"_optimizer_{what}_{when}_hooks"
    for what in ("state_dict", "load_state_dict")
    for when in ("pre", "post")
)
METHODS = ("step", "state_dict", "load_state_dict")
"""Methods by which an object that is no torch.optim.Optimizer can stand for those inside it."""


@dataclass
class Expanded:
    """The given optimizers, with all optimizers inside them."""

    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    """Optimizers with stored state: each given one, then, as `label.attribute`, the inner ones with
    a state of their own."""
    steppers: dict[str, list[torch.optim.Optimizer]] = field(default_factory=dict)
    """For each of `optimizers`, the ones that make its steps, with torch's hooks."""
    outer: dict[str, str] = field(default_factory=dict)
    """For each of `optimizers`, the label of the given one."""
    hollow: list[Any] = field(default_factory=list)
    """Optimizers for which torch calls no step hooks."""


def expand(given: Mapping[str, Any]) -> Expanded:
    """Find all optimizers inside the given ones. A given one always keeps its name."""
    found = Expanded()
    known = {id(each) for each in given.values()}
    for label, each in given.items():
        _add(found, label, each, label, known)
    for label, each in given.items():
        for path, inner in inside(each):
            if id(inner) in known:
                continue
            known.add(id(inner))
            shared = next((n for n, o in found.optimizers.items() if o.state is inner.state), None)
            if shared is None:
                _add(found, f"{label}.{path}", inner, label, known)
            elif not is_hollow(inner):
                found.steppers[shared].append(inner)
    return found


def _add(found: Expanded, label: str, each: Any, outer: str, known: set[int]) -> None:
    if label in found.optimizers:
        raise UnsupportedStateError(f"two optimizers are called {label!r}; give them other names")
    hollow = is_hollow(each)
    if hollow:
        found.hollow.append(each)
    real = isinstance(each, torch.optim.Optimizer) and hasattr(each, "state")
    if real and hollow:
        _complete(each)
    found.optimizers[label] = each if real else Foreign(each)  # type: ignore[assignment]
    found.steppers[label] = [] if hollow else [each]
    found.outer[label] = outer


def inside(optimizer: Any) -> list[tuple[str, torch.optim.Optimizer]]:
    """Optimizers in its attributes, and in theirs, with the path to each."""
    found: list[tuple[str, torch.optim.Optimizer]] = []
    known = {id(optimizer)}

    def look(path: str, each: Any) -> None:
        for name, inner in _attributes(each):
            if isinstance(inner, torch.optim.Optimizer) and id(inner) not in known:
                known.add(id(inner))
                found.append((f"{path}{name}", inner))
                look(f"{path}{name}.", inner)

    look("", optimizer)
    return found


def _attributes(each: Any) -> Iterator[tuple[str, Any]]:
    for name, value in getattr(each, "__dict__", {}).items():
        yield name, value
        if isinstance(value, Mapping) and name != "state":
            yield from ((f"{name}.{key}", v) for key, v in value.items() if isinstance(key, str))
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{number}", v) for number, v in enumerate(value))


class Aliases:
    """State and groups that a wrapper shares with the optimizers inside it. A `load_state_dict()`
    may replace them in one of them only."""

    def __init__(self, outer: Any) -> None:
        """Record what a given optimizer and those inside it share now."""
        every = [outer, *(inner for _, inner in inside(outer))]
        self._shared = [
            (name, one, other)
            for name in ("param_groups", "state")
            for number, one in enumerate(every)
            for other in every[number + 1 :]
            if getattr(one, name, None) is getattr(other, name, self)
        ]

    def mend(self) -> None:
        """Share the outer one's objects again."""
        for name, one, other in self._shared:
            if getattr(one, name) is not getattr(other, name):
                with contextlib.suppress(AttributeError):
                    setattr(other, name, getattr(one, name))


def is_hollow(optimizer: Any) -> bool:
    """True if torch calls no hooks: torch.optim.Optimizer's own __init__ never ran."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return True
    try:
        optimizer.register_step_post_hook(_do_nothing).remove()
    except AttributeError:
        return True
    return not getattr(type(optimizer).step, "hooked", False)


def _complete(optimizer: torch.optim.Optimizer) -> None:
    """Add the attributes that torch's `state_dict()` and `load_state_dict()` need."""
    for name in _HOOKS:
        vars(optimizer).setdefault(name, OrderedDict())


def _do_nothing(*_: Any) -> None:
    """Do nothing, as a hook."""


def class_name(optimizer: Any) -> str:
    """Name of the class. For a wrapper without a state of its own, that of the optimizer inside:
    the same state can be loaded with and without the wrapper."""
    optimizer = optimizer.outside if isinstance(optimizer, Foreign) else optimizer
    if is_hollow(optimizer):
        for _, inner in inside(optimizer):
            if inner.state is getattr(optimizer, "state", None):
                return class_name(inner)
    return type(optimizer).__name__


class Foreign:
    """Adapter that presents an object that is no torch.optim.Optimizer, but steps some, as one."""

    def __init__(self, outside: Any) -> None:
        self.outside = outside

    @property
    def state(self) -> Any:
        """State of the object by parameter, if it has any."""
        return getattr(self.outside, "state", {})

    @property
    def defaults(self) -> Any:
        """Defaults of the object, if it has any."""
        return getattr(self.outside, "defaults", {})

    @property
    def param_groups(self) -> Any:
        """Groups of the object, if it has any."""
        return getattr(self.outside, "param_groups", [])

    def state_dict(self) -> Any:
        """Call the object's own method."""
        return self.outside.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Call the object's own method."""
        self.outside.load_state_dict(state_dict)


__all__ = [
    "METHODS",
    "Aliases",
    "Expanded",
    "Foreign",
    "class_name",
    "expand",
    "inside",
    "is_hollow",
]
