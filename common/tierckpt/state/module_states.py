"""Modules with their own way of saving: the parts of a model's `state_dict()` besides parameters,
buffers and `get_extra_state`.

A module may override `_save_to_state_dict` or `state_dict`, or have hooks that add, leave out,
rename or change entries. Such modules are queried for every version. For all others, torch's own
code determines the result, so they are not queried.

The result of a query is compared with the stored tensors. A stored tensor becomes a reference
(`tree_codec.Entry`), whatever its key. The rest is stored by value, and loaded through the
module's own `load_state_dict`, as torch would do it.

A module may have hooks, but no other code of its own. Such hooks see the entries of all modules
inside (torch's checkpoint wrappers rename them), so most of a model. Their input is known: it is
made here from views kept between calls, and no module inside is queried.

A dry run of a restore: a module's own state is loaded into a copy when a job attaches. Otherwise a
module that saves what it cannot load is found at the first restart. The copy has its own tensors;
large ones are without memory, on torch's device `meta`. Other objects in attributes are shared:
what is loaded into them is what they have.

Not thread-safe: for the training thread only.
"""

from __future__ import annotations

import collections
import copy
import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import contains, is_
from types import FunctionType
from typing import Any

import numpy as np
import torch

from tierckpt._text import error_text, some
from tierckpt.errors import StateTornError, UnsupportedStateError
from tierckpt.format.manifest import digest
from tierckpt.state import tree_codec
from tierckpt.state.names import (
    inside,
    named_buffers,
    named_parameters,
    torch_names,
    under_every_name,
)

__all__ = [
    "MODULE_STATES",
    "Entries",
    "HookedState",
    "ModuleStates",
    "Place",
    "complaint",
    "has_hooks_alone",
    "into_model",
    "is_inside",
    "loads",
    "mapped",
    "saves",
]


_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def saves(module: torch.nn.Module) -> str:
    """Kind of saving. Empty: torch's own code. `alone`: the module's own code does not touch the
    state of the modules inside it. `whole`: it does."""
    if _overrides(module, "state_dict") or module._state_dict_hooks:
        return "whole"
    alone = module._state_dict_pre_hooks or _overrides(module, "_save_to_state_dict")
    return "alone" if alone else ""


def has_hooks_alone(module: torch.nn.Module) -> bool:
    """True if hooks are the module's only own code, and no module inside it has any."""
    return not any(
        _overrides(each, "state_dict")
        or _overrides(each, "_save_to_state_dict")
        or (each is not module and saves(each))
        for each in module.modules()
    )


def loads(module: torch.nn.Module) -> bool:
    """True if loading the module runs more than torch's own code for loading tensors."""
    return (
        any(getattr(module, kind) for kind in _LOAD_HOOKS)
        or _overrides(module, "load_state_dict")
        or _overrides(module, "_load_from_state_dict")
    )


def _overrides(module: torch.nn.Module, method: str) -> bool:
    if method in vars(module):
        return True
    theirs = getattr(type(module), method, None)
    if theirs is getattr(torch.nn.Module, method):
        return False
    return not getattr(theirs, "__module__", "").startswith("torch.nn.modules.")


class HookedState:
    """State of one module; valid while the modules inside it are the same."""

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        slots: Sequence[tuple[str, dict[str, Any], str]],
        extras: Mapping[str, torch.nn.Module],
        versions: Mapping[str, int],
    ) -> None:
        """All names are torch's. `slots`: the name of each tensor, the dict that holds it, and its
        key there. `extras`: modules with extra state. `versions`: format version of all modules."""
        self._name, self._module, self._extras = name, module, extras
        self._keys = [key for key, *_ in slots]
        self._slots = [(held, key) for _, held, key in slots]
        self._versions = {n: v for n, v in versions.items() if v != 1 or n == name}
        self._live: list[torch.Tensor | None] = []
        self._views: list[torch.Tensor | None] = []

    def ask(self) -> Any:
        """The result of the module's `state_dict()`, without metadata that has only version 1. A
        value that no hook has touched is the same object as in the last call while the live tensor
        is the same. Raises the errors of hooks."""
        prefix = f"{self._name}." if self._name else ""
        for before in self._module._state_dict_pre_hooks.values():
            before(self._module, prefix, False)
        self._look()
        pairs = zip(self._keys, self._views, strict=True)
        into: Any = collections.OrderedDict((k, view) for k, view in pairs if view is not None)
        into.update((key, module.get_extra_state()) for key, module in self._extras.items())
        into._metadata = collections.OrderedDict(
            (name, {"version": version}) for name, version in self._versions.items()
        )
        now, metadata = into, into._metadata[self._name]
        for hook in self._module._state_dict_hooks.values():
            result = hook(self._module, now, prefix, metadata)
            if result is not None and getattr(hook, "_from_public_api", False):
                raise RuntimeError("state_dict post-hook must return None")
            now = now if result is None else result
        return into if self._name else now  # torch uses a hook's return value only at the root

    def _look(self) -> None:
        live = [held.get(key) for held, key in self._slots]
        if len(live) == len(self._live) and all(map(is_, live, self._live)):
            both = zip(self._views, live, strict=True)
            if all(
                view is None or tensor is None or view.is_set_to(tensor) for view, tensor in both
            ):
                return
        self._live = live
        self._views = [None if tensor is None else tensor.detach() for tensor in live]


