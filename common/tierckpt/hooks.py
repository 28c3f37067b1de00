"""Hooks: what a checkpointer puts on the model and on optimizers, put up and taken down together.

Before any step of any optimizer it is asked whose that is: one that was given (`iterations`), one
that was not and changes the state (`strangers`), or none of our business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .closures import Arguments
from .iterations import Iterations
from .state import TrainingState
from .stepwatch import Stepwatch
from .strangers import Strangers

if TYPE_CHECKING:
    from .trace import Trace


class Hooks:
    """Owns them: `close` removes them. Training thread."""

    def __init__(
        self,
        model: torch.nn.Module,
        state: TrainingState,
        iterations: Iterations,
        before_stranger: Callable[[], None],
        warn: Callable[[str], None],
        trace: Trace | None,
    ) -> None:
        """`before_stranger` returns when an optimizer that was not given may change the state;
        `warn` hears of each class of them once."""
        self._iterations = iterations
        self._strangers = Strangers(state, before_stranger, warn)
        with contextlib.ExitStack() as undo:
            undo.callback(iterations.unwatch)
            iterations.watch(model, state.optimizers)
            undo.callback(Stepwatch(self._before_any_step).close)
            if trace is not None:  # behind the stepwatch: what is waited for there is no update
                for hook in trace.watch(state.optimizers):
                    undo.callback(hook.remove)
            self._undo = undo.pop_all()

    @property
    def strangers(self) -> list[torch.optim.Optimizer]:
        """Optimizers that were not given and step parameters of the model."""
        return self._strangers.found()

    def close(self) -> None:
        """Be called no more; may be called again."""
        self._undo.close()

    def _before_any_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if self._iterations.watches(optimizer):
            return self._iterations.begins(optimizer, args, kwargs)
        self._strangers.begins(optimizer)
        return None


__all__ = ["Hooks"]
