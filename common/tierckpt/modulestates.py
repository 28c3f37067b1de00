"""What a model's `state_dict()` has beside parameters, buffers and `get_extra_state`.

A module may be saved in a way of its own: it overrides `_save_to_state_dict` or `state_dict`, or
has hooks, which add, leave out, rename or change entries. Such modules are asked for every version;
of all others torch's own code says what they give, and nothing is asked.

What is asked for is compared with what is stored anyway. A tensor that is stored is referred to
(`tree.Entry`), whatever its key; the rest is stored by value, and given back through the module's
own `load_state_dict`, as torch would.

Not thread-safe: used by the thread that trains.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from . import tree
from .errors import StateTornError, UnsupportedStateError
from .manifest import digest
from .modulenames import inside, named_buffers, named_parameters, torch_names, under_every_name
from .wording import some

MODULE_STATES = "modules' own state"
"""What `ModuleStates` is called among the `extra` objects."""

LARGE_BYTES = 2**20
"""What is stored by value for modules is copied at the boundary: more than this is reported."""

_EXTRA = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
_SAVE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")

Record = dict[str, dict[str, Any]]
"""By the module's name: `given` (see `Place.compare`), `left_out` (keys), torch's `metadata` where
it says more than that the version is 1, and `devices` of what was not on the host."""


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
        return {_renamed(key, self._ours): value for key, value in into.items()}, metadata

    def _ask(self, into: Any) -> Any:
        """As torch does it when the model is asked."""
        prefix = f"{self.name}." if self.name else ""
        if not self.whole:
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
        given, left_out = self.compare(state)
        told = {name: facts for name, facts in metadata.items() if facts != {"version": 1}}
        found = {key: _devices(value) for key, value in given.items()}
        devices = {key: device for key, device in found.items() if device}
        return {"given": given, "left_out": left_out, "metadata": told, "devices": devices}

    def load(self, records: Mapping[str, Mapping[str, Any]], entries: _Entries) -> str:
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
        try:
            _shell(self.name, self.module).load_state_dict(whole)
        except Exception as error:
            return f"{self}: {type(error).__name__}: {error}"
        finally:
            for key, tensor in kept.items():  # whatever is under its name, it is loaded already
                live[key].detach().copy_(tensor)
        return ""


class ModuleStates:
    """All modules of a model that are saved, or loaded, in a way of their own. One of the `extra`
    objects; false where there are none."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._savers: list[Place] = []
        """Asked for every version."""
        self._loaders: list[Place] = []
        """Those that do something of their own when they are loaded."""
        self.notes: list[str] = []
        """See `check`."""
        self._modules = [*model.modules()]
        self._types = list(map(type, self._modules))
        hooks = [getattr(module, kind) for module in self._modules for kind in _SAVE_HOOKS]
        self._without_hooks = [held for held in hooks if not held]
        self._replaced = "state_dict" in vars(model)
        self._find({id(module): (_saves(module), _loads(module)) for module in self._modules})

    def _find(self, ways: Mapping[int, tuple[str, bool]]) -> None:
        if not any(saves or loads for saves, loads in ways.values()):
            return
        stored = _Entries(self._model).stored
        asked: list[str] = []
        for name, module in under_every_name("", self._model):
            saves, loads = ways[id(module)]
            if loads:
                self._loaders.append(Place(name, module, True, stored))
            if saves and not any(_is_inside(name, outer) for outer in asked):
                self._savers.append(Place(name, module, saves == "whole", stored))
                asked += [name] if saves == "whole" else []

    def __bool__(self) -> bool:
        return bool(self._savers or self._loaders)

    def stand(self) -> bool:
        """False where a module is saved in another way than when this was made, as far as can be
        seen at a boundary: a hook was registered, a class changed."""
        return (
            not any(self._without_hooks)
            and list(map(type, self._modules)) == self._types
            and ("state_dict" in vars(self._model)) == self._replaced
        )

    def state_dict(self) -> Record:
        """What has to be stored beside parameters, buffers and extra state; shares its tensors."""
        return {place.name: place.record() for place in self._savers}

    def pack(self, keep: tree.KeepTensor) -> Any:
        """The same as `tree.pack` has it; what cannot be packed is reported with its module."""
        return {place.name: _packed(place, place.record(), keep) for place in self._savers}

    def load_state_dict(self, record: Mapping[str, Any]) -> None:
        """Raises StateTornError where what is there after that is not what `record` has."""
        wrong, complaints = self.load(record)
        if wrong:
            raise StateTornError("; ".join([*wrong, *complaints]))

    def load(self, record: Mapping[str, Any] | None) -> tuple[list[str], list[str]]:
        """After parameters, buffers and extra state. Returns, in words, where `state_dict()` gives
        something else now than it gave then; and what torch complained of on the way. `record` is
        None where a version has none."""
        entries = _Entries(self._model)
        complaints = [
            place.load(
                {k: v for k, v in (record or {}).items() if _is_inside(k, place.name)}, entries
            )
            for place in self._to_be_loaded(record or {}, entries)
        ]
        wrong = self._unlike(record, entries) if record is not None else []
        return wrong, [*filter(None, complaints)]

    def _to_be_loaded(self, record: Mapping[str, Any], entries: _Entries) -> list[Place]:
        """None of them inside another one."""
        told = {name for name, each in record.items() if _values(each["given"])}
        found = [*self._loaders]
        for saver in self._savers:
            if saver.name in told:
                found.append(Place(saver.name, saver.module, True, entries.stored))
        chosen: list[Place] = []
        for place in sorted(found, key=lambda each: (each.name.count("."), len(each.name))):
            if not any(_is_inside(place.name, outer.name) for outer in chosen):
                chosen.append(place)
        return chosen

    def _unlike(self, record: Mapping[str, Any], entries: _Entries) -> list[str]:
        found = []
        for place in self._savers:
            then = record.get(place.name)
            if then is None:
                continue
            now = place.record()
            keys = {**then["given"], **now["given"], **dict.fromkeys(then["left_out"])}
            keys.update(dict.fromkeys(now["left_out"]))
            live = place.tensors()
            differ = [
                str(key)
                for key in keys
                if _facts(key, then, live, entries) != _facts(key, now, live, entries)
            ]
            if differ:
                found.append(
                    f"{place} did not take what its state_dict() gave (it gives other values now "
                    f"for {some(differ)})"
                )
        return found

    def differences(self, record: Mapping[str, Any] | None) -> list[str]:
        """What a version has and no module here takes, or the other way round, in words."""
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
        """Raise UnsupportedStateError, with the module's name, for what cannot be stored; what
        users should know of the rest is in `notes` then."""
        found = self.notes
        for place in self._savers:
            kept = _Sizes()
            record = place.record()
            once, again = (_packed(place, each, kept) for each in (record, place.record()))
            if once != again:
                keys = [str(k) for k in record["given"] if once["given"] != again["given"]]
                raise UnsupportedStateError(
                    f"{place}: its state_dict() gives other values when it is called again "
                    f"({some(keys)}). Let it return what the module has, and change that in the "
                    "forward pass; or leave it out of state_dict()."
                )
            values = _values(record["given"])
            nbytes = kept.nbytes // 2
            if nbytes > LARGE_BYTES:
                found.append(
                    f"{place} has {nbytes} bytes in its state_dict() that are no parameter or "
                    f"buffer ({some(values)}): they are copied at the boundary, on every rank"
                )
            if values and not self._takes(place):
                found.append(
                    f"{place} has {some(values)} in its state_dict(), and nothing that takes it "
                    "back (load_state_dict() calls it unexpected, or takes it for a parameter): a "
                    "restore will be refused unless it is as it was then. Override "
                    "_load_from_state_dict(), or register a load_state_dict pre-hook"
                )

    def _takes(self, place: Place) -> bool:
        near = [each.name for each in self._loaders]
        return any(_is_inside(n, place.name) or _is_inside(place.name, n) for n in near)