_EXTRA = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


class Entries:
    """The stored tensors of the live model."""

    def __init__(self, model: torch.nn.Module) -> None:
        named = [(f"model/{name}", p) for name, p in named_parameters(model)]
        named += [(f"buffer/{name}", b) for name, b in named_buffers(model)]
        self._tensors = dict(named)
        self.stored = {id(tensor): name for name, tensor in named}

    def replaced(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Entries:
        """The same entries with other tensors."""
        found = copy.copy(self)
        found._tensors = {name: change(tensor) for name, tensor in self._tensors.items()}
        return found

    def resolved(self, value: Any, device: str = "") -> Any:
        """`value` with tensors in place of entries; its other tensors move to `device`, a kind."""
        where = next((t.device for t in self._tensors.values() if t.device.type == device), None)

        def change(leaf: Any) -> Any:
            if isinstance(leaf, tree_codec.Entry):
                return self._tensors.get(leaf.key, leaf)
            return leaf.to(where) if where is not None and isinstance(leaf, torch.Tensor) else leaf

        return mapped(value, change)


class Place:
    """One module of the model under one of its names; `whole`: with all modules inside it."""

    def __init__(
        self, name: str, module: torch.nn.Module, whole: bool, stored: Mapping[int, str]
    ) -> None:
        """`stored`: by `id()` of the live tensors, the name under which each is stored."""
        self.name, self.module, self.whole = name, module, whole
        self._ours: dict[str, str] = {}
        """Our names of modules inside, by torch's names, which include wrappers."""
        self._theirs: dict[str, str] = {}
        self._slots: list[tuple[str, dict[str, Any], str, str]] = []
        """(our key, dict that holds the tensor, its key there, name under which it is stored)."""
        self._extras: dict[str, torch.nn.Module] = {}
        """Modules with extra state, by its key: `extras.ExtraStates` stores it."""
        self._versions: dict[str, int] = {}
        """torch's format version of each module, by torch's names."""
        each_by_ours = under_every_name(name, module) if whole else [(name, module)]
        each_by_theirs = torch_names(name, module) if whole else [(name, module)]
        for (ours, each), (theirs, _) in zip(each_by_ours, each_by_theirs, strict=True):
            if ours != theirs:
                self._ours[theirs], self._theirs[ours] = ours, theirs
            self._versions[theirs] = each._version
            self._add(ours, each, stored)
        self._hooked: HookedState | None = None
        if whole and has_hooks_alone(module):
            slots = [
                (_renamed(ours, self._theirs), held, key) for ours, held, key, _ in self._slots
            ]
            extras = {_renamed(key, self._theirs): each for key, each in self._extras.items()}
            self._hooked = HookedState(name, module, slots, extras, self._versions)
        self.kept: tuple[list[Any], list[Any], dict[str, Any], dict[str, Any]] | None = None
        """Keys, values, metadata and record of the last query, if the hooks gave only stored
        tensors: if they give the same ones again, the record is the same."""

    def _add(self, name: str, module: torch.nn.Module, stored: Mapping[int, str]) -> None:
        for kind, held in (("model", module._parameters), ("buffer", module._buffers)):
            for key, tensor in held.items():
                if kind == "model" or key not in module._non_persistent_buffers_set:
                    ours = inside(name, key)
                    entry = stored.get(id(tensor), f"{kind}/{ours}")
                    self._slots.append((ours, held, key, entry))
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            self._extras[inside(name, _EXTRA)] = module

    def __str__(self) -> str:
        kind = type(self.module).__name__
        return f"module {self.name!r} (a {kind})" if self.name else f"the model (a {kind})"

    def ask(self) -> tuple[dict[Any, Any], dict[str, Any]]:
        """The result of the module's `state_dict()`, by our keys, and torch's metadata. Raises
        UnsupportedStateError if the method raises, or returns something other than a dict."""
        into: Any = collections.OrderedDict()
        into._metadata = collections.OrderedDict()
        try:
            into = self._ask(into)
        except Exception as error:
            raise UnsupportedStateError(
                f"{self}: its state_dict() raises {error_text(error)}. Fix it, or "
                "remove the hook that raises; if it works only after a forward pass, run one "
                "before attaching."
            ) from error
        if not isinstance(into, Mapping):
            raise UnsupportedStateError(
                f"{self}: its state_dict() returns a {type(into).__name__}; let it return a dict."
            )
        given = dict(getattr(into, "_metadata", None) or {})
        metadata = {str(self._ours.get(name, name)): dict(given[name]) for name in given}
        if not self._ours:
            return dict(into), metadata
        return {_renamed(key, self._ours): value for key, value in into.items()}, metadata

    def _ask(self, into: Any) -> Any:
        """Query the module as torch does when the model is queried."""
        prefix = f"{self.name}." if self.name else ""
        if self._hooked is not None:
            into = self._hooked.ask()
        elif not self.whole:
            into._metadata[self.name] = {"version": self.module._version}
            for hook in self.module._state_dict_pre_hooks.values():
                hook(self.module, prefix, False)
            self.module._save_to_state_dict(into, prefix, False)
        elif self.name:
            self.module.state_dict(destination=into, prefix=prefix, keep_vars=False)
        else:
            into = self.module.state_dict()
        return into

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors that torch's own code would give, by our keys."""
        return {ours: held[key] for ours, held, key, _ in self._slots if held.get(key) is not None}

    def compare(self, state: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[str]]:
        """The values in `state` (as of `ask`) that are not simply the tensor stored under that key,
        with a `tree_codec.Entry` for each tensor stored under another key. Second, the keys
        that `state` lacks."""
        live = self.tensors()
        given = {
            key: value
            for key, value in state.items()
            if not _is_same(value, live.get(key)) and key not in self._extras
        }
        left_out = [key for key in chain(live, self._extras) if key not in state]
        if given:
            held = [(d[key], entry) for _, d, key, entry in self._slots if d.get(key) is not None]
            known = {_memory(tensor): entry for tensor, entry in held if tensor.numel()}
            given = {key: _referring(value, known) for key, value in given.items()}
        return given, left_out

    def record(self) -> dict[str, Any]:
        """The part of its state that must be stored, see `Record`. Shares its tensors."""
        state, metadata = self.ask()
        keys = [key for key in state if key not in self._extras] if self._extras else [*state]
        values = [state[key] for key in keys] if self._extras else [*state.values()]
        if self.kept is not None:
            then_keys, then_values, then_metadata, record = self.kept
            like = then_keys == keys and then_metadata == metadata
            if like and all(map(is_, values, then_values)):
                return record
        given, left_out = self.compare(state)
        facts_of = {name: facts for name, facts in metadata.items() if facts != {"version": 1}}
        found = {key: _devices(value) for key, value in given.items()}
        devices = {key: device for key, device in found.items() if device}
        record = {"given": given, "left_out": left_out, "metadata": facts_of, "devices": devices}
        refers = all(isinstance(value, tree_codec.Entry) for value in given.values())
        self.kept = (keys, values, metadata, record) if self._hooked and refers else None
        return record

    def load(self, records: Mapping[str, Mapping[str, Any]], entries: Entries) -> str:
        """Load into the module, and all inside it, the results of `state_dict()` in `records`;
        parameters and buffers keep their values. Returns torch's complaint; empty if none."""
        live = self.tensors()
        state: dict[str, Any] = {**live}
        state |= {key: module.get_extra_state() for key, module in self._extras.items()}
        metadata: dict[str, Any] = {name: {"version": v} for name, v in self._versions.items()}
        fed = {}
        for record in records.values():
            for key in record["left_out"]:
                state.pop(key, None)
            for key, value in record["given"].items():
                fed[key] = entries.resolved(value, record["devices"].get(key, ""))
            for name, facts in record["metadata"].items():
                metadata[self._theirs.get(name, name)] = facts
        state.update(fed)
        whole = collections.OrderedDict((_renamed(k, self._theirs), v) for k, v in state.items())
        whole._metadata = metadata  # type: ignore[attr-defined]
        kept = {key: live[key].detach().clone() for key in fed.keys() & live.keys()}
        params = [
            (held, key, held[key]) for _, held, key, _ in self._slots if held.get(key) is not None
        ]
        try:
            _shell(self.name, self.module).load_state_dict(whole)
        except Exception as error:
            return f"{self}: {error_text(error)}"
        finally:
            for held, key, tensor in params:  # else optimizers would step tensors outside the model
                if isinstance(held.get(key), torch.nn.Parameter):
                    held[key] = tensor
            for key, tensor in kept.items():  # already loaded, whatever `records` has for the key
                live[key].detach().copy_(tensor)
        return ""


def is_inside(name: Any, outer: str) -> bool:
    return not outer or name == outer or str(name).startswith(f"{outer}.")


def _renamed(key: Any, names: Mapping[str, str]) -> Any:
    """A key of a state_dict with the module's name replaced as in `names`, if it is there."""
    module = key if names and isinstance(key, str) else ""
    while module and module not in names:
        module = module.rpartition(".")[0]
    return f"{names[module]}{key[len(module) :]}".lstrip(".") if module else key


def _shell(name: str, module: torch.nn.Module) -> torch.nn.Module:
    """A model that contains only this module, under that name."""
    for part in reversed(name.split(".") if name else []):
        outer = torch.nn.Module()
        outer._modules[part] = module
        module = outer
    return module


def _is_same(value: Any, tensor: torch.Tensor | None) -> bool:
    """True for two tensors that share one memory, and so all values."""
    if tensor is None or value is tensor or type(value) not in tree_codec.PLAIN:
        return value is not None and value is tensor
    return (
        value.dtype == tensor.dtype
        and value.layout is torch.strided
        and bool(value.is_set_to(tensor))
        and value.is_conj() == tensor.is_conj()
        and value.is_neg() == tensor.is_neg()
    )


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key of the tensor's memory, equal for two tensors that `_is_same` calls the same."""
    if type(tensor) not in tree_codec.PLAIN or tensor.layout is not torch.strided:
        return (id(tensor),)
    where = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride())
    return (*where, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _referring(value: Any, known: Mapping[tuple[Any, ...], str]) -> Any:
    def change(leaf: Any) -> Any:
        entry = known.get(_memory(leaf)) if isinstance(leaf, torch.Tensor) else None
        return leaf if entry is None else tree_codec.Entry(entry)

    return mapped(value, change)


def _devices(value: Any) -> str:
    """The kind of device of the tensors in it, other than the host; empty if there is none."""
    leaves = (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))
    return next((leaf.device.type for leaf in leaves if leaf.device.type != "cpu"), "")


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (dict, collections.OrderedDict):
        value = list(value.values())
    if type(value) not in (list, tuple, collections.deque):
        yield value
        return
    for each in value:
        yield from _leaves(each)


