"""Strangers: optimizers that the checkpointer was not given, and that change its parameters anyway.

A step of one would go through copies that are under way, and a fused one leaves autograd's version
counters where they are: the version would be half of one step and half of the next, and its
checksums would be right. So there is a barrier before these steps, too, and somebody is told that
their state is in no checkpoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .state import TrainingState, optimizer_class
from .wording import some


class Strangers:
    """Holds back the steps of strangers. Used by the threads that make them: the training's."""

    def __init__(
        self, state: TrainingState, barrier: Callable[[], None], warn: Callable[[str], None]
    ) -> None:
        """`barrier` returns when the state may be changed; `warn` hears of each class once."""
        self._state, self._barrier, self._warn = state, barrier, warn
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, bool]] = (
            weakref.WeakKeyDictionary()
        )
        """Whether an optimizer is one, and of what that was decided."""
        self._told: set[str] = set()

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """A step begins of an optimizer that was not given."""
        # Both may grow: a group is added, a layer is put into the model.
        sizes = [len(group["params"]) for group in getattr(optimizer, "param_groups", ())]
        now = (sizes, self._state.looks)
        known = self._known.get(optimizer)
        if known is None or known[0] != now:
            known = self._known[optimizer] = (now, self._is_one(optimizer))
        if known[1]:
            self._barrier()

    def found(self) -> list[torch.optim.Optimizer]:
        """Those whose step was seen and changes the state."""
        return [optimizer for optimizer, (_, is_one) in self._known.items() if is_one]

    def _is_one(self, optimizer: torch.optim.Optimizer) -> bool:
        """Decides, and says it when it is the first of its class."""
        if self._state.keeps_state_of(optimizer):
            return False
        names = self._state.held_by(optimizer)
        name = optimizer_class(optimizer)
        if names and name not in self._told:
            self._told.add(name)
            self._warn(
                f"{name} changes {some(names)}, and the checkpointer was not "
                "given it: its state is in no checkpoint, so a resumed run begins without. Give "
                "it along, optimizer={'name': ..., 'other name': ...}. Its steps wait for copies "
                "as those of the others do"
            )
        return bool(names)


__all__ = ["Strangers"]
