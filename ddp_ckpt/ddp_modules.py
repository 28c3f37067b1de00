"""The DDP modules of a model, at any depth, and their common process group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tierckpt.state.names import named_modules


def find_ddps(model: torch.nn.Module) -> dict[str, DistributedDataParallel]:
    """Return the outermost DDP modules by name; the name is empty if it is the model itself."""
    ddps = {n: m for n, m in named_modules(model) if isinstance(m, DistributedDataParallel)}
    inside = {id(m) for ddp in ddps.values() for m in ddp.module.modules()}
    return {name: ddp for name, ddp in ddps.items() if id(ddp) not in inside}


def common_group(ddps: Mapping[str, DistributedDataParallel]) -> dist.ProcessGroup | None:
    """The process group of the modules; None if there are no modules.

    Raises ConfigError if their groups have different ranks.
    """
    names = list(ddps)
    groups = [ddp.process_group for ddp in ddps.values()]
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    for name, theirs in zip(names, ranks, strict=True):
        if theirs != ranks[0]:
            raise tierckpt.ConfigError(
                f"the DDP modules {names[0]!r} and {name!r} have process groups of different "
                f"ranks, {ranks[0]} and {theirs}, but a checkpoint has one group of ranks; make a "
                "Checkpointer for each, with a path of its own"
            )
    return groups[0] if groups else None


def reduced_by(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that this module makes and keeps equal on all ranks: their gradients are
    reduced, or they have none."""
    ignored = ddp.parameters_to_ignore
    return [param for name, param in ddp.module.named_parameters() if name not in ignored]


__all__ = ["common_group", "find_ddps", "reduced_by"]
