"""Bit-for-bit images of a training state, made without the package under test.

Two states are the same when their images are equal: every byte, type, shape and memory order of
every tensor, every option, and every random stream.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch


def image(value: Any) -> Any:
    """Replace every tensor and array in `value` by its exact description."""
    if isinstance(value, torch.Tensor):
        if not hasattr(value, "__tensor_flatten__"):
            return tensor_image(value)
        names, context = value.__tensor_flatten__()
        return (type(value).__name__, context, [image(getattr(value, name)) for name in names])
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, Mapping):
        return (type(value).__name__, [(image(k), image(v)) for k, v in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (type(value).__name__, [image(v) for v in value])
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, value)


def tensor_image(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Type, shape, memory order and bytes; strides of dimensions of size one do not matter."""
    tensor = tensor.detach()
    strides = tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    flat = tensor.reshape(-1).contiguous()
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return ("tensor", str(tensor.dtype), tuple(tensor.shape), strides if raw else (), raw)


def streams() -> dict[str, Any]:
    """State of the process-wide generators."""
    return {
        "python": random.getstate(),
        "numpy": image(np.random.get_state()),
        "torch": tensor_image(torch.get_rng_state()),
    }


def parameters(model: torch.nn.Module) -> dict[str, Any]:
    """Every parameter."""
    return {f"param {n}": tensor_image(p) for n, p in model.named_parameters()}


def gradients(model: torch.nn.Module) -> dict[str, Any]:
    """Every existing gradient."""
    return {
        f"grad {n}": tensor_image(p.grad.to_dense() if p.grad.is_sparse else p.grad)
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def buffers(model: torch.nn.Module) -> dict[str, Any]:
    """Every buffer that `state_dict()` has."""
    kept = {id(v) for v in model.state_dict(keep_vars=True).values()}
    return {f"buffer {n}": tensor_image(b) for n, b in model.named_buffers() if id(b) in kept}


def optimizer(opt: torch.optim.Optimizer, label: str = "optimizer") -> dict[str, Any]:
    """State by parameter and key, sorted, and the options of every group."""
    found: dict[str, Any] = {}
    for g, group in enumerate(opt.param_groups):
        for i, param in enumerate(group["params"]):
            for key, value in sorted(opt.state.get(param, {}).items()):
                found[f"{label} group {g} param {i} {key}"] = image(value)
        options = {k: v for k, v in group.items() if k != "params"}
        found[f"{label} group {g} options"] = {k: image(v) for k, v in options.items()}
    return found


def replicated(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """State equal on all ranks: parameters and optimizers."""
    found = parameters(model)
    for index, opt in enumerate(optimizers):
        found.update(optimizer(opt, f"optimizer {index}"))
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names under which two images differ, for a readable failure."""
    return sorted(
        n for n in one.keys() | other.keys() if n not in one or n not in other or one[n] != other[n]
    )


def digest_of_tensors(tensors: Iterable[torch.Tensor | None]) -> str:
    """Of their bytes alone; None is left out."""
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            flat = tensor.detach().reshape(-1).contiguous()
            found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def digest(value: Any) -> str:
    """A short name for an image: equal if and only if the images are."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