def mapped(value: Any, change: Any) -> Any:
    kind = type(value)
    if kind in (dict, collections.OrderedDict):
        return kind((k, mapped(v, change)) for k, v in value.items())
    if kind is collections.deque:
        return kind((mapped(v, change) for v in value), value.maxlen)
    if kind in (list, tuple):
        return kind(mapped(v, change) for v in value)
    return change(value)


LARGE_BYTES = 2**20
"""Limit of a copied tensor."""
_COPIED = (dict, collections.OrderedDict, list, tuple, set, collections.deque)
_VALUES = (torch.Tensor, torch.Generator, np.ndarray)
_CERTAIN = ("Unexpected key(s)", "Missing key(s)")
"""Complaints that large tensors without memory cannot cause."""


def complaint(
    model: torch.nn.Module, place: Place, records: Mapping[str, Mapping[str, Any]], live: Entries
) -> str:
    """Torch's complaint if these records are loaded into a copy of the module at `place`; empty if
    there is none, or no dry run is possible. Changes nothing."""
    try:
        memo = _copies(model, place.module)
    except Exception:
        return ""
    if memo is None:
        return ""
    there = live.replaced(lambda t: memo[id(t)] if id(t) in memo else _stand_in(t))
    cloned = {n: {**r, "given": mapped(r["given"], _clone)} for n, r in records.items()}
    stored = {id(memo[i]): name for i, name in live.stored.items() if i in memo}
    trial = Place(place.name, memo[id(place.module)], True, stored)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
        warnings.simplefilter("ignore")
        said = trial.load(cloned, there)
    unsure = any(isinstance(each, torch.Tensor) and each.is_meta for each in memo.values())
    return "" if unsure and not any(text in said for text in _CERTAIN) else said


