"""Iterations: where one ends and the next begins, from hooks on the optimizers and the model.

A loop that calls `step()` says so itself. For one that never does, the boundary is the first
forward pass after an optimizer step; with optimizers that take a closure it is the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

AUTOMATIC_AFTER_STEPS = 16
"""So many steps of an optimizer without a call of `step()` mean that there will be none. (A loop
may well make several optimizer steps in one iteration.)"""

STEPLESS_CALLS = 1000
"""So many calls of `step()` in a row without a step of an optimizer: the loop steps another one.
Nobody accumulates gradients for that long."""


class Iterations:
    """Counts the optimizers' steps since the last boundary. Training thread."""

    def __init__(
        self,
        mode: str,
        *,
        boundary: Callable[[], None],
        before_step: Callable[[str], None],
        made_step: Callable[[str], bool],
        left_to_us: Callable[[], None],
    ) -> None:
        """Who is told what, on the training thread.

        Args:
            mode: `Config.boundary`.
            boundary: an iteration of a loop that does not call `step()` is over.
            before_step: the optimizer of this label is about to change something.
            made_step: its step ended; returns False when that was none of the training's.
            left_to_us: a step was made in such a loop, and the next batch is drawn before the
                boundary.
        """
        self.explicit = False
        """`step()` was called at least once."""
        self.stepping: set[str] = set()
        """Optimizers whose step has begun."""
        self._mode = mode
        self._boundary, self._before_step = boundary, before_step
        self._made_step, self._left_to_us = made_step, left_to_us
        self._since: dict[str, int] = {}
        """Steps of each optimizer since the last boundary."""
        self._seen: dict[str, int] = {}
        """And since the beginning."""
        self._stepless = 0
        """Calls of `step()` since an optimizer made one."""
        self._told = False
        self._hooks: list[Any] = []

    def watch(
        self, model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> None:
        """Register the hooks."""
        for label, optimizer in optimizers.items():
            self._hooks.append(optimizer.register_step_pre_hook(self._barrier(label)))
            self._hooks.append(optimizer.register_step_post_hook(self._counter(label)))
        if self._mode != "explicit":
            self._hooks.append(model.register_forward_pre_hook(self._before_forward))

    def unwatch(self) -> None:
        """The inverse of `watch`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def steps(self) -> int:
        """Optimizer steps since the last boundary; several optimizers step side by side."""
        return max(self._since.values(), default=0)

    def pass_boundary(self) -> int:
        """Start counting anew; returns the steps that were made."""
        steps = self.steps
        self._since.clear()
        return steps

    def count_one(self) -> None:
        """Count as a step what changed the state without an optimizer."""
        self._since[""] = self._since.get("", 0) + 1

    def called(self) -> bool:
        """`step()` was called; False, once, when it has long been called in vain."""
        self.explicit = True
        self._stepless = 0 if self._since else self._stepless + 1
        if self._stepless < STEPLESS_CALLS or self._told:
            return True
        self._told = True
        return False

    def automatic(self) -> bool:
        """True when `step()` is evidently never called."""
        if self.explicit or self._mode == "explicit":
            return False
        seen = max(self._seen.values(), default=0)
        return self._mode == "forward" or seen >= AUTOMATIC_AFTER_STEPS

    def _barrier(self, label: str) -> Callable[..., None]:
        """Hook of an optimizer that runs before each of its steps."""

        def before_step(_: Any, args: Any = (), kwargs: Any = None) -> None:
            # torch counts the optimizer itself among the arguments.
            closure = args[1] if len(args) > 1 else (kwargs or {}).get("closure")
            if callable(closure) and label in self._since and self.automatic():
                # The forward passes come inside the step, too late for a boundary.
                self._boundary()
            self.stepping.add(label)
            self._before_step(label)

        return before_step

    def _counter(self, label: str) -> Callable[..., None]:
        """Hook that runs after each step; a step inside another (Horovod's) fires it twice."""

        def after_step(*_: Any) -> None:
            if label not in self.stepping:
                return
            self.stepping.discard(label)
            if not self._made_step(label):
                return
            self._since[label] = self._since.get(label, 0) + 1
            self._seen[label] = self._seen.get(label, 0) + 1
            if self.automatic():
                self._left_to_us()

        return after_step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, module: torch.nn.Module, *_: Any) -> None:
        if not self._since or self.stepping or not self.automatic():
            return
        if module.training and torch.is_grad_enabled():
            self._boundary()

    def __reduce__(self) -> tuple[Any, ...]:
        """`copy.deepcopy(model)` and `torch.save(model)` take the hooks along, and not us."""
        return (Unattached, ())


class Unattached:
    """What a copy of a model has where the original has our hooks: every call does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:
    """See Unattached."""


__all__ = ["Iterations", "Unattached"]