class _Entries:
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
            if isinstance(leaf, tree.Entry):
                return self._tensors.get(leaf.key, leaf)
            return leaf.to(where) if where is not None and isinstance(leaf, torch.Tensor) else leaf

        return _mapped(value, change)


class _Sizes:
    """A `tree.KeepTensor` that keeps digests, and counts bytes."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        tree.refuse_tensor(tensor, path)
        self.nbytes += tensor.nbytes
        raw = tensor.detach().cpu().contiguous().reshape(-1)
        data = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
        return {tree.TAG: [str(tensor.dtype), list(tensor.shape), digest(data).hex()]}


def _packed(place: Place, record: dict[str, Any], keep: tree.KeepTensor) -> dict[str, Any]:
    given = {
        key: tree.pack(value, f"{place}: state_dict()[{key!r}]", keep)
        for key, value in record["given"].items()
        if isinstance(key, str)
    }
    if len(given) < len(record["given"]):
        odd = next(key for key in record["given"] if not isinstance(key, str))
        raise UnsupportedStateError(f"{place}: its state_dict() has {odd!r} as a key; use text.")
    rest = {key: value for key, value in record.items() if key != "given"}
    return {"given": given, **tree.pack(rest, f"{place}: state_dict()._metadata", keep)}


def _facts(key: Any, record: Mapping[str, Any], live: Mapping[str, Any], entries: _Entries) -> str:
    """What a state_dict has under that key, bit for bit, on whatever device."""
    if key in record["left_out"]:
        return "left out"
    if key not in record["given"] and key not in live:
        return "none"
    value = entries.resolved(record["given"].get(key, live.get(key)))
    return json.dumps(tree.pack(value, str(key), _Sizes()), sort_keys=True)


def _values(given: Mapping[Any, Any]) -> list[str]:
    """Keys of what is more than a tensor that is stored anyway."""
    return [str(key) for key, value in given.items() if not isinstance(value, tree.Entry)]


def _saves(module: torch.nn.Module) -> str:
    """Empty where torch's own code gives the module's state; `alone` where what is inside it is not
    touched by what is the module's own; else `whole`."""
    if _overrides(module, "state_dict") or module._state_dict_hooks:
        return "whole"
    alone = module._state_dict_pre_hooks or _overrides(module, "_save_to_state_dict")
    return "alone" if alone else ""