def _copies(model: torch.nn.Module, module: torch.nn.Module) -> dict[int, Any] | None:
    """By `id()` of each module and tensor inside `module`, its copy. None if a hook refers to the
    model by itself, so that it would change that."""
    memo: dict[int, Any] = {id(each): each for each in model.modules()}
    inside = [*module.modules()]
    for each in inside:
        memo[id(each)] = object.__new__(type(each))
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _stand_in(tensor)
    for each in inside:
        for kind in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
            hooks = [getattr(hook, "hook", hook) for hook in getattr(each, kind, {}).values()]
            if any(isinstance(hook, FunctionType) and hook.__closure__ for hook in hooks):
                return None
        vars(memo[id(each)]).update((k, _copy(v, memo)) for k, v in vars(each).items())
    return memo


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) in _COPIED or isinstance(value, _VALUES):
        return copy.deepcopy(value, memo)
    return memo.get(id(value), value)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    large = tensor.nbytes > LARGE_BYTES
    made = tensor.detach().to("meta") if large else tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


MODULE_STATES = "modules' own state"
"""Name of `ModuleStates` among the `extra` objects."""

"""Values of modules are copied at the boundary: more bytes than this are reported."""

LOADED_BY_TORCH = (
    " torch calls load_state_dict() of the outermost module alone. In the class {kind} write, in "
    "place of load_state_dict():\n"
    "    def _load_from_state_dict(self, state_dict, prefix, *args):\n"
    "        self.{key} = state_dict.pop(prefix + {key!r})\n"
    "        super()._load_from_state_dict(state_dict, prefix, *args)"
)

