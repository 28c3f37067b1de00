"""Strangers: optimizers that the checkpointer was not given, and that change its parameters anyway.

A step of one would go through copies that are under way, and a fused one leaves autograd's version
counters where they are: the version would be half of one step and half of the next, and its
checksums would be right. So there is a barrier before these steps, too, and somebody is told that
their state is in no checkpoint.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tierckpt._text import some
from tierckpt.state.training_state import TrainingState, optimizer_class

from .idle_optimizers import IdleOptimizers


class UnregisteredOptimizers:
    """Holds back the steps of strangers. Used by the threads that make them: the training's."""

    def __init__(
        self,
        state: TrainingState,
        barrier: Callable[[], None],
        say: Callable[[str, int], None],
    ) -> None:
        """`barrier` returns when the state may be changed; `say` takes text and severity, of each
        class once."""
        self._state, self._barrier, self._say = state, barrier, say
        self.unstepped = IdleOptimizers(state, say)
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, bool, bool]] = (
            weakref.WeakKeyDictionary()
        )
        """Of what it was decided, whether an optimizer changes the state, and is a stranger."""
        self._told: set[str] = set()

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """A step begins of an optimizer that was not given."""
        # Both may grow: a group is added, a layer is put into the model.
        sizes = [len(group["params"]) for group in getattr(optimizer, "param_groups", ())]
        now = (sizes, self._state.looks)
        known = self._known.get(optimizer)
        if known is None or known[0] != now:
            known = self._known[optimizer] = (now, *self._judged(optimizer))
        if known[1]:
            self._barrier()
        if known[2]:
            held = (id(p) for group in optimizer.param_groups for p in group["params"])
            self.unstepped.stranger_steps(optimizer, held)

    def found(self) -> list[torch.optim.Optimizer]:
        """Those whose step was seen and changes the state."""
        return [optimizer for optimizer, (_, _, is_one) in self._known.items() if is_one]

    def _judged(self, optimizer: torch.optim.Optimizer) -> tuple[bool, bool]:
        """Whether it changes the state, and is a stranger; says that of the first of its class."""
        names = self._state.held_by(optimizer)
        if self._state.keeps_state_of(optimizer):
            return bool(names), False
        name = optimizer_class(optimizer)
        if names and name not in self._told:
            self._told.add(name)
            self._say(
                f"{name} changes {some(names)}, and the checkpointer was not "
                "given it: its state is in no checkpoint, so a resumed run begins without. Give "
                "it along, optimizer={'name': ..., 'other name': ...}. Its steps wait for copies "
                "as those of the others do",
                logging.WARNING,
            )
        return bool(names), bool(names)


__all__ = ["UnregisteredOptimizers"]
