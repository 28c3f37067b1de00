"""A foreign state as the parts of a version: named tensors, the rank tree, the structure.

The names are the source's. A restore finds the live parameter or buffer of each, see
`restore.imported`: a file does not say which of its tensors are buffers, or, in most formats, which
parameter is the first of an optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from tierckpt.errors import ConfigError, UnsupportedStateError
from tierckpt.state import tree_codec
from tierckpt.state.extras import EXTRA_STATES, PLAIN_VALUES
from tierckpt.state.training_state import NAMELESS

from .foreign_state import EXTRA_STATE, ForeignState, without_wrappers


class ForeignVersion:
    """The parts of a version with the state of `foreign`; shares its tensors. What cannot be stored
    is added to `foreign.not_taken`. Raises ConfigError for a model or an optimizer that cannot be
    stored."""

    def __init__(self, foreign: ForeignState) -> None:
        self._foreign = foreign
        self.tensors: dict[str, torch.Tensor] = {}
        """By the names of their entries."""
        self.tied: dict[str, str] = {}
        self.structure: dict[str, Any] = {}
        self._arena = tree_codec.Arena()
        self._extra: dict[str, Any] = {}
        self._groups: dict[str, list[Any]] = {}
        self._odd: dict[str, dict[str, Any]] = {}
        self._named: list[str] = []
        """Optimizers with names of parameters, not numbers."""
        try:
            self._take_model()
            for label, state in foreign.optimizers.items():
                self._take_optimizer(label, state)
        except UnsupportedStateError as error:
            raise ConfigError(f"a version cannot store it: {error}") from error
        self._take_objects()

    def _take_model(self) -> None:
        first: dict[tuple[Any, ...], str] = {}
        own_states = {}
        for name, value in self._foreign.model.items():
            if name.rpartition(".")[2] == EXTRA_STATE:
                own_states[name.rpartition(".")[0]] = value
                continue
            tree_codec.refuse_tensor(value, name)
            value = value.resolve_conj().resolve_neg()
            place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            known = first.setdefault(place, name) if value.numel() else name
            if known != name:
                self.tied[name] = known
            else:
                self.tensors[f"model/{name}"] = value
        if own_states:
            self._extra[EXTRA_STATES] = tree_codec.pack(own_states, "model", self._arena.keep)

    def equal(self) -> list[list[str]]:
        """Names of tensors of the model with equal bytes, in groups: they may be one tensor in the
        live model."""
        of_kind: dict[tuple[Any, ...], list[str]] = {}
        for entry, tensor in self.tensors.items():
            if entry.startswith("model/"):
                of_kind.setdefault((tensor.shape, tensor.dtype), []).append(entry)
        found: dict[tuple[Any, ...], list[str]] = {}
        for kind, entries in of_kind.items():
            for entry in entries if len(entries) > 1 else ():
                raw = tree_codec.as_bytes(self.tensors[entry].reshape(-1))
                key = (*kind, xxhash.xxh3_128_digest(raw.numpy().data))
                found.setdefault(key, []).append(entry.removeprefix("model/"))
        return [names for names in found.values() if len(names) > 1]

    def _take_optimizer(self, label: str, state: Mapping[str, Any]) -> None:
        groups = _groups_of(label, state)
        self._foreign.not_taken += [
            f"{label}[{key!r}]" for key in state if key not in ("state", "param_groups")
        ]
        names, are_names = _names_of(groups, self._foreign.prefix)
        if are_names:
            self._named.append(label)
        members = [[names[str(each)] for each in group["params"]] for group in groups]
        self.structure[label] = {"class": "", "groups": members}
        self._groups[label] = [
            {
                key: tree_codec.pack(value, f"{label}.{key}", self._arena.keep)
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            for group in groups
        ]
        for param, values in state["state"].items():
            if not isinstance(values, Mapping) or str(param) not in names:
                text = f"{label}: state of {param!r}, which is no parameter"
                self._foreign.not_taken.append(text)
                continue
            self._take_values(f"{label}/{names[str(param)]}", values)

    def _take_values(self, owner: str, values: Mapping[Any, Any]) -> None:
        """One parameter's state."""
        named = {k: v for k, v in values.items() if isinstance(k, str) and "/" not in k}
        if len(named) < len(values):
            named[NAMELESS] = {k: v for k, v in values.items() if k not in named}
        for key, value in named.items():
            if isinstance(value, torch.Tensor) and tree_codec.is_plain(value):
                tree_codec.refuse_tensor(value, f"{owner}/{key}")
                self.tensors[f"{owner}/{key}"] = value
                continue
            entries = tree_codec.Entries()
            node = tree_codec.pack(value, key, entries)
            self.tensors |= {f"{owner}/{path}": tensor for path, tensor in entries.found}
            self._odd.setdefault(owner, {})[key] = node

    def _take_objects(self) -> None:
        """Take extra states, and plain values, as far as they can be stored."""
        foreign, kept = self._foreign, {}
        for name, state in foreign.extra.items():
            packed = self._packed(name, state)
            if packed is not None:
                self._extra[name] = packed
        for name, value in foreign.values.items():
            packed = self._packed(name, value)
            if packed is not None or value is None:
                kept[name] = packed
        if kept:
            self._extra[PLAIN_VALUES] = kept

    def _packed(self, name: str, value: Any) -> Any:
        """The value as a node; None, and a line in the report, if it cannot be stored."""
        before = len(self._arena.tensors)
        try:
            return tree_codec.pack(value, name, self._arena.keep)
        except UnsupportedStateError as error:
            del self._arena.tensors[before:]
            self._foreign.not_taken.append(f"{name} ({str(error).partition(', which')[0]})")
            return None

    def tree(self) -> bytes:
        """The encoded rank tree. Takes the tensors of the arena: call it once."""
        node = {
            "groups": self._groups,
            "odd": self._odd,
            "extra": self._extra,
            "extra_per_rank": {},
            "remainders": {},
            "imported": {
                "from": self._foreign.kind,
                "named": self._named,
                "equal": self.equal(),
                "tied": self.tied,
            },
        }
        encoded = tree_codec.EncodedTree(node, self._arena)
        room = torch.empty(encoded.nbytes, dtype=torch.uint8)
        encoded.copy(0, room)
        return bytes(room.numpy().data)


def _groups_of(label: str, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    given = state["param_groups"]
    groups = [*given.values()] if isinstance(given, Mapping) else [*given]
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise ConfigError(f"{label}: its param_groups[{number}] names no params")
    return groups


def _names_of(groups: Sequence[Mapping[str, Any]], prefix: str) -> tuple[dict[str, str], bool]:
    """The names of parameters by their keys in the state, and whether they are names in the model:
    keys are such names themselves, or groups have `param_names`; else they are numbers. Names are
    without wrappers' name parts, and without `prefix`."""
    keys = [each for group in groups for each in group["params"]]
    names = [each for group in groups for each in group.get("param_names") or ()]
    if len(names) != len(keys):
        names = [each for each in keys if isinstance(each, str) and not each.isdigit()]
    if len(names) != len(keys) or not keys:
        return {str(key): str(key) for key in keys}, False
    own = [name.removeprefix(prefix) for name in without_wrappers(dict.fromkeys(names))]
    return dict(zip(map(str, keys), own, strict=True)), True


__all__ = ["ForeignVersion"]
