"""What cannot be checkpointed, and what to do instead: each raises UnsupportedStateError."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .errors import UnsupportedStateError

ORDER = (
    "Mind the order: Checkpointer(model, optimizer), and wrap(optimizer, model), "
    "install(optimizer, model)."
)


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """For one that has not the same state on all ranks, or cannot be held back."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedStateError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer; its step could not be "
            "held back until the copies are complete."
        )
    kinds = {c.__name__ for c in type(optimizer).__mro__}
    if "PostLocalSGDOptimizer" in kinds:
        raise UnsupportedStateError(
            "PostLocalSGDOptimizer lets ranks train apart between its averagings: weights and "
            "momentum differ from rank to rank, and this package is for replicated state. Train "
            "with the optimizer inside it (its attribute 'optim') and DDP's own allreduce, or save "
            "each rank's state by itself."
        )
    if "ZeroRedundancyOptimizer" in kinds:
        raise UnsupportedStateError(
            "ZeroRedundancyOptimizer keeps a different part of its state on every rank, and this "
            "package is for replicated state. Use the inner optimizer class directly, or "
            "torch.distributed.checkpoint."
        )
    _refuse_hollow(optimizer)


def _refuse_hollow(optimizer: torch.optim.Optimizer) -> None:
    """A wrapper that never came to torch.optim.Optimizer's own __init__ can have no hooks."""
    try:
        optimizer.register_step_post_hook(_do_nothing).remove()
    except AttributeError:
        held = vars(optimizer).items()
        inside = [name for name, value in held if isinstance(value, torch.optim.Optimizer)]
        where = (
            f"the optimizer inside it (its attribute {inside[0]!r})" if inside else "another one"
        )
        raise UnsupportedStateError(
            f"{type(optimizer).__name__} was made without torch.optim.Optimizer's __init__, so its "
            "step could not be held back until the copies are complete. Give the checkpointer "
            f"{where}, if that makes the steps."
        ) from None


def _do_nothing(*_: Any) -> None:
    """A hook."""


def refuse_odd_keys(optimizer: torch.optim.Optimizer) -> None:
    """State of a parameter that has no name under which it could come back."""
    name = type(optimizer).__name__
    kept: dict[Any, Any] = optimizer.state
    for owner, values in kept.items():
        if not isinstance(owner, torch.Tensor):
            continue  # see `remainder`
        for key in values:
            if not isinstance(key, str) or "/" in key:
                raise UnsupportedStateError(
                    f"{name} keeps state under the key {key!r}; only text without '/' can be "
                    "stored. Pass an object with state_dict() that wraps it as extra={...}."
                )


def refuse_same_names(names: Iterable[str]) -> None:
    """Two tensors of one name: only one of them would come back."""
    name, times = max(Counter(names).items(), key=lambda item: item[1], default=("", 1))
    if times > 1:
        raise UnsupportedStateError(
            f"{times} tensors of the state are called {name}; give those that keep them other "
            "names, or keys, or a state_dict() and load_state_dict() and pass that as extra={...}."
        )


def refuse_model(model: torch.nn.Module) -> None:
    """Raise UnsupportedStateError for what is none, and for sharded models; the text names the
    module."""
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedStateError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module. {ORDER}"
        )
    for name, module in model.named_modules():
        kinds = {c.__name__ for c in type(module).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise UnsupportedStateError(
                f"module {name or '(root)'!r} is sharded by FSDP; this package is for replicated "
                "models (DDP, Horovod). Use torch.distributed.checkpoint for it."
            )


def refuse_several_gpus(named: Sequence[tuple[str, torch.device]]) -> None:
    """Raise UnsupportedStateError when tensors of the state, by name, are on two GPUs.

    Copies of a snapshot are ordered behind the training's work by the streams of one device.
    """
    first = next(((name, device) for name, device in named if device.type == "cuda"), None)
    for name, device in named:
        if first is not None and device.type == "cuda" and device != first[1]:
            raise UnsupportedStateError(
                f"{first[0]} is on {first[1]}, {name} on {device}; this package is for one GPU a "
                "process. Start one process per GPU (torchrun --nproc-per-node), each with the "
                "whole model on its own; for a model that one GPU cannot hold use "
                "torch.distributed.checkpoint."
            )


__all__ = [
    "ORDER",
    "refuse_model",
    "refuse_odd_keys",
    "refuse_optimizer",
    "refuse_same_names",
    "refuse_several_gpus",
]
