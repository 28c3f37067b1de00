"""Entry points: a drop-in for `hvd.DistributedOptimizer`, and `install` for its results."""

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
from tierckpt.settings import Arguments, with_settings
from tierckpt.state.names import named_buffers, named_parameters
from tierckpt.state.training_state import label_optimizers

from .checkpointer import Checkpointer
from .outside import Outside, stands_outside


class DistributedArguments(Arguments, total=False):
    """The arguments of `hvd.DistributedOptimizer` and of a Checkpointer."""

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


@with_settings
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    *args: Any,
    model: torch.nn.Module | None = None,
    restore: bool = False,
    close_at_exit: bool = False,
    **settings: Unpack[DistributedArguments],
) -> Any:
    """Make a `hvd.DistributedOptimizer` and its checkpointer in one call.

    Takes every argument of Horovod's function, by name or position, and all of
    `tierckpt.Checkpointer` (`path`, `extra`, ...) by name. Returns Horovod's optimizer, which has
    the `Checkpointer` as its attribute `checkpointer`.

    Args:
        optimizer: the optimizer to distribute.
        args: Horovod's positional arguments.
        model: the module that is trained. May be left out if `named_parameters` comes directly
            from the whole module's `named_parameters()`.
        restore: restore the newest version at once.
        close_at_exit: take a final checkpoint when the script ends without an exception.
        settings: keyword arguments of Horovod and of a Checkpointer.

    Raises ConfigError if the model is not known, and the errors of Horovod and of Checkpointer.
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


@with_settings
def install(
    optimizer: Any | Mapping[str, Any], model: torch.nn.Module, **settings: Unpack[Arguments]
) -> Checkpointer | Outside:
    """Add checkpoints to optimizers that `hvd.DistributedOptimizer` has returned.

    Returns the Checkpointer, which is also the attribute `checkpointer` of each optimizer. On a
    rank outside the optimizer's process set it is an `Outside`, which takes no checkpoints.
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
    """Find the model in the arguments after the optimizer of a `DistributedOptimizer` call without
    `model`. Raises ConfigError if it is not known."""
    known = dict(zip(HOROVODS[1:], args, strict=False))
    return _model_of(known.get("named_parameters", settings.get("named_parameters")))


def _model_of(named: Any) -> torch.nn.Module:
    """The module whose method `named_parameters()` returned this unused generator.

    A checkpoint needs the module's buffers, but Horovod receives only parameters. The generator has
    a reference to the module. Raises ConfigError for anything else, and for a part of a model.
    """
    if isinstance(named, types.GeneratorType) and named.gi_frame is not None:
        owner = named.gi_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            _refuse_a_part(owner)
            return owner
    raise tierckpt.ConfigError(
        "the model is needed, for its buffers: pass model=..., or named_parameters directly from "
        "model.named_parameters()"
    )


def _refuse_a_part(module: torch.nn.Module) -> None:
    """Raise ConfigError for a part of a larger module that has more state.

    A script that trains only a new head gives Horovod only the head's parameters; without this
    check no checkpoint would contain the statistics of the rest.
    """
    if not _wholes(module):
        return
    gc.collect()  # a larger module may be unused, and not be freed on every rank yet
    for whole in _wholes(module):
        left_out = _left_out(whole, module)
        raise tierckpt.ConfigError(
            f"named_parameters is that of a part ({type(module).__name__}) of a larger model "
            f"({type(whole).__name__}), and the checkpoint would be without the rest: "
            f"{', '.join(left_out[:3])}{', ...' if left_out[3:] else ''}. Pass the larger model "
            "as model=..., or the part if the checkpoint is to have only that"
        )


def _wholes(module: torch.nn.Module) -> list[torch.nn.Module]:
    """All modules that contain `module`, and that have parameters or buffers beyond it."""
    modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]
    # Others have not run torch.nn.Module's __init__, and have no list of parts.
    modules = [m for m in modules if "_modules" in vars(m)]
    holding = [m for m in modules if any(part is module for part in m.modules())]
    return [m for m in holding if _left_out(m, module)]


def _left_out(whole: torch.nn.Module, part: torch.nn.Module) -> list[str]:
    """Names of parameters and buffers that `whole` has and `part` does not have."""
    known = {id(t) for _, t in named_parameters(part) + named_buffers(part)}
    return [n for n, t in named_parameters(whole) + named_buffers(whole) if id(t) not in known]
