"""One module that is saved in a way of its own: asked, compared with what is stored, and loaded.

Not thread-safe: used by the thread that trains.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch

from tierckpt.errors import UnsupportedStateError
from tierckpt.state import tree_codec
from tierckpt.state.names import (
    inside,
    named_buffers,
    named_parameters,
    torch_names,
    under_every_name,
)

from .hooked_state import HookedState
from .kinds import has_hooks_alone

_EXTRA = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


class Entries:
    """The live tensors that are stored."""

    def __init__(self, model: torch.nn.Module) -> None:
        named = [(f"model/{name}", p) for name, p in named_parameters(model)]
        named += [(f"buffer/{name}", b) for name, b in named_buffers(model)]
        self._tensors = dict(named)
        self.stored = {id(tensor): name for name, tensor in named}

    def resolved(self, value: Any, device: str = "") -> Any:
        """`value` with tensors in the place of entries, and others on a `device` of that kind."""
        where = next((t.device for t in self._tensors.values() if t.device.type == device), None)

        def change(leaf: Any) -> Any:
            if isinstance(leaf, tree_codec.Entry):
                return self._tensors.get(leaf.key, leaf)
            return leaf.to(where) if where is not None and isinstance(leaf, torch.Tensor) else leaf

        return mapped(value, change)


class Place:
    """One module of the model under one of its names, alone or `whole`: with all inside it."""

    def __init__(
        self, name: str, module: torch.nn.Module, whole: bool, stored: Mapping[int, str]
    ) -> None:
        """`stored`: by `id()` of the live tensors, what each is stored as."""
        self.name, self.module, self.whole = name, module, whole
        self._ours: dict[str, str] = {}
        """Modules inside by the names that torch has for them, where wrappers are part of these."""
        self._theirs: dict[str, str] = {}
        self._slots: list[tuple[str, dict[str, Any], str, str]] = []
        """(our key, the dict that has the tensor, its key there, what it is stored as)."""
        self._extras: dict[str, torch.nn.Module] = {}
        """Whose extra state is under that key: `extras.ExtraStates` stores it."""
        self._versions: dict[str, int] = {}
        """torch's, of the format of each module, by torch's names."""
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
        """Keys, values, metadata and record of the last time, where the hooks only gave what is
        stored: the next record is the same if they give the same."""

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
        """What the module's `state_dict()` gives, by our keys, and torch's metadata. Raises
        UnsupportedStateError where it raises, or gives something else than a dict."""
        into: Any = collections.OrderedDict()
        into._metadata = collections.OrderedDict()
        try:
            into = self._ask(into)
        except Exception as error:
            raise UnsupportedStateError(
                f"{self}: its state_dict() raises {type(error).__name__}: {error}. Mend it, or "
                "remove the hook that raises; where it can be had only after a forward pass, run "
                "one before attaching."
            ) from error
        if not isinstance(into, Mapping):
            raise UnsupportedStateError(
                f"{self}: its state_dict() returns a {type(into).__name__}; let it return a dict."
            )
        told = dict(getattr(into, "_metadata", None) or {})
        metadata = {str(self._ours.get(name, name)): dict(told[name]) for name in told}
        if not self._ours:
            return dict(into), metadata
        return {_renamed(key, self._ours): value for key, value in into.items()}, metadata

    def _ask(self, into: Any) -> Any:
        """As torch does it when the model is asked."""
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
        """What torch's own code gives, by our keys: the live tensors themselves."""
        return {ours: held[key] for ours, held, key, _ in self._slots if held.get(key) is not None}

    def compare(self, state: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[str]]:
        """What in `state` (as `ask` has it) is not just what is stored under that key, with a
        `tree.Entry` for each tensor that is stored under another; and the keys that it lacks."""
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
        """What has to be stored of it: see `Record`. Shares its tensors."""
        state, metadata = self.ask()
        keys = [key for key in state if key not in self._extras] if self._extras else [*state]
        values = [state[key] for key in keys] if self._extras else [*state.values()]
        if self.kept is not None:
            then_keys, then_values, then_metadata, record = self.kept
            like = then_keys == keys and then_metadata == metadata
            if like and all(map(is_, values, then_values)):
                return record
        given, left_out = self.compare(state)
        told = {name: facts for name, facts in metadata.items() if facts != {"version": 1}}
        found = {key: _devices(value) for key, value in given.items()}
        devices = {key: device for key, device in found.items() if device}
        record = {"given": given, "left_out": left_out, "metadata": told, "devices": devices}
        refers = all(isinstance(value, tree_codec.Entry) for value in given.values())
        self.kept = (keys, values, metadata, record) if self._hooked and refers else None
        return record

    def load(self, records: Mapping[str, Mapping[str, Any]], entries: Entries) -> str:
        """Give the module, and all inside it, what `state_dict()` gave when `records` were made:
        parameters and buffers as they are now. Returns torch's complaint; empty if it has none."""
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
            return f"{self}: {type(error).__name__}: {error}"
        finally:
            for held, key, tensor in params:  # or optimizers would step what is nobody's
                if isinstance(held.get(key), torch.nn.Parameter):
                    held[key] = tensor
            for key, tensor in kept.items():  # whatever is under its name, it is loaded already
                live[key].detach().copy_(tensor)
        return ""


def is_inside(name: Any, outer: str) -> bool:
    return not outer or name == outer or str(name).startswith(f"{outer}.")


def _renamed(key: Any, names: Mapping[str, str]) -> Any:
    """A key of a state_dict with the module's name as in `names`, if it is there."""
    module = key if names and isinstance(key, str) else ""
    while module and module not in names:
        module = module.rpartition(".")[0]
    return f"{names[module]}{key[len(module) :]}".lstrip(".") if module else key


def _shell(name: str, module: torch.nn.Module) -> torch.nn.Module:
    """A model that has just this module, under that name."""
    for part in reversed(name.split(".") if name else []):
        outer = torch.nn.Module()
        outer._modules[part] = module
        module = outer
    return module


def _is_same(value: Any, tensor: torch.Tensor | None) -> bool:
    """Two that are one in memory, and so in value."""
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
    """Equal for two that `_is_same` says are."""
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
    """The kind of device that tensors in it are on, other than the host."""
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


__all__ = ["Entries", "Place", "is_inside", "mapped"]
