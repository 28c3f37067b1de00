"""Ways in: a drop-in for `hvd.DistributedOptimizer`, and one for an optimizer made elsewhere."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import torch

import tierckpt
from tierckpt.scripts import serve

from .checkpointer import Checkpointer

HOROVODS = tuple(inspect.signature(hvd.DistributedOptimizer).parameters)
"""Names of Horovod's own arguments, in order."""


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    *args: Any,
    model: torch.nn.Module | None = None,
    restore: bool = False,
    close_at_exit: bool = False,
    **settings: Any,
) -> Any:
    """`hvd.DistributedOptimizer`, and its checkpointer in one call.

    Takes every argument of Horovod's function, by name or position, and all of
    `tierckpt.Checkpointer` (`path`, `extra`, ...) by name. Returns Horovod's optimizer, which has
    the `Checkpointer` as its attribute `checkpointer`.

    Args:
        optimizer: the optimizer to distribute.
        args: Horovod's.
        model: the module that is trained. May be left out when `named_parameters` comes straight
            from the module's `named_parameters()`.
        restore: bring back the newest version at once.
        close_at_exit: take a final checkpoint when the script ends without an exception.
        settings: Horovod's and ours, told apart by name.

    Raises ConfigError when the model cannot be known, besides what Horovod and Checkpointer raise.
    """
    known = dict(zip(HOROVODS[1:], args, strict=False))
    model = model or _model_of(known.get("named_parameters", settings.get("named_parameters")))
    horovods = {n: settings.pop(n) for n in HOROVODS if n in settings}
    distributed = hvd.DistributedOptimizer(optimizer, *args, **horovods)
    checkpointer = install(distributed, model, **settings)
    serve(checkpointer, restore, close_at_exit)
    return distributed


def install(
    optimizer: Any | Mapping[str, Any], model: torch.nn.Module, **settings: Any
) -> Checkpointer:
    """Checkpoints for what `hvd.DistributedOptimizer` returned earlier.

    Returns the Checkpointer; each optimizer has it as its attribute `checkpointer`, too.
    """
    checkpointer = Checkpointer(model, optimizer, **settings)
    for each in checkpointer.state.optimizers.values():
        each.checkpointer = checkpointer  # type: ignore[attr-defined]
    return checkpointer


def _model_of(named_parameters: Any) -> torch.nn.Module:
    """The module whose `named_parameters()` this generator is, not begun yet.

    Buffers belong to a checkpoint, and Horovod is told of parameters only. The generator knows
    whose they are.
    """
    if isinstance(named_parameters, types.GeneratorType) and named_parameters.gi_frame is not None:
        owner = named_parameters.gi_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            return owner
    raise tierckpt.ConfigError(
        "the model is needed, for its buffers: pass model=..., or named_parameters straight from "
        "model.named_parameters()"
    )
