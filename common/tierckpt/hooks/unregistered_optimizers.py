"""Unregistered optimizers: they change the model's parameters, and the checkpointer was not given
them.

Such a step would change parameters during a copy, and a fused one does not change autograd's
version counters: the version would mix two steps, and its checksums would be right. So there is a
barrier before these steps, too, and a warning that their state is in no checkpoint.
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
    """Makes the steps of unregistered optimizers wait. Used on the threads that make the steps: the
    training's."""

    def __init__(
        self,
        state: TrainingState,
        barrier: Callable[[], None],
        say: Callable[[str, int], None],
    ) -> None:
        """`barrier` returns when the state may change. `say` takes text and severity; it is called
        once per class."""
        self._state, self._barrier, self._say = state, barrier, say
        self.idle = IdleOptimizers(state, say)
        self._cache: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, bool, bool]] = (
            weakref.WeakKeyDictionary()
        )
        """Cached decisions: whether an optimizer changes the state, and whether it is
        unregistered."""
        self._reported: set[str] = set()

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of an optimizer that was not given starts."""
        # Both may grow: a group is added, a layer is added to the model.
        sizes = [len(group["params"]) for group in getattr(optimizer, "param_groups", ())]
        now = (sizes, self._state.looks)
        cached = self._cache.get(optimizer)
        if cached is None or cached[0] != now:
            cached = self._cache[optimizer] = (now, *self._judged(optimizer))
        if cached[1]:
            self._barrier()
        if cached[2]:
            held = (id(p) for group in optimizer.param_groups for p in group["params"])
            self.idle.unregistered_step(optimizer, held)

    def found(self) -> list[torch.optim.Optimizer]:
        """Unregistered optimizers that were seen to step and to change the state."""
        return [optimizer for optimizer, (_, _, is_one) in self._cache.items() if is_one]

    def _judged(self, optimizer: torch.optim.Optimizer) -> tuple[bool, bool]:
        """Whether it changes the state, and whether it is unregistered; warns about the first of a
        class."""
        names = self._state.held_by(optimizer)
        if self._state.keeps_state_of(optimizer):
            return bool(names), False
        name = optimizer_class(optimizer)
        if names and name not in self._reported:
            self._reported.add(name)
            self._say(
                f"{name} changes {some(names)}, and the checkpointer was not given it: its state "
                "is in no checkpoint, so a resumed run starts without it. Give it, too: "
                f"optimizer={{'name': ..., 'other name': ...}}. Its steps wait for copies like "
                "those of given optimizers",
                logging.WARNING,
            )
        return bool(names), bool(names)


__all__ = ["UnregisteredOptimizers"]
