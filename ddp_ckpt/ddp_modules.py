"""The DDP modules of a model, wherever they are in it, and what they have in common."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tierckpt.state.names import named_modules


def find_ddps(model: torch.nn.Module) -> dict[str, DistributedDataParallel]:
    """By name, which is that of what each wraps: empty for one that is the model itself."""
    ddps = {n: m for n, m in named_modules(model) if isinstance(m, DistributedDataParallel)}
    inside = {id(m) for ddp in ddps.values() for m in ddp.module.modules()}
    return {name: ddp for name, ddp in ddps.items() if id(ddp) not in inside}


def common_group(ddps: Mapping[str, DistributedDataParallel]) -> dist.ProcessGroup | None:
    """A process group of the ranks that all of them have; None if there is none of them.

    Raises ConfigError if they have different ones.
    """
    names = list(ddps)
    groups = [ddp.process_group for ddp in ddps.values()]
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    for name, theirs in zip(names, ranks, strict=True):
        if theirs != ranks[0]:
            raise tierckpt.ConfigError(
                f"the DDP modules {names[0]!r} and {name!r} have process groups of different "
                f"ranks, {ranks[0]} and {theirs}, and a checkpoint is of one job's; make a "
                "Checkpointer for each, with a path of its own"
            )
    return groups[0] if groups else None


def reduced_by(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that it makes alike on all ranks, and keeps so: by reducing gradients, or as
    they have none."""
    ignored = ddp.parameters_to_ignore
    return [param for name, param in ddp.module.named_parameters() if name not in ignored]


__all__ = ["common_group", "find_ddps", "reduced_by"]
