"""Hooks of one checkpointer on its model and on optimizers, installed and removed together.

Before any step of any optimizer of the process, one of three cases is found: a given optimizer
(`iterations`), another one that changes the state (`unregistered_optimizers`), or an unrelated one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tierckpt.state.counters import Counters
from tierckpt.state.optimizers.nested import inside
from tierckpt.state.training_state import TrainingState

from .closures import Arguments
from .custom_methods import CustomMethods
from .iterations import Iterations
from .step_hook import GlobalStepHook
from .unregistered_optimizers import UnregisteredOptimizers
from .unsaved_objects import Unsaved

if TYPE_CHECKING:
    from tierckpt.tracing.recorder import Trace


class Hooks:
    """Owns the hooks: `close` removes them. Training thread."""

    def __init__(
        self,
        model: torch.nn.Module,
        state: TrainingState,
        iterations: Iterations,
        before_unregistered: Callable[[], None],
        before_change: Callable[[], None],
        say: Callable[[str, int], None],
        trace: Trace | None,
        line: str,
    ) -> None:
        """`before_unregistered` returns when an optimizer that was not given may change the state,
        and `before_change`, a method, when other code than a step may. `say` takes text and
        severity, each text once. `line`: as in `unsaved_objects`."""
        self._iterations = iterations
        self._unregistered = UnregisteredOptimizers(state, before_unregistered, say)
        self._counters = Counters(state, say)
        self.unsaved = Unsaved(state, self._unregistered.found, line, say)
        given, steppers = state.given.values(), state.steppers
        with contextlib.ExitStack() as undo:
            undo.callback(self.unsaved.close)
            undo.callback(iterations.unwatch)
            iterations.watch(model, steppers)
            within = [inner for each in given for _, inner in inside(each)]
            undo.callback(CustomMethods([*given, *within], state.hollow, before_change).close)
            undo.callback(GlobalStepHook(self._before_any_step).close)
            if trace is not None:  # after the step hook: waiting there is not part of an update
                for hook in trace.watch({n: each[0] for n, each in steppers.items() if each}):
                    undo.callback(hook.remove)
            self._undo = undo.pop_all()

    @property
    def unregistered(self) -> list[torch.optim.Optimizer]:
        """Optimizers that were not given and step parameters of the model."""
        return self._unregistered.found()

    def called(self) -> None:
        """The loop called the checkpointer's `step()`: the iteration is over."""
        stepped = self._iterations.stepped
        self._unregistered.idle.boundary(stepped)
        if stepped and not self._counters.done:
            self._counters.boundary()

    def close(self) -> None:
        """Remove the hooks. May be called again."""
        self._undo.close()

    def _before_any_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        self.unsaved.step_begins()
        if self._iterations.watches(optimizer):
            return self._iterations.begins(optimizer, args, kwargs)
        self._unregistered.begins(optimizer)
        return None


__all__ = ["Hooks"]
