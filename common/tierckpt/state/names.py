"""What modules, parameters and buffers are called in checkpoints: as without any wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

FIXED = ("model/", "buffer/")
"""Names of tensors that are there before any restore; optimizer state is created and dropped."""


def wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    """What is inside DistributedDataParallel, DataParallel, torch.compile; None if it is none."""
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DataParallel)
    if isinstance(module, parallel):
        return module.module  # type: ignore[no-any-return]
    if type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod"):
        return module._orig_mod  # type: ignore[return-value]
    return None


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside all wrappers."""
    while (inner := wrapped(model)) is not None:
        model = inner
    return model


def named_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Every module once, in torch's order. A wrapper has the name of what it wraps, wherever in the
    model it is; a module of the user's own that is called `module` keeps its name."""
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
    """What `name` of the module called `module` is called."""
    return f"{module}.{name}" if module else name


def path_of(name: str) -> tuple[str, str]:
    """(parameter, key) of optimizer state called `label/parameter/key`."""
    parameter, key = name.split("/", 1)[1].rsplit("/", 1)
    return parameter, key


def parameter_of(name: str) -> str:
    """The parameter or buffer that an entry called `name` belongs to."""
    return name.split("/", 1)[1] if name.startswith(FIXED) else path_of(name)[0]


def named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter once (tied weights under their first name)."""
    return _once(_parameters(named_modules(model)))


def named_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every persistent buffer once, as `state_dict()` has them."""
    return _once(_buffers(named_modules(model)))


def other_names(model: torch.nn.Module) -> dict[str, str]:
    """What `state_dict()` has under further names (tied weights, a layer used twice), and the name
    under which the two above have it."""
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
    """A module called `name` and all inside it, each as often as it has names."""
    yield name, module
    inner = wrapped(module)
    for own, child in module._modules.items():
        if child is not None:
            yield from under_every_name(name if child is inner else inside(name, own), child)


def torch_names(name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The same, in the same order, by the names that torch has: wrappers are part of them."""
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
