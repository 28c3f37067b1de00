"""Checks for state that cannot be checkpointed; each raises UnsupportedStateError with advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from tierckpt.errors import UnsupportedStateError
from tierckpt.state.optimizers.nested import METHODS, class_name, inside, is_hollow

ORDER = (
    "Check the order of the arguments: Checkpointer(model, optimizer), but wrap(optimizer, model) "
    "and install(optimizer, model)."
)


def refuse_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer with other state on each rank, or with steps that cannot be delayed."""
    each = (optimizer, *(inner for _, inner in inside(optimizer)))
    kinds = {kind.__name__ for one in each for kind in type(one).__mro__}
    if "PostLocalSGDOptimizer" in kinds:
        raise UnsupportedStateError(
            "PostLocalSGDOptimizer lets ranks diverge between its averages: weights and "
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
    if all(map(is_hollow, each)):
        _refuse_hollow(optimizer)


def _refuse_hollow(optimizer: Any) -> None:
    """Refuse an optimizer without torch's step hooks, and with no optimizer inside."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedStateError(
            f"{name} is not a torch.optim.Optimizer, and none is in its attributes; its step can "
            "not be delayed until all copies are complete. Give the checkpointer the "
            "torch.optim.Optimizer that it steps"
        )
    raise UnsupportedStateError(
        f"{name} was made without torch.optim.Optimizer's __init__, so its "
        "step cannot be delayed until all copies are complete. Let its __init__ call "
        "super().__init__(params, defaults), or give the checkpointer the optimizer that makes "
        "the steps."
    )


def stands_for_some(optimizer: Any) -> bool:
    """True for an object that is no torch.optim.Optimizer, and steps those in its attributes."""
    if isinstance(optimizer, (torch.nn.Module, Mapping, list, tuple)):
        return False
    return bool(inside(optimizer)) and all(callable(getattr(optimizer, n, None)) for n in METHODS)


def refuse_odd_keys(optimizer: torch.optim.Optimizer) -> None:
    """Refuse state of a parameter that is not a dict of names and values."""
    kept: dict[Any, Any] = optimizer.state
    for owner, values in kept.items():
        if isinstance(owner, torch.Tensor) and not isinstance(values, dict):
            raise UnsupportedStateError(
                f"{class_name(optimizer)} keeps a {type(values).__name__} as the state of a "
                "parameter; let it keep a dict there, {'name': value}"
            )


def unstorable(
    optimizer: torch.optim.Optimizer, where: str, error: UnsupportedStateError
) -> UnsupportedStateError:
    """An error about a value of an optimizer that cannot be stored, with advice."""
    why = str(error).split(". ")[0].split(" is ", 1)[-1]
    return UnsupportedStateError(
        f"{class_name(optimizer)}.{where} is {why}. Two hooks of the optimizer make it storable: "
        "register_state_dict_post_hook, which puts numbers, strings, tensors or containers of them "
        "in its place in a copy of the state_dict, and register_load_state_dict_pre_hook, which "
        "makes it again from these (docs/models.md shows both)"
    )


def refuse_same_names(names: Collection[str]) -> None:
    """Refuse two tensors with one name: only one of them would be restored."""
    if len({*names}) == len(names):
        return
    name, times = max(Counter(names).items(), key=lambda item: item[1], default=("", 1))
    if times > 1:
        raise UnsupportedStateError(
            f"{times} tensors of the state have the name {name}; give the modules or optimizers "
            "that hold them other names, or other keys"
        )


def refuse_model(model: torch.nn.Module) -> None:
    """Raise UnsupportedStateError, with the module's name, for a sharded model, or for an object
    that is no model."""
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedStateError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module. {ORDER}"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedStateError(
                f"module {name or '(root)'!r} is a ScriptModule: its tensors are not visible to "
                "Python. Give the original module, which has the same parameters, train with the "
                "result of torch.jit.script(), and call step(). Change buffers only in place: a "
                "buffer that a script replaces is not the original module's."
            )
        kinds = {c.__name__ for c in type(module).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise UnsupportedStateError(
                f"module {name or '(root)'!r} is sharded by FSDP; this package is for replicated "
                "models (DDP, Horovod). Use torch.distributed.checkpoint for it."
            )


def refuse_several_gpus(named: Sequence[tuple[str, torch.device]]) -> None:
    """Raise UnsupportedStateError when tensors of the state, by name, are on two GPUs.

    The streams of one device order the copies of a snapshot after the training's work.
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
    "stands_for_some",
    "unstorable",
]
