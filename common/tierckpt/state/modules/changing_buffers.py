"""Buffers that change their kind while a job trains: empty ones get a size, None becomes a tensor.

A restart builds the model as it was at the beginning, so a version's buffers may differ from the
live ones. Such a buffer is accepted where it is known to be the same one. First, if the live buffer
has, or had at attach, the kind that the buffer had when the job that wrote the version began.
Second, if the module's own `_load_from_state_dict` accepts it. Any other difference means another
model.

Not thread-safe: for the training thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tierckpt.format.layout import TensorSpec
from tierckpt.state import tree_codec
from tierckpt.state.names import inside, named_modules

Kind = Any
"""Kind of a buffer, as JSON: [dtype, shape]; None for None, False if there is no such buffer."""


def kinds_of(model: torch.nn.Module) -> dict[str, Kind]:
    """Kinds of all persistent buffers, by name; a buffer with several names has its first."""
    found: dict[str, Kind] = {}
    seen = {id(None)}
    for prefix, module in named_modules(model):
        for name, buffer in module._buffers.items():
            if name not in module._non_persistent_buffers_set:
                if buffer is None or id(buffer) not in seen:
                    found[inside(prefix, name)] = _kind(buffer)
                seen.add(id(buffer))
    return found


def changed(first: Mapping[str, Kind], model: torch.nn.Module) -> dict[str, Kind]:
    """The kinds at `first` of all buffers that have another kind now."""
    now = kinds_of(model)
    return {name: first.get(name, False) for name in now if now[name] != first.get(name, False)}


class ChangedBuffers:
    """Buffers of a version, accepted although they differ from the live ones."""

    def __init__(
        self,
        model: torch.nn.Module,
        first: Mapping[str, Kind],
        saved: Mapping[str, TensorSpec],
        began: Mapping[str, Kind],
    ) -> None:
        """`saved`: the version's buffers. `first`: kinds of all buffers when this job was attached.
        `began`: first kinds of the changed buffers, in the job that wrote the version."""
        self._model = model
        self._modules = dict(named_modules(model))  # for a wrapper, the module inside it
        now = kinds_of(model)
        then = {name: [spec.dtype, list(spec.shape)] for name, spec in saved.items()}
        differ = [n for n in {**now, **then} if now.get(n, False) != then.get(n)]
        self.taken = {
            name
            for name in differ
            if name.rpartition(".")[0] in self._modules
            and began.get(name, then.get(name)) in (first.get(name, False), now.get(name, False))
        }
        self._loaded: dict[str, list[str]] = {}
        """By module, names of the buffers that its own way of loading accepts."""
        rest: dict[str, list[str]] = {}
        for name in (n for n in differ if n in then and n not in self.taken):
            rest.setdefault(name.rpartition(".")[0], []).append(name)
        for prefix, names in rest.items():
            if self._takes(prefix, {n: _zeros(saved[n]) for n in names}):
                self._loaded[prefix] = names
                self.taken.update(names)

    def _takes(self, prefix: str, given: Mapping[str, torch.Tensor]) -> bool:
        """Try to load `given` into the module, which stays unchanged; True if it accepts all."""
        module = self._modules.get(prefix)
        if module is None:
            return False
        before = dict(vars(module))
        try:
            buffers = {
                k: None if held is None else held.clone() for k, held in module._buffers.items()
            }
            vars(module).update(
                _buffers=buffers,
                _parameters=dict(module._parameters),
                _modules=dict(module._modules),
            )
            self._load(prefix, given)
            return all(_kind(self._held(name)) == _kind(value) for name, value in given.items())
        except Exception:
            return False
        finally:
            vars(module).clear()
            vars(module).update(before)

    def _load(self, prefix: str, given: Mapping[str, torch.Tensor]) -> None:
        module = self._modules[prefix]
        params = dict(module._parameters)
        own = {**params, **module._buffers}
        state = {inside(prefix, key): held for key, held in own.items() if held is not None}
        metadata = {"version": module._version}
        dot = f"{prefix}." if prefix else ""
        module._load_from_state_dict({**state, **given}, dot, metadata, True, [], [], [])
        module._parameters.update(params)  # undo a replacement: optimizers hold these objects

    def _held(self, name: str) -> torch.Tensor | None:
        prefix, _, key = name.rpartition(".")
        return self._modules[prefix]._buffers.get(key)

    def make(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """A new tensor to load the buffer into, on its module's device."""
        module = self._modules[name.rpartition(".")[0]]
        near = [*module.buffers(recurse=False), *module.parameters()]
        near += self._modules[""].parameters()
        device = next((t.device for t in near if t.device.type == spec.device), "cpu")
        return tree_codec.empty(spec, device)

    def finish(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Put the tensors into the modules; those of `taken` without a tensor become None."""
        for prefix, names in self._loaded.items():
            self._load(prefix, {name: loaded[name] for name in names})
        replace(self._model, {name: loaded.get(name) for name in self.taken})


def replace(model: torch.nn.Module, values: Mapping[str, torch.Tensor | None]) -> None:
    """Make these the model's persistent buffers of these names. Where a buffer is shared, its other
    places get the new one, too."""
    modules = dict(named_modules(model))
    for name in values:
        prefix, _, key = name.rpartition(".")
        live = modules[prefix]._buffers.get(key)
        shared = [
            (m, k) for m in modules.values() for k, held in m._buffers.items() if held is live
        ]
        for module, other in shared if live is not None else ():
            module._buffers[other] = values[name]
    for name, value in values.items():  # last: names that shared a buffer may have two now
        prefix, _, key = name.rpartition(".")
        vars(modules[prefix]).pop(key, None)
        modules[prefix]._buffers[key] = value


def adopt(model: torch.nn.Module, kinds: Mapping[str, Kind]) -> None:
    """Make buffers of these kinds where they differ; their contents are filled in later."""
    now = kinds_of(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    replace(
        model,
        {
            name: kind and torch.empty(kind[1], dtype=tree_codec.dtype_of(kind[0]), device=device)
            for name, kind in kinds.items()
            if now.get(name, False) != kind
        },
    )


def _kind(buffer: torch.Tensor | None) -> Kind:
    if buffer is None:
        return None
    shape = None if torch.nn.parameter.is_lazy(buffer) else list(buffer.shape)
    return [str(buffer.dtype).removeprefix("torch."), shape]


def _zeros(spec: TensorSpec) -> torch.Tensor:
    return tree_codec.empty(spec, "cpu").zero_()


__all__ = ["ChangedBuffers", "adopt", "changed", "kinds_of", "replace"]
