"""Objects with a state besides model and optimizers: the users' `extra`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from tierckpt.errors import UnsupportedStateError

from . import tree_codec
from .generator_memory import load_numpy, load_python, numpy_state, python_state
from .names import named_modules

EXTRA_STATES = "modules' extra state"
"""Name of `ExtraStates` among the `extra` objects."""
PLAIN_VALUES = "attributes"
"""Name of `PlainValues` among them. Only elastic jobs have it: a checkpoint with it can be restored
without it, and vice versa; see `Loader`."""
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def named_objects(argument: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check an `extra` or `extra_per_rank` argument, and return it as a dict, without names for
    None (a scaler of a script that uses none). Raises UnsupportedStateError for an argument of
    another type, or an object without both methods."""
    if not isinstance(given or {}, Mapping):
        raise UnsupportedStateError(
            f"{argument} is a {type(given).__name__}; give a dict of names and objects, "
            f"{argument}={{'name': object}}"
        )
    objects = {name: obj for name, obj in (given or {}).items() if obj is not None}
    for name, obj in objects.items():
        check_extra(argument, name, obj)
    return objects


def check_extra(argument: str, name: str, obj: Any) -> None:
    """Raise UnsupportedStateError when `obj` has no way to save and load its state."""
    if is_generator(obj):
        return
    if not (
        callable(getattr(obj, "state_dict", None))
        and callable(getattr(obj, "load_state_dict", None))
    ):
        raise UnsupportedStateError(
            f"{argument}[{name!r}] is a {type(obj).__name__} without state_dict() and "
            "load_state_dict(); give it both, or wrap it in an object that has them."
        )


def is_place(obj: Any) -> bool:
    """Whether an object's state is a run's own place, in its data or its loop: it belongs to the
    run's iterations, and means nothing to another job's. Classes say so by `is_place = True`."""
    return bool(getattr(type(obj), "is_place", False)) or isinstance(obj, DataLoader | Sampler)


def is_generator(obj: Any) -> bool:
    """Whether it is a random generator with a state that can be stored. Classes derived from
    Python's and numpy's old one may have another state, or none (`SystemRandom`)."""
    if isinstance(obj, random.Random | np.random.RandomState):
        return type(obj) in (random.Random, np.random.RandomState)
    return isinstance(obj, Generator)


def generator_state(obj: Generator) -> dict[str, Any]:
    """The generator's state, for `load_extra`."""
    if isinstance(obj, torch.Generator):
        return {"generator": obj.get_state()}
    if isinstance(obj, random.Random):
        return {"python": python_state(obj)}
    if isinstance(obj, np.random.RandomState):
        return {"numpy": numpy_state(obj)}
    return {"bit_generator": obj.bit_generator.state}


def pack_extra(name: str, obj: Any, arena: tree_codec.Arena) -> Any:
    """The object's state for `load_extra`, with its tensors in `arena`."""
    path = f"extra[{name!r}]"
    if is_generator(obj):
        return tree_codec.pack(generator_state(obj), path, arena.keep)
    if isinstance(obj, torch.amp.GradScaler):
        return _pack_scaler(obj, arena)
    return tree_codec.pack(obj.state_dict(), path, arena.keep)


def _pack_scaler(scaler: torch.amp.GradScaler, arena: tree_codec.Arena) -> Any:
    """GradScaler.state_dict() without its `.item()`s, which would make the CPU wait for the GPU.

    Falls back to state_dict() where torch's internals differ from those expected here.
    """
    scale = getattr(scaler, "_scale", None)
    tracker = getattr(scaler, "_growth_tracker", None)
    if not scaler.is_enabled() or scale is None or tracker is None:
        return tree_codec.pack(scaler.state_dict(), "extra[GradScaler]", arena.keep)
    return {
        "scale": arena.keep_item(scale),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": arena.keep_item(tracker),
    }


def load_extra(obj: Any, value: Any) -> None:
    """Load the state that `pack_extra` saved into `obj`."""
    if not is_generator(obj):
        obj.load_state_dict(value)
    elif isinstance(obj, torch.Generator):
        obj.set_state(value["generator"])
    elif isinstance(obj, random.Random):
        load_python(value["python"], obj)
    elif isinstance(obj, np.random.RandomState):
        load_numpy(value["numpy"], obj)
    else:
        obj.bit_generator.state = value["bit_generator"]


def load_of_other_ranks(obj: Any, value: Any, ranks: int) -> bool:
    """Load a state into a per-rank object of a job that has another number of ranks than the saved
    one, `ranks`. `value` is the state of one of those ranks; several ranks may get the same.

    The object decides: it has a method `load_of_other_ranks(state, ranks)`, or stays as it is.
    Returns whether it has one.
    """
    load = getattr(obj, "load_of_other_ranks", None)
    if not callable(load):
        return False
    load(value, ranks)
    return True


class ExtraStates:
    """The extra state of all modules, see `torch.nn.Module.get_extra_state`. One of the `extra`
    objects; false when no module has any."""

    def __init__(self, model: torch.nn.Module) -> None:
        plain = torch.nn.Module.get_extra_state
        self._modules = {
            name: module
            for name, module in named_modules(model)
            if type(module).get_extra_state is not plain
        }

    def __bool__(self) -> bool:
        return bool(self._modules)

    def state_dict(self) -> dict[str, Any]:
        """Extra state by the module's name."""
        return {name: module.get_extra_state() for name, module in self._modules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state into the modules that still exist."""
        for name, module in self._modules.items():
            if name in state:
                module.set_extra_state(state[name])


class PlainValues:
    """Plain values (`epoch=0`) in attributes of an elastic state. One of the `extra` objects."""

    def __init__(self, owner: object, names: Iterable[str]) -> None:
        self._owner = owner
        self.names = tuple(names)

    def check(self) -> None:
        """Raise UnsupportedStateError, naming the attribute, if a value cannot be stored."""
        for name, value in self.state_dict().items():
            tree_codec.pack(value, f"TorchState's attribute {name!r}", tree_codec.Arena().keep)

    def state_dict(self) -> dict[str, Any]:
        """Current values by name; the caller must not change them."""
        return {name: getattr(self._owner, name) for name in self.names}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Set the attributes that still exist; those not in `values` stay unchanged."""
        for name in self.names:
            if name in values:
                setattr(self._owner, name, values[name])


__all__ = [
    "EXTRA_STATES",
    "PLAIN_VALUES",
    "ExtraStates",
    "PlainValues",
    "check_extra",
    "generator_state",
    "is_generator",
    "is_place",
    "load_extra",
    "named_objects",
    "pack_extra",
]
