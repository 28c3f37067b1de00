"""Ways in: a drop-in for `hvd.DistributedOptimizer`, and one for an optimizer made elsewhere."""

from __future__ import annotations

import gc
import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import horovod.torch as hvd
import torch

import tierckpt
from tierckpt.checkpointer.script_mode import attach_to_script, give_attribute
from tierckpt.settings import Arguments
from tierckpt.state.names import named_buffers, named_parameters
from tierckpt.state.training_state import label_optimizers

from .checkpointer import Checkpointer
from .outside import Outside, stands_outside


class DistributedArguments(Arguments, total=False):
    """Arguments of `hvd.DistributedOptimizer`, beside a Checkpointer's."""

    named_parameters: Any
    compression: Any
    backward_passes_per_step: int
    op: Any
    gradient_predivide_factor: float
    num_groups: int
    groups: Any
    sparse_as_dense: bool
    process_set: Any


HOROVODS = tuple(inspect.signature(hvd.DistributedOptimizer).parameters)
"""Names of Horovod's own arguments, in order."""


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    *args: Any,
    model: torch.nn.Module | None = None,
    restore: bool = False,
    close_at_exit: bool = False,
    **settings: Unpack[DistributedArguments],
) -> Any:
    """`hvd.DistributedOptimizer`, and its checkpointer in one call.

    Takes every argument of Horovod's function, by name or position, and all of
    `tierckpt.Checkpointer` (`path`, `extra`, ...) by name. Returns Horovod's optimizer, which has
    the `Checkpointer` as its attribute `checkpointer`.

    Args:
        optimizer: the optimizer to distribute.
        args: Horovod's.
        model: the module that is trained. May be left out when `named_parameters` comes straight
            from the whole module's `named_parameters()`.
        restore: bring back the newest version at once.
        close_at_exit: take a final checkpoint when the script ends without an exception.
        settings: Horovod's and ours, told apart by name.

    Raises ConfigError when the model cannot be known, besides what Horovod and Checkpointer raise.
    """
    if model is None:
        model = find_model(args, settings)
    ours: dict[str, Any] = {**settings}
    horovods = {n: ours.pop(n) for n in HOROVODS if n in ours}
    distributed = hvd.DistributedOptimizer(optimizer, *args, **horovods)
    checkpointer = install(distributed, model, **ours)
    if not isinstance(checkpointer, Outside):
        attach_to_script(checkpointer, restore, close_at_exit)
    return distributed


def install(
    optimizer: Any | Mapping[str, Any], model: torch.nn.Module, **settings: Unpack[Arguments]
) -> Checkpointer | Outside:
    """Checkpoints for what `hvd.DistributedOptimizer` returned earlier.

    Returns the Checkpointer; each optimizer has it as its attribute `checkpointer`, too. On a rank
    that is not in the optimizer's process set it is one that takes nothing (`Outside`).
    """
    optimizers = label_optimizers(optimizer)
    if hvd.is_initialized() and stands_outside(optimizers.values()):
        outside = Outside()
        for each in optimizers.values():
            each.checkpointer = outside  # type: ignore[attr-defined]
        return outside
    made = Checkpointer(model, optimizer, **settings)
    give_attribute(made)
    return made


def find_model(args: Sequence[Any], settings: Mapping[str, Any]) -> torch.nn.Module:
    """The model, where `DistributedOptimizer` is called with these behind the optimizer, and none
    is named. Raises ConfigError when it cannot be known."""
    known = dict(zip(HOROVODS[1:], args, strict=False))
    return _model_of(known.get("named_parameters", settings.get("named_parameters")))


def _model_of(named: Any) -> torch.nn.Module:
    """The module whose `named_parameters()` this generator is, not begun yet.

    Buffers belong to a checkpoint, and Horovod is told of parameters only. The generator knows
    whose they are.
    """
    if isinstance(named, types.GeneratorType) and named.gi_frame is not None:
        owner = named.gi_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            _refuse_a_part(owner)
            return owner
    raise tierckpt.ConfigError(
        "the model is needed, for its buffers: pass model=..., or named_parameters straight from "
        "model.named_parameters()"
    )


def _refuse_a_part(module: torch.nn.Module) -> None:
    """Raise ConfigError for a module that is a part of another one, which has more to keep.

    Whoever trains a new head only gives Horovod the head's parameters; the statistics of the rest
    would silently be in no checkpoint.
    """
    if not _wholes(module):
        return
    gc.collect()  # or it may have been given up, and not on every rank be gone already
    for whole in _wholes(module):
        left_out = _left_out(whole, module)
        raise tierckpt.ConfigError(
            f"named_parameters is that of a part ({type(module).__name__}) of a larger model "
            f"({type(whole).__name__}), and the checkpoint would be without the rest: "
            f"{', '.join(left_out[:3])}{', ...' if left_out[3:] else ''}. Pass the larger one, "
            "model=..., or the part if that is what is meant"
        )


def _wholes(module: torch.nn.Module) -> list[torch.nn.Module]:
    """All modules that `module` is a part of, and that have something which it does not."""
    modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]
    # Others never came to torch.nn.Module's own __init__, and cannot even be asked for parts.
    modules = [m for m in modules if "_modules" in vars(m)]
    holding = [m for m in modules if any(part is module for part in m.modules())]
    return [m for m in holding if _left_out(m, module)]


def _left_out(whole: torch.nn.Module, part: torch.nn.Module) -> list[str]:
    """Names in `whole` of parameters and buffers that `part` does not have."""
    known = {id(t) for _, t in named_parameters(part) + named_buffers(part)}
    return [n for n, t in named_parameters(whole) + named_buffers(whole) if id(t) not in known]