_SAVE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")

Record = dict[str, dict[str, Any]]
"""By the module's name: `given` (see `Place.compare`), `left_out` (keys), torch's `metadata` if it
is more than version 1, and `devices` of tensors that were not on the host."""


class ModuleStates:
    """All modules of a model with their own way of saving or loading. One of the `extra` objects;
    false when there are none."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._savers: list[Place] = []
        """Modules to query for every version."""
        self._loaders: list[Place] = []
        """Modules with their own way of loading."""
        self._packs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        """Records that may be the same the next time, see `Place.kept`, and their packed nodes."""
        self.notes: list[str] = []
        """Warnings for the user, see `check`."""
        self._modules = [*model.modules()]
        self._types = list(map(type, self._modules))
        hooks = [getattr(module, kind) for module in self._modules for kind in _SAVE_HOOKS]
        self._without_hooks = [held for held in hooks if not held]
        self._attributes = [vars(m) for m in self._modules if "state_dict" not in vars(m)]
        self._find({id(module): (saves(module), loads(module)) for module in self._modules})

    def _find(self, ways: Mapping[int, tuple[str, bool]]) -> None:
        if not any(saves or loads for saves, loads in ways.values()):
            return
        stored = Entries(self._model).stored
        asked: list[str] = []
        for name, module in under_every_name("", self._model):
            saves, loads = ways[id(module)]
            if loads:
                self._loaders.append(Place(name, module, True, stored))
            if saves and not any(is_inside(name, outer) for outer in asked):
                self._savers.append(Place(name, module, saves == "whole", stored))
                asked += [name] if saves == "whole" else []

    def __bool__(self) -> bool:
        return bool(self._savers or self._loaders)

    def looked_at(self) -> tuple[list[torch.nn.Module], list[dict[Any, Any]]]:
        """All modules, and dicts of their hooks that are empty while they `stand`."""
        return self._modules, self._without_hooks

    def asks(self) -> bool:
        """True if a version queries a module."""
        return bool(self._savers)

    def stand(self) -> bool:
        """False when a module's way of saving has changed since this was made, as far as a boundary
        can notice: a hook was registered, a method replaced, a class changed."""
        return (
            not any(self._without_hooks)
            and list(map(type, self._modules)) == self._types
            and not any(map(contains, self._attributes, repeat("state_dict")))
        )

    def state_dict(self) -> Record:
        """State to store besides parameters, buffers and extra state; shares its tensors."""
        return {place.name: place.record() for place in self._savers}

    def pack(self, keep: tree_codec.KeepTensor) -> Any:
        """The same, packed by `tree_codec.pack`; an error names the module."""
        found = {}
        for place in self._savers:
            record, last = place.record(), self._packs.get(place.name)
            if last is not None and record is last[0]:
                found[place.name] = last[1]
                continue
            found[place.name] = _packed(place, record, keep)
            if place.kept is not None:
                self._packs[place.name] = record, found[place.name]
        return found

    def load_state_dict(self, record: Mapping[str, Any]) -> None:
        """Load a record. Raises StateTornError when the state then differs from `record`."""
        wrong, repeated_errors = self.load(record)
        if wrong:
            raise StateTornError("; ".join([*wrong, *repeated_errors]))

    def load(self, record: Mapping[str, Any] | None) -> tuple[list[str], list[str]]:
        """Load after parameters, buffers and extra state. Returns, as text, the results of
        `state_dict()` that differ from those in `record`, and torch's complaints. `record` is None
        for a version without one."""
        if not self and not record:
            return [], []
        entries, records = Entries(self._model), record or {}
        wanted = {
            name: {key: _facts(value, entries) for key, value in each["given"].items()}
            for name, each in records.items()
        }  # computed before loading: a module may change the values it gets
        repeated_errors = [
            place.load({n: r for n, r in records.items() if is_inside(n, place.name)}, entries)
            for place in self._to_be_loaded(records, entries)
        ]
        wrong = [
            self._unlike(place, wanted[place.name], records[place.name]["left_out"], entries)
            for place in self._savers
            if place.name in records
        ]
        return [*filter(None, wrong)], [*filter(None, repeated_errors)]

    def _to_be_loaded(self, record: Mapping[str, Any], entries: Entries) -> list[Place]:
        """Places to load; none of them is inside another one."""
        with_values = {name for name, each in record.items() if _values(each["given"])}
        found = [*self._loaders]
        for saver in self._savers:
            if saver.name in with_values:
                found.append(Place(saver.name, saver.module, True, entries.stored))
        chosen: list[Place] = []
        for place in sorted(found, key=lambda each: (each.name.count("."), len(each.name))):
            if not any(is_inside(place.name, outer.name) for outer in chosen):
                chosen.append(place)
        return chosen

    @staticmethod
    def _unlike(
        place: Place, wanted: Mapping[str, str], left_out: Collection[str], entries: Entries
    ) -> str:
        """The keys that `state_dict()` now gives with another value, as text; empty if none."""
        try:
            now = place.record()
            given = {key: _facts(value, entries) for key, value in now["given"].items()}
        except UnsupportedStateError as error:
            return str(error)
        live = place.tensors()
        differ = set(left_out) ^ set(now["left_out"])
        for key in wanted.keys() | given.keys():
            mine = given[key] if key in given else _facts(live.get(key), entries)
            theirs = wanted[key] if key in wanted else _facts(live.get(key), entries)
            if mine != theirs:
                differ.add(key)
        if not differ:
            return ""
        return (
            f"{place} did not take its saved state (its state_dict() gives other values now for "
            f"{some(sorted(map(str, differ)))})"
        )

    def differences(self, record: Mapping[str, Any] | None) -> list[str]:
        """Entries of a version that no module here takes, and vice versa, as text."""
        here = {place.name for place in self._savers}
        found = [
            f"{key}, which module {name!r} has in its state_dict(), is in the checkpoint, not in "
            "the model"
            for name, each in (record or {}).items()
            if name not in here
            for key in _values(each["given"])
        ]
        if record is None:
            found += [
                f"{key}, which {place} has in its state_dict(), is in the model, not in the "
                "checkpoint"
                for place in self._savers
                for key in _values(place.record()["given"])
            ]
        return found

    def check(self) -> None:
        """Raise UnsupportedStateError, with the module's name, for values that cannot be stored.
        Afterwards `notes` has warnings for the user about the others."""
        found = self.notes
        self._try_to_load()
        for place in self._savers:
            kept = _Sizes()
            record = place.record()
            once = _packed(place, record, kept)  # before the next call, which may change it
            again = _packed(place, place.record(), kept)
            if once != again:
                keys = [str(k) for k in record["given"] if once["given"] != again["given"]]
                raise UnsupportedStateError(
                    f"{place}: its state_dict() gives other values when it is called again "
                    f"({some(keys)}). Let it return the module's values, and change those in the "
                    "forward pass; or leave them out of state_dict()."
                )
            values = _values(record["given"])
            nbytes = kept.nbytes // 2
            if nbytes > LARGE_BYTES:
                found.append(
                    f"{place} has {nbytes} bytes in its state_dict() besides parameters and "
                    f"buffers ({some(values)}): they are copied at the boundary, on every rank"
                )
            if values and not self._takes(place):
                found.append(
                    f"{place} has {some(values)} in its state_dict(), and no code that loads it "
                    "(load_state_dict() reports it as unexpected, or as a parameter): a restore "
                    "will be refused unless the value is the same then. Override "
                    "_load_from_state_dict(), or register a load_state_dict pre-hook"
                )

    def _try_to_load(self) -> None:
        """Raise UnsupportedStateError for a module that saves what it does not load."""
        live, records = Entries(self._model), self.state_dict()
        own = {p.name for p in self._savers if _values(records[p.name]["given"]) and self._takes(p)}
        for place in self._to_be_loaded(records, live) if own else ():
            inner = {n: r for n, r in records.items() if is_inside(n, place.name)}
            if own.isdisjoint(inner) or not (said := complaint(self._model, place, inner, live)):
                continue
            raise UnsupportedStateError(
                f"{said}. So it could not be restored from what its state_dict() returns."
                f"{self._cure(inner)}"
            )

    def _cure(self, records: Mapping[str, Mapping[str, Any]]) -> str:
        for place in self._savers:
            overrides = type(place.module).load_state_dict is not torch.nn.Module.load_state_dict
            if place.name and place.name in records and overrides:
                first = _values(records[place.name]["given"])[0].rpartition(".")[2]
                return LOADED_BY_TORCH.format(
                    kind=type(place.module).__name__, prefix=place.name, key=first
                )
        return " Override _load_from_state_dict(), or register a load_state_dict pre-hook"

    def _takes(self, place: Place) -> bool:
        near = [each.name for each in self._loaders]
        return any(is_inside(n, place.name) or is_inside(place.name, n) for n in near)


class _Sizes:
    """A `tree_codec.KeepTensor` that keeps digests, and counts bytes."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        tree_codec.refuse_tensor(tensor, path)
        self.nbytes += tensor.nbytes
        raw = tensor.detach().cpu().contiguous().reshape(-1)
        data = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
        return {tree_codec.TAG: [str(tensor.dtype), list(tensor.shape), digest(data).hex()]}


