"""Checks of the optimizers that a script gives, and their process set."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch

import tierckpt


def is_horovod(optimizer: Any) -> bool:
    """True for a result of `hvd.DistributedOptimizer`, which makes a class for each result."""
    return type(optimizer).__module__ == "horovod.torch.optimizer"


def is_plain(label: str, optimizer: Any) -> str:
    """Describe an optimizer that is not Horovod's, for error messages."""
    kind = type(optimizer)
    return (
        f"optimizer {label!r} is a {kind.__name__} of {kind.__module__}, not a result of "
        "hvd.DistributedOptimizer"
    )


def in_elastic_job() -> bool:
    """True if Horovod's launcher lets ranks join and leave the job."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def refuse_elastic_job() -> None:
    if in_elastic_job():
        raise tierckpt.ConfigError(
            "this is an elastic job (HOROVOD_ELASTIC=1): its ranks join and leave, but a "
            "Checkpointer serves a fixed set of ranks, and would wait for ever after the first "
            "loss. Give the model and hvd.DistributedOptimizer's optimizer to "
            "horovod_ckpt.elastic.TorchState, which makes a new Checkpointer each time; or start "
            "the job without --min-np, --max-np and --host-discovery-script"
        )


def held(optimizers: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The parameters of these optimizers, by `id()`."""
    groups = [group for each in optimizers for group in each.param_groups]
    return {id(p): p for group in groups for p in group["params"]}


def untrained(model: torch.nn.Module, optimizers: Iterable[Any]) -> list[torch.Tensor]:
    """The parameters that are frozen, or in no optimizer."""
    stepped = held(optimizers)
    every = {id(p): p for p in model.parameters()} | stepped
    return [p for i, p in every.items() if not p.requires_grad or i not in stepped]


def check_optimizer(label: str, optimizer: Any, horovods: Iterable[Any]) -> None:
    """Raise ConfigError for an unsupported optimizer. A plain one is allowed beside `horovods`."""
    if not is_horovod(optimizer):
        if horovods and held(horovods).keys().isdisjoint(held([optimizer])):
            return
        raise tierckpt.ConfigError(
            f"{is_plain(label, optimizer)}. Horovod's optimizer does not share its state with the "
            "one it was made from, so pass the one that the loop steps"
        )
    if hasattr(optimizer, "_starting_models"):
        raise tierckpt.ConfigError(
            "op=hvd.Adasum is not supported: with it each rank's optimizer uses the rank's own "
            "gradients, so momentum and similar state differ between ranks, but a checkpoint has "
            "one copy of the state, and every rank stores a part of it. Use hvd.Average or hvd.Sum"
        )


def common_process_set(optimizers: Iterable[Any]) -> Any:
    sets = [getattr(o, "process_set", hvd.global_process_set) for o in optimizers]
    if any(s is not sets[0] for s in sets):
        raise tierckpt.ConfigError(
            "the optimizers have different process sets; make a Checkpointer for each, with a path "
            "of its own"
        )
    if not sets[0].included():
        raise tierckpt.ConfigError(
            f"rank {hvd.rank()} is not in the optimizer's process set {sets[0].ranks}; make the "
            "Checkpointer on the ranks of the set, and one with another path on the other ranks; "
            "or call horovod_ckpt.install, which takes no checkpoints on other ranks"
        )
    return sets[0]


__all__ = [
    "check_optimizer",
    "common_process_set",
    "held",
    "in_elastic_job",
    "is_horovod",
    "is_plain",
    "refuse_elastic_job",
    "untrained",
]
