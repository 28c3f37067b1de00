"""Inside: optimizers that are kept in other ones, and what these wrappers are.

A wrapper (SAM, Lookahead, ScheduleFree, Accelerate's) steps an optimizer that is one of its
attributes. That one's state belongs to the training as well, whether or not the wrapper's
`state_dict()` has it; and where the wrapper's own step is never called, its steps are the
training's.
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
"""What is no torch.optim.Optimizer must have, to stand for the optimizers that are in it."""


@dataclass
class Expanded:
    """What was given, with all that is inside."""

    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    """Those whose state is stored: each that was given, then those inside that have a state of
    their own, as `label.attribute`."""
    steppers: dict[str, list[torch.optim.Optimizer]] = field(default_factory=dict)
    """Whose steps are those of each of them: torch calls hooks for these."""
    outer: dict[str, str] = field(default_factory=dict)
    """For each of `optimizers` the label of what was given."""
    hollow: list[Any] = field(default_factory=list)
    """Those for whose steps torch calls no hook."""


def expand(given: Mapping[str, Any]) -> Expanded:
    """Find what is inside. What was given by a name of its own keeps that."""
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
    """Optimizers in its attributes, and in those of these, with the way to each."""
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
    """What wrappers and those inside have in common: the very same state or groups. A
    `load_state_dict()` makes new ones, of one of them alone perhaps."""

    def __init__(self, outer: Any) -> None:
        """As it is now, of one that was given and those inside of it."""
        every = [outer, *(inner for _, inner in inside(outer))]
        self._shared = [
            (name, one, other)
            for name in ("param_groups", "state")
            for number, one in enumerate(every)
            for other in every[number + 1 :]
            if getattr(one, name, None) is getattr(other, name, self)
        ]

    def mend(self) -> None:
        """Those of the outer one are in common again."""
        for name, one, other in self._shared:
            if getattr(one, name) is not getattr(other, name):
                with contextlib.suppress(AttributeError):
                    setattr(other, name, getattr(one, name))


def is_hollow(optimizer: Any) -> bool:
    """True where torch calls no hooks: it never came to torch.optim.Optimizer's own __init__."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return True
    try:
        optimizer.register_step_post_hook(_do_nothing).remove()
    except AttributeError:
        return True
    return not getattr(type(optimizer).step, "hooked", False)


def _complete(optimizer: torch.optim.Optimizer) -> None:
    """What torch's own `state_dict()` and `load_state_dict()` ask for, and its __init__ makes."""
    for name in _HOOKS:
        vars(optimizer).setdefault(name, OrderedDict())


def _do_nothing(*_: Any) -> None:
    """A hook."""


def class_name(optimizer: Any) -> str:
    """Of the class; of a wrapper that has nothing of its own, that of what it wraps: the same state
    comes back with it and without."""
    optimizer = optimizer.outside if isinstance(optimizer, Foreign) else optimizer
    if is_hollow(optimizer):
        for _, inner in inside(optimizer):
            if inner.state is getattr(optimizer, "state", None):
                return class_name(inner)
    return type(optimizer).__name__


class Foreign:
    """What is no torch.optim.Optimizer, and steps those inside of it, as if it were one."""

    def __init__(self, outside: Any) -> None:
        self.outside = outside

    @property
    def state(self) -> Any:
        """Its own, by parameter, if it has any."""
        return getattr(self.outside, "state", {})

    @property
    def defaults(self) -> Any:
        """Its own, if it has any."""
        return getattr(self.outside, "defaults", {})

    @property
    def param_groups(self) -> Any:
        """Its own, if it has any."""
        return getattr(self.outside, "param_groups", [])

    def state_dict(self) -> Any:
        """Its own."""
        return self.outside.state_dict()

    def load_state_dict(self, told: Any) -> None:
        """Its own."""
        self.outside.load_state_dict(told)


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
