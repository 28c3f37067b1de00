"""Objects with a state besides model and optimizers: the users' `extra`.

Held generators: the random generators that a data loader, its data set and its functions have.

Augmentation draws from a generator in an attribute of a data set, of a transform, of a collate
function, or in a global variable that one of their functions names. Each has a path by which it is
found again in another process: `dataset.dataset.rng`, `collate_fn.transforms[0].rng`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tierckpt.errors import UnsupportedStateError

from . import tree_codec
from .names import named_modules
from .process_state import load_numpy, load_python, numpy_state, python_state

__all__ = [
    "EXTRA_STATES",
    "PLAIN_VALUES",
    "DataPlace",
    "ExtraStates",
    "HeldGenerators",
    "LoaderPlace",
    "PlainValues",
    "check_extra",
    "first_values",
    "generator_state",
    "is_generator",
    "is_place",
    "load_extra",
    "named_objects",
    "pack_extra",
]


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


class DataPlace:
    """The loop's position in the data. Derived from it: a sampler's `Position`, `ResumableLoader`;
    a job without them does not load their modules."""


class LoaderPlace(DataPlace):
    """What the checkpointer calls of a `ResumableLoader`; see there."""

    def restored(self) -> None:
        """A restore ends."""
        raise NotImplementedError

    def step_starts(self) -> None:
        """The first step after a restore begins."""
        raise NotImplementedError

    def state_dict(self, in_forward: bool = False) -> dict[str, Any]:
        """The position."""
        raise NotImplementedError


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


MAX_OBJECTS = 1_000
"""Limit of objects that are looked at, the nearest first."""
MAX_DEPTH = 10
MAX_MEMBERS = 64
"""A longer container is taken as data."""
_ENDS = (
    *(
        _BaseDataLoaderIter,
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        type,
        types.ModuleType,
    ),
    *(torch.Tensor, np.ndarray, np.generic, torch.optim.Optimizer),
)
_LIBRARIES = ("torch.", "numpy.", "tierckpt.", "ddp_ckpt.", "horovod_ckpt.")
"""Their functions draw from given generators, or from those of the process."""
_OURS = ("ResumableLoader", "ResumableCombinedLoader", "CheckpointerCore")
"""Classes of ours that refer to everything in a job."""
_CONTAINERS: dict[Any, Any] = {
    dict: dict.items,
    list: lambda each: enumerate(list.__iter__(each)),
    tuple: lambda each: enumerate(tuple.__iter__(each)),
}
_CALLED = ("__getitem__", "__getitems__", "__iter__", "__call__", "forward")
"""Methods that read samples or augment: the global variables that they name are looked at."""


class HeldGenerators:
    """The generators that an object refers to, by path. Calls no method and no property of the
    objects."""

    def __init__(self, root: Any) -> None:
        """Search `root`, which may be any iterable: a loader, or a wrapper around one."""
        self.found: dict[str, Any] = {}
        """Each generator once, by its shortest path; not those of the whole process."""
        self._owners: dict[str, Any] = {}
        self._search(root)

    def put(self, path: str, state: Mapping[str, Any]) -> bool:
        """Give the object at a path a generator of this state, in an attribute still None or
        absent: the object makes its generator when it is first used. Returns False, with nothing
        changed, if there is no such object."""
        parent, _, name = path.rpartition(".")
        owner = self._owners.get(parent)
        own = getattr(owner, "__dict__", None)
        is_code = isinstance(owner, types.FunctionType | functools.partial)
        if is_code or not isinstance(own, dict) or own.get(name) is not None:
            return False
        if (made := _made_for(state)) is None:
            return False
        load_extra(made, state)
        own[name] = self.found[path] = made
        if (process := f"_{name}_pid") in own:  # Transformers' collators make one in each process
            own[process] = os.getpid()
        return True

    def _search(self, root: Any) -> None:
        seen = {id(each): each for each in _of_process()}
        level: list[tuple[str, Any]] = [("", root)]
        for _ in range(MAX_DEPTH):
            following: list[tuple[str, Any]] = []
            for path, each in level:
                if id(each) in seen or len(seen) > MAX_OBJECTS:
                    continue
                seen[id(each)] = each
                if is_generator(each):
                    self.found[path] = each
                    continue
                if isinstance(getattr(each, "__dict__", None), dict):
                    self._owners[path] = each  # a list may hold an iterator, and so its workers
                with contextlib.suppress(Exception):  # another thread may change the object
                    following += [
                        (f"{path}{part}".removeprefix("."), member)
                        for part, member in _members(each, each is root)
                        if not issubclass(type(member), _ENDS)
                    ]
            level = sorted(following, key=lambda pair: pair[0])


def _of_process() -> Iterator[Any]:
    """The global generators, which every version has."""
    python: Any = random.getstate
    numpy: Any = np.random.get_state
    yield from (python.__self__, numpy.__self__, torch.default_generator)
    yield from getattr(torch.cuda, "default_generators", ())


def _made_for(state: Mapping[str, Any]) -> Any:
    """A generator of the kind of a saved state; None if unknown, or of a device."""
    if "generator" in state:
        made = torch.Generator()
        return made if made.get_state().shape == state["generator"].shape else None
    if "python" in state:
        return random.Random()
    if "numpy" in state:
        return np.random.RandomState()
    kind = getattr(np.random, str(state["bit_generator"]["bit_generator"]), None)
    return np.random.Generator(kind()) if isinstance(kind, type) else None


def _members(each: Any, is_root: bool) -> Iterator[tuple[str, Any]]:
    """The objects that one refers to, with their part of the path."""
    kind: Any = type(each)  # not `__class__`: that of a lazy proxy would create the object
    for base, pairs in _CONTAINERS.items():
        if issubclass(kind, base):  # a derived class may load its members when asked
            if base.__len__(each) <= MAX_MEMBERS:
                yield from ((f"[{key!r}]", member) for key, member in [*pairs(each)])
            return
    if issubclass(kind, functools.partial):
        yield from ((".func", each.func), (".args", each.args), (".keywords", each.keywords))
    elif issubclass(kind, types.MethodType):
        yield from ((".__self__", each.__self__), (".__func__", each.__func__))
    elif issubclass(kind, types.FunctionType):
        yield from _of_function(each)
    elif is_root or not _is_end(kind):
        if issubclass(kind, torch.nn.Module):
            own = {name: v for name, v in vars(each).items() if not name.startswith("_")}
            yield from ((f".{name}", value) for name, value in (own | each._modules).items())
        else:
            yield from ((f".{name}", value) for name, value in _attributes(each))
        for function in _called(kind):
            yield from ((f".{function.__name__}{p}", v) for p, v in _globals_of(function))


def _is_end(kind: Any) -> bool:
    """Iterators come and go, and are no loaders unless they have a length."""
    is_iterator = hasattr(kind, "__next__") and not hasattr(kind, "__len__")
    return is_iterator or any(base.__name__ in _OURS for base in kind.__mro__)


@functools.lru_cache(256)
def _called(kind: Any) -> list[types.FunctionType]:
    """The methods that read or change samples, and those that they name."""
    left, found = [*_CALLED], dict[str, types.FunctionType]()
    while left:
        name = left.pop()
        holder = next((base for base in kind.__mro__ if name in vars(base)), None)
        function = None if name in found or holder is None else vars(holder)[name]
        if isinstance(function, types.FunctionType) and not _is_of_library(function):
            found[name] = function
            left += _names(function.__code__)
    return [found[name] for name in sorted(found)]


def _attributes(each: Any) -> Iterator[tuple[str, Any]]:
    own = getattr(each, "__dict__", None)
    if isinstance(own, dict):
        yield from [*own.items()]
    for kind in type(each).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = vars(kind).get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(each)
                except AttributeError:  # not assigned
                    continue


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The objects in a function's closure, defaults, and global variables."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    yield from _globals_of(function)


def _globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The global variables that a function names: those that are generators, functions, or objects
    that can be called, as transforms are. A script's other objects are no part of its data."""
    if _is_of_library(function):
        return
    there = function.__globals__
    for name in sorted({*_names(function.__code__)} & there.keys()):
        value = there[name]
        if is_generator(value) or (
            callable(value) and not issubclass(type(value), (*_ENDS, torch.nn.Module))
        ):
            yield f".{name}", value


def _is_of_library(function: types.FunctionType) -> bool:
    return f"{function.__module__}.".startswith(_LIBRARIES)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


SHOWN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def first_values(tensor: torch.Tensor) -> list[Any]:
    """A few values, to compare; none of a type that Python has no numbers for."""
    return tensor.detach().flatten()[:4].tolist() if tensor.dtype in SHOWN else []
