"""The parts of a model's `state_dict()` besides parameters, buffers and `get_extra_state`.

A module may have its own way of saving: it overrides `_save_to_state_dict` or `state_dict`, or has
hooks that add, leave out, rename or change entries. Such modules are queried for every version. For
all others, torch's own code determines the result, so they are not queried.

The result of a query is compared with the stored tensors. A stored tensor becomes a
reference (`tree_codec.Entry`), whatever its key. The rest is stored by value, and loaded through
the module's own `load_state_dict`, as torch would do it.

Not thread-safe: for the training thread only.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Collection, Mapping
from itertools import repeat
from operator import contains
from typing import Any

import torch

from tierckpt._text import some
from tierckpt.errors import StateTornError, UnsupportedStateError
from tierckpt.format.manifest import digest
from tierckpt.state import tree_codec
from tierckpt.state.names import under_every_name

from .custom_state import Entries, Place, is_inside, mapped
from .dry_run import complaint
from .kinds import loads, saves

MODULE_STATES = "modules' own state"
"""Name of `ModuleStates` among the `extra` objects."""

LARGE_BYTES = 2**20
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
        """Load after parameters, buffers and extra state. Returns, in words, the results of
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
        """The keys that `state_dict()` now gives with another value, in words; empty if none."""
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
        """Entries of a version that no module here takes, and vice versa, in words."""
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


__all__ = ["MODULE_STATES", "ModuleStates", "into_model"]