def _packed(place: Place, record: dict[str, Any], keep: tree_codec.KeepTensor) -> dict[str, Any]:
    given = {
        key: tree_codec.pack(value, f"{place}: state_dict()[{key!r}]", keep)
        for key, value in record["given"].items()
        if isinstance(key, str)
    }
    if len(given) < len(record["given"]):
        odd = next(key for key in record["given"] if not isinstance(key, str))
        raise UnsupportedStateError(f"{place}: its state_dict() has {odd!r} as a key; use text.")
    rest = {key: value for key, value in record.items() if key != "given"}
    return {"given": given, **tree_codec.pack(rest, f"{place}: state_dict()._metadata", keep)}


def _facts(value: Any, entries: Entries) -> str:
    """Text form of a value: equal for two values equal bit for bit, on any device."""
    return json.dumps(tree_codec.pack(entries.resolved(value), "it", _Sizes()), sort_keys=True)


def _values(given: Mapping[Any, Any]) -> list[str]:
    """Keys of all values except plain references to stored tensors."""
    return [str(key) for key, value in given.items() if not isinstance(value, tree_codec.Entry)]


def into_model(record: Mapping[str, Any], model: dict[str, Any], entries: Mapping[str, Any]) -> Any:
    """`model`, which has all stored tensors under their own names, in the form that `state_dict()`
    gave it, with torch's metadata. `entries`: stored tensors by name."""
    found: Any = collections.OrderedDict(model)
    found._metadata = {}
    for each in record.values():
        for key in each["left_out"]:
            found.pop(key, None)
        for key, value in each["given"].items():
            found[key] = mapped(
                value, lambda v: entries[v.key] if isinstance(v, tree_codec.Entry) else v
            )
        found._metadata.update(each["metadata"])
    return found
