"""A loop's own state: values that it counts, and objects without a `state_dict()`.

    loop = tierckpt.LoopState(best=0.0)
    ckpt = ddp_ckpt.Checkpointer(model, optimizer, extra_per_rank={"data": data, "loop": loop})
    ckpt.restore()
    for epoch in range(data.epoch, epochs):
        losses = AverageMeter()
        loop.resume(epoch, losses=losses)
        ...
        loop.best = max(loop.best, evaluate())

Scripts keep the best metric in a variable, and running averages in small objects that they make in
each epoch. Without them the figures that a resumed run logs are averages since the restart.
"""

from __future__ import annotations

import types
from collections import defaultdict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch

from .errors import ConfigError
from .state import tree_codec

_WHOLE = (torch.Tensor, np.ndarray, np.generic, deque, Enum, list, tuple, set, frozenset)
"""Values that are stored as they are, besides those without attributes."""
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
"""Attributes that the script's own code sets again."""


class LoopState:
    """Values of a loop as attributes, and objects that it makes in each epoch.

    Give it to the checkpointer in `extra_per_rank` (in `extra` if it is equal on all ranks). Values
    are numbers, strings, tensors, and lists and dicts of these. Training thread only.

    Args:
        values: the attributes and their first values. Raises ConfigError for the name of a method.
    """

    is_place = True
    """See `state.extras.is_place`."""

    def __init__(self, **values: Any) -> None:
        for name in values:
            if hasattr(type(self), name):
                raise ConfigError(f"LoopState({name}=...): this is a method's name; use another")
        vars(self).update(values)
        self._objects: dict[str, Any] = {}
        self._epoch: int | None = None
        self._restored: dict[str, Any] = {}

    def resume(self, epoch: int, **objects: Any) -> None:
        """Store the state of these objects from now on. If the restored version was taken in this
        epoch, set it first.

        Call it where the loop makes the objects, in each epoch. The state of an object is its
        `state_dict()`, or otherwise its attributes; functions, classes and modules among these are
        left out. A call with the same names replaces the objects. Raises ConfigError if an object
        has no attributes or contains itself, and UnsupportedStateError, with the attribute's name,
        if a value cannot be stored.
        """
        for name, each in objects.items():
            _check(name, each)
        if epoch != self._epoch:
            self._objects, self._restored = {}, {}
        self._epoch = epoch
        for name, each in objects.items():
            self._objects[name] = each
            if name in self._restored:
                _set(each, self._restored.pop(name))

    def state_dict(self) -> dict[str, Any]:
        """The values, and the state of the objects of the current epoch."""
        values = {name: each for name, each in vars(self).items() if not name.startswith("_")}
        objects = {name: _state_of(each) for name, each in self._objects.items()}
        return {"values": values, "epoch": self._epoch, "objects": {**self._restored, **objects}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the values; `resume` sets the objects, which the loop makes later."""
        vars(self).update(state["values"])
        self._epoch, self._restored = state["epoch"], dict(state["objects"])
        self._objects = {}


class Attributes:
    """Some attributes of an object without a `state_dict()`, for `extra` or `extra_per_rank`.

        extra={"log": tierckpt.Attributes(logger, "history", "best")}

    Raises ConfigError if the object has no such attribute.

    Args:
        owner: the object. A restore sets its attributes.
        names: names of attributes with numbers, strings, tensors, lists or dicts of these, or
            objects of which all attributes are such values.
    """

    def __init__(self, owner: object, *names: str) -> None:
        missing = [name for name in names if not hasattr(owner, name)]
        if missing or not names:
            what = f"no attribute {missing[0]!r}" if missing else "attributes; give their names"
            raise ConfigError(f"Attributes: the {type(owner).__name__} has {what}")
        self._owner, self._names = owner, names

    def state_dict(self) -> dict[str, Any]:
        """The current values by name."""
        return {name: _state_of(getattr(self._owner, name)) for name in self._names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the attributes that the object still has."""
        for name in self._names:
            if name in state:
                setattr(self._owner, name, _set(getattr(self._owner, name), state[name]))


def _check(name: str, value: Any) -> None:
    """Raise an error if the object cannot be stored."""
    kind = type(value).__name__
    if not (_has_methods(value) or hasattr(value, "__dict__")):
        raise ConfigError(
            f"resume({name}=...): a {kind} has no attributes that could be set; store the value: "
            f"loop.{name} = ..."
        )
    try:
        tree_codec.pack(_state_of(value), f"LoopState {name!r}", tree_codec.Arena().keep)
    except RecursionError:
        raise ConfigError(
            f"resume({name}=...): the {kind} contains itself. Give some of its attributes: "
            f"extra_per_rank={{'{name}': tierckpt.Attributes({name}, 'attribute', ...)}}"
        ) from None


def _has_methods(value: Any) -> bool:
    return not isinstance(value, type) and all(
        callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict")
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, _WHOLE) or not hasattr(value, "__dict__")


def _state_of(value: Any) -> Any:
    """The value, with attributes in place of objects."""
    if _has_methods(value):
        return value.state_dict()
    if isinstance(value, dict):
        return {key: _state_of(each) for key, each in value.items()}
    if _is_plain(value):
        return value
    return {
        name: _state_of(each) for name, each in vars(value).items() if not isinstance(each, _CODE)
    }


def _set(value: Any, state: Any) -> Any:
    """The value with this state: the same object, if it is none of the plain ones."""
    if _has_methods(value):
        value.load_state_dict(state)
    elif isinstance(value, dict):
        made: Callable[[], Any] | None = None
        if isinstance(value, defaultdict):
            made = value.default_factory
        for key, each in state.items():
            old = value[key] if key in value else made() if made is not None else None
            value[key] = _set(old, each)
        for key in value.keys() - state.keys():
            del value[key]
    elif _is_plain(value):
        return state
    else:
        vars(value).update({n: _set(vars(value).get(n), each) for n, each in state.items()})
    return value


__all__ = ["Attributes", "LoopState"]
