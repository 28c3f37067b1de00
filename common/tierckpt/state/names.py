"""Names of modules, parameters and buffers in checkpoints, as without any wrapper."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tierckpt.format.layout import FIXED, parameter_of, path_of


def wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module inside DistributedDataParallel, DataParallel or torch.compile; else None."""
    kind: Any = type(module)
    inner = _attribute_of(kind)
    return getattr(module, inner, None) if inner else None


@functools.lru_cache(4096)
def _attribute_of(kind: Any) -> str:
    """The attribute with the module inside, if the class is a wrapper; else empty."""
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DataParallel)
    if issubclass(kind, parallel):
        return "module"
    return "_orig_mod" if kind.__name__ == "OptimizedModule" else ""


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside all wrappers."""
    while (inner := wrapped(model)) is not None:
        model = inner
    return model


def named_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Every module once, in torch's order. A wrapper has the name of the module inside it, wherever
    in the model it is; a module of the user's own with the name `module` keeps its name."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}

    def look(name: str, module: torch.nn.Module) -> None:
        if id(module) in found:
            return
        found[id(module)] = (name, module)
        inner = wrapped(module)
        for own, child in module._modules.items():
            if child is not None:
                look(name if child is inner else inside(name, own), child)

    look("", model)
    return list(found.values())


def inside(module: str, name: str) -> str:
    """Full name of `name` in the module `module`."""
    return f"{module}.{name}" if module else name


def named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter once (tied weights under their first name)."""
    return _once(_parameters(named_modules(model)))


def named_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every persistent buffer once, as in `state_dict()`."""
    return _once(_buffers(named_modules(model)))


def other_names(model: torch.nn.Module) -> dict[str, str]:
    """Further names of tensors in `state_dict()` (tied weights, a layer used twice), each with the
    first name, which `named_parameters` and `named_buffers` use."""
    found: dict[str, str] = {}
    for tensors_of in (_parameters, _buffers):
        first = {id(tensor): name for name, tensor in _once(tensors_of(named_modules(model)))}
        for name, tensor in tensors_of(under_every_name("", model)):
            if tensor is not None and first[id(tensor)] != name:
                found[name] = first[id(tensor)]
    return found


Modules = Iterable[tuple[str, torch.nn.Module]]
Named = Iterator[tuple[str, torch.Tensor | None]]


def under_every_name(name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """A module called `name` and all inside it, each under all of its names."""
    yield name, module
    inner = wrapped(module)
    for own, child in module._modules.items():
        if child is not None:
            yield from under_every_name(name if child is inner else inside(name, own), child)


def torch_names(name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The same, in the same order, by torch's names, which include wrappers."""
    yield name, module
    for own, child in module._modules.items():
        if child is not None:
            yield from torch_names(inside(name, own), child)


def _parameters(modules: Modules) -> Named:
    for prefix, module in modules:
        for name, param in module._parameters.items():
            yield inside(prefix, name), param


def _buffers(modules: Modules) -> Named:
    for prefix, module in modules:
        for name, buffer in module._buffers.items():
            if name not in module._non_persistent_buffers_set:
                yield inside(prefix, name), buffer


def _once(named: Named) -> list[tuple[str, torch.Tensor]]:
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named:
        if tensor is not None:
            found.setdefault(id(tensor), (name, tensor))
    return list(found.values())


__all__ = [
    "FIXED",
    "inside",
    "named_buffers",
    "named_modules",
    "named_parameters",
    "other_names",
    "parameter_of",
    "path_of",
    "torch_names",
    "under_every_name",
    "unwrap",
    "wrapped",
]