def _loads(module: torch.nn.Module) -> bool:
    """Of torch's own layers none does anything that loading tensors does not."""
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


def _is_inside(name: Any, outer: str) -> bool:
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
    if tensor is None or value is tensor or type(value) not in tree.PLAIN:
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
    if type(tensor) not in tree.PLAIN or tensor.layout is not torch.strided:
        return (id(tensor),)
    where = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride())
    return (*where, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _referring(value: Any, known: Mapping[tuple[Any, ...], str]) -> Any:
    def change(leaf: Any) -> Any:
        entry = known.get(_memory(leaf)) if isinstance(leaf, torch.Tensor) else None
        return leaf if entry is None else tree.Entry(entry)

    return _mapped(value, change)


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


def _mapped(value: Any, change: Any) -> Any:
    kind = type(value)
    if kind in (dict, collections.OrderedDict):
        return kind((k, _mapped(v, change)) for k, v in value.items())
    if kind is collections.deque:
        return kind((_mapped(v, change) for v in value), value.maxlen)
    if kind in (list, tuple):
        return kind(_mapped(v, change) for v in value)
    return change(value)


def into_model(record: Mapping[str, Any], model: dict[str, Any], entries: Mapping[str, Any]) -> Any:
    """`model`, which has all that is stored under its own name, as `state_dict()` gave it; with
    torch's metadata. `entries` are tensors by the names under which they are stored."""
    found: Any = collections.OrderedDict(model)
    found._metadata = {}
    for each in record.values():
        for key in each["left_out"]:
            found.pop(key, None)
        for key, value in each["given"].items():
            found[key] = _mapped(
                value, lambda v: entries[v.key] if isinstance(v, tree.Entry) else v
            )
        found._metadata.update(each["metadata"])
    return found


__all__ = ["MODULE_STATES", "ModuleStates", "into_model"]
