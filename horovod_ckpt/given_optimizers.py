"""What a script gave: its optimizers, and the ranks that they are of; what cannot be is refused."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch

import tierckpt


def is_horovod(optimizer: Any) -> bool:
    """True for what `hvd.DistributedOptimizer` returns: an instance of a class made on the spot."""
    return type(optimizer).__module__ == "horovod.torch.optimizer"


def is_plain(label: str, optimizer: Any) -> str:
    """In words, of one that is not Horovod's."""
    kind = type(optimizer)
    return (
        f"optimizer {label!r} is a {kind.__name__} of {kind.__module__}, not what "
        "hvd.DistributedOptimizer returned"
    )


def in_elastic_job() -> bool:
    """Whether Horovod's launcher lets ranks come and go."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def refuse_elastic_job() -> None:
    if in_elastic_job():
        raise tierckpt.ConfigError(
            "this is an elastic job (HOROVOD_ELASTIC=1), whose ranks come and go, and a "
            "Checkpointer is for those that there are when it is made: after the first loss it "
            "would wait for ever. Give the model and hvd.DistributedOptimizer's optimizer to "
            "horovod_ckpt.elastic.TorchState, which makes a new one each time; or start the job "
            "without --min-np, --max-np and --host-discovery-script"
        )


def held(optimizers: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The parameters that these step, by `id()`."""
    groups = [group for each in optimizers for group in each.param_groups]
    return {id(p): p for group in groups for p in group["params"]}


def untrained(model: torch.nn.Module, optimizers: Iterable[Any]) -> list[torch.Tensor]:
    """Parameters that are frozen, or in none of the optimizers."""
    stepped = held(optimizers)
    every = {id(p): p for p in model.parameters()} | stepped
    return [p for i, p in every.items() if not p.requires_grad or i not in stepped]


def check_optimizer(label: str, optimizer: Any, horovods: Iterable[Any]) -> None:
    """Raise ConfigError for what cannot be given. A plain one may be beside `horovods`."""
    if not is_horovod(optimizer):
        if horovods and held(horovods).keys().isdisjoint(held([optimizer])):
            return
        raise tierckpt.ConfigError(
            f"{is_plain(label, optimizer)}. Horovod's does not share its state with the one "
            "it was made from, so pass the one whose step() is called"
        )
    if hasattr(optimizer, "_starting_models"):
        raise tierckpt.ConfigError(
            "op=hvd.Adasum is not supported: each rank's optimizer then steps on the rank's own "
            "gradients, so momentum and the like differ from rank to rank, and a checkpoint has "
            "one copy of them, of which every rank stores a part. Use hvd.Average or hvd.Sum"
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
            "Checkpointer on the ranks that are, and one with another path for the others; or call "
            "horovod_ckpt.install, which takes nothing on those"
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
