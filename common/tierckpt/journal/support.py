"""Support: the state whose steps a journal can repeat; all other is refused by name.

A step is repeated with the same gradients, options, state and parameters. So it must be a function
of these alone: no random numbers, no closure that is called several times, no clock.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tierckpt._text import some
from tierckpt.config import Config
from tierckpt.errors import ConfigError, UnsupportedStateError
from tierckpt.format.layout import REPLICATED
from tierckpt.state.training_state import TrainingState, optimizer_class

REPEATABLE = frozenset(
    (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam"),
        *("RAdam", "RMSprop", "Rprop", "SGD"),
    )
)
"""Optimizers of torch whose steps are such functions; a test repeats a step of each."""
SETTING = "local_journal_steps"
StepClass = Callable[[torch.optim.Optimizer], type[torch.optim.Optimizer]]
"""Returns the class whose `step` changes an optimizer's parameters (see `Adapter`)."""


def check_support(
    config: Config, state: TrainingState, repeats_steps: bool, step_class: StepClass
) -> None:
    """Raise ConfigError or UnsupportedStateError, on all ranks alike, if the journal cannot repeat
    this training. `repeats_steps` and `step_class`: see `Adapter`."""
    if not config.local.journal_steps:
        return
    if not repeats_steps:
        raise ConfigError(
            f"{SETTING} is {config.local.journal_steps}, and elastic jobs have no journal. Leave "
            "the setting out; memory_every_steps=1, the default, takes a version at every step"
        )
    for label, optimizer in state.optimizers.items():
        if state.given.get(label) is optimizer and _is_known(step_class(optimizer)):
            _refuse_unsteady(state, optimizer)
            continue
        kind = f"{type(optimizer).__module__}.{optimizer_class(optimizer)}"
        raise UnsupportedStateError(
            f"{SETTING}: optimizer {label!r} is a {kind}, and it is not known that its step can be "
            f"repeated bit for bit. Those of torch.optim whose step can: "
            f"{', '.join(sorted(REPEATABLE))}. Use one of these, or leave the setting out"
        )
    walk = state.walk()
    devices = [str(param.device) for param in walk.params if not param.is_cpu]
    if devices:
        raise UnsupportedStateError(
            f"{SETTING}: the model is on {devices[0]}, and the journal is for models on the CPU so "
            "far. Leave the setting out"
        )
    apart = [p for p in walk.params if walk.placement(p) is not REPLICATED]
    if apart:
        raise UnsupportedStateError(
            f"{SETTING}: each rank has its own {some([state.name_of(p) for p in apart])}, whose "
            "values do not follow from the gradients of all ranks. Leave the setting out"
        )


def _refuse_unsteady(state: TrainingState, optimizer: torch.optim.Optimizer) -> None:
    """Refuse parameters whose steps are no function of the state (seen in torch 2.13)."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    momentous = [g for g in optimizer.param_groups if g["fused"] and g["momentum"]]
    params = [param for group in momentous for param in group["params"]]
    if reduced := [p for p in params if p.dtype in (torch.bfloat16, torch.float16)]:
        raise UnsupportedStateError(
            f"{SETTING}: the fused SGD of torch gives the momentum of "
            f"{some([state.name_of(p) for p in reduced])} ({reduced[0].dtype}) other bits each "
            "time, as it reads memory that was never set. Make the optimizer with fused=False, or "
            "leave the setting out"
        )


def _is_known(kind: type[torch.optim.Optimizer]) -> bool:
    return kind.__name__ in REPEATABLE and getattr(torch.optim, kind.__name__, None) is kind


__all__ = ["REPEATABLE", "SETTING", "check_support"]
