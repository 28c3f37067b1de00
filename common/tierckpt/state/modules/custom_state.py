"""One module with its own way of saving: query its state, compare it with the stored, load it.

Not thread-safe: for the training thread only.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch

from tierckpt._text import in_words
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
                f"{self}: its state_dict() raises {in_words(error)}. Fix it, or "
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
        with a `tree_codec.Entry` for each tensor that is stored under another key. Second, the keys
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
            return f"{self}: {in_words(error)}"
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


__all__ = ["Entries", "Place", "is_inside", "mapped"]
