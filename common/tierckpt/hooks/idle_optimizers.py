"""Idle optimizers: given optimizers that make no steps, while other code changes their parameters.

Versions are numbered by the steps of the given optimizers. A loop that steps another one (a
wrapper, a copy, the result of a library's `prepare()`) would train for hours without a version, or
with the first state of an optimizer in every version.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter

import torch

from tierckpt._text import some
from tierckpt.state.training_state import TrainingState, optimizer_class

BOUNDARIES = 4
"""Number of boundaries in a row without a step of the given optimizer and with a step of another
one on its parameters."""
STEPS = 32
"""Number of steps of the other optimizer, if the loop calls no boundary."""

Say = Callable[[str, int], None]
_counter = attrgetter("_version")


class IdleOptimizers:
    """Reports each idle optimizer once. Training thread."""

    def __init__(self, state: TrainingState, say: Say) -> None:
        self._state, self._say = state, say
        self._since: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Other optimizers that stepped since the last boundary."""
        self._steps: Counter[str] = Counter()
        """By label: steps of other optimizers on its parameters, since its own last step."""
        self._boundaries: Counter[str] = Counter()
        self._changed = 0
        """Boundaries in a row with changed parameters and without a step."""
        self._counters: list[int] | None = None
        self._reported: set[str] = set()
        self._usual: Collection[str] | None = None
        """With these steps since the last boundary, and none of another optimizer, nothing is to be
        done: it was so at the last boundary."""

    def unregistered_step(self, optimizer: torch.optim.Optimizer, members: Iterable[int]) -> None:
        """An optimizer that was not given makes a step; `members` are the `id()`s of its
        parameters."""
        self._since.add(optimizer)
        self._usual = None
        for label in self._stepped_by(set(members)):
            self._steps[label] += 1
            if self._steps[label] == STEPS and not self._boundaries:
                self._report(label, optimizer, f"while it made {STEPS} steps")

    def _stepped_by(self, members: set[int]) -> list[str]:
        """Labels of the given optimizers with any of these parameters."""
        return [
            label
            for label in self._state.given
            if any(id(p) in members for p in self._params_of(label))
        ]

    def _params_of(self, label: str) -> list[torch.Tensor]:
        groups = self._state.optimizers[label].param_groups
        return [param for group in groups for param in group["params"]]

    def boundary(self, stepped: Collection[str]) -> None:
        """The loop called `step()`; the optimizers in `stepped` made steps since the last call."""
        if stepped == self._usual:
            return
        outer = {self._state.outer.get(label, label) for label in stepped}
        others = list(self._since)
        self._since.clear()
        for label in self._state.given:
            if label in outer:
                self._steps.pop(label, None)
                self._boundaries[label] = 0
            elif not others:
                continue
            elif other := self._other(label, others):
                self._boundaries[label] += 1
                if self._boundaries[label] == BOUNDARIES:
                    self._report(label, other, f"at {BOUNDARIES} boundaries in a row")
        self._watch_values(bool(outer or others))
        self._usual = None if others or outer != {*self._state.given} else stepped

    def _other(
        self, label: str, others: Iterable[torch.optim.Optimizer]
    ) -> torch.optim.Optimizer | None:
        own = {id(param) for param in self._params_of(label)}
        return next((o for o in others if not own.isdisjoint(_members(o))), None)

    def _watch_values(self, somebody_stepped: bool) -> None:
        """Watch for steps without torch's hooks: most of them still change version counters."""
        if somebody_stepped:
            self._changed, self._counters = 0, None
            return
        before, params = self._counters, list(self._state.model.parameters())
        self._counters = list(map(_counter, params))
        if before is None or len(before) != len(params):
            return
        moved = [p for p, a, b in zip(params, before, self._counters, strict=True) if a != b]
        self._changed = self._changed + 1 if moved else 0
        if self._changed == BOUNDARIES and "" not in self._reported:
            self._reported.add("")
            names = some([self._state.name_of(param) for param in moved])
            ours = some([f"{n!r}, {optimizer_class(o)}" for n, o in self._state.given.items()])
            self._say(
                f"no checkpoint is taken: step() was called {BOUNDARIES + 1} times and parameters "
                f"changed ({names}), but the given optimizers ({ours}) made no step. The "
                "checkpointer sees only calls of step() of a torch.optim.Optimizer. If weights are "
                "changed in another way (during the backward pass, as LOMO does), train with an "
                "optimizer whose step() the loop calls",
                logging.ERROR,
            )

    def _report(self, label: str, other: torch.optim.Optimizer, when: str) -> None:
        if label in self._reported:
            return
        self._reported.add(label)
        own, name = optimizer_class(self._state.given[label]), optimizer_class(other)
        names = some([self._state.name_of(p) for p in self._params_of(label)])
        lone = len(self._state.given) == 1
        lost = "no checkpoint is taken" if lone else "all checkpoints have its first state"
        line = "optimizer=..." if lone else f"optimizer={{{label!r}: ..., ...}}"
        self._say(
            f"optimizer {label!r}, a {own}, made no step {when}, and a {name} that the "
            f"checkpointer was not given steps its parameters ({names}): {lost}. Give the "
            f"optimizer whose step() the loop calls: {line} with that {name}",
            logging.ERROR,
        )


def _members(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


__all__ = ["BOUNDARIES", "STEPS", "IdleOptimizers"]
