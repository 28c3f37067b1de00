"""Unstepped: optimizers that were given and make no steps, while something else changes what they
were given for.

Versions are numbered by the steps of what was given. A loop that steps another one (a wrapper
around it, a copy, what a library's `prepare()` returned) would train for hours without a version,
or with the first state of an optimizer in every one.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter

import torch

from tierckpt._text import some
from tierckpt.state.training_state import TrainingState, optimizer_class

BOUNDARIES = 4
"""So many in a row without a step of the one, and with a step of the other on its parameters."""
STEPS = 32
"""So many steps of the other, where nobody calls boundaries."""

Say = Callable[[str, int], None]
_counter = attrgetter("_version")


class IdleOptimizers:
    """Says it, once for each optimizer. Training thread."""

    def __init__(self, state: TrainingState, say: Say) -> None:
        self._state, self._say = state, say
        self._since: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Others that stepped since the last boundary."""
        self._steps: Counter[str] = Counter()
        """Of others on the parameters of what was given, since its own last one."""
        self._boundaries: Counter[str] = Counter()
        self._changed = 0
        """Boundaries in a row with changed parameters, and without anybody's step."""
        self._counters: list[int] | None = None
        self._told: set[str] = set()

    def stranger_steps(self, optimizer: torch.optim.Optimizer, members: Iterable[int]) -> None:
        """One that was not given makes a step; `members` are `id()`s of its parameters."""
        self._since.add(optimizer)
        for label in self._stepped_by(set(members)):
            self._steps[label] += 1
            if self._steps[label] == STEPS and not self._boundaries:
                self._tell(label, optimizer, f"while it made {STEPS} steps")

    def _stepped_by(self, members: set[int]) -> list[str]:
        """Labels of what was given for any of these parameters."""
        return [
            label
            for label in self._state.given
            if any(id(p) in members for p in self._params_of(label))
        ]

    def _params_of(self, label: str) -> list[torch.Tensor]:
        groups = self._state.optimizers[label].param_groups
        return [param for group in groups for param in group["params"]]

    def boundary(self, stepped: Iterable[str]) -> None:
        """The loop called `step()`; `stepped` made steps since the last time."""
        outer = {self._state.outer.get(label, label) for label in stepped}
        others, self._since = list(self._since), weakref.WeakSet()
        for label in self._state.given:
            if label in outer:
                self._steps.pop(label, None)
                self._boundaries[label] = 0
            elif not others:
                continue
            elif other := self._other(label, others):
                self._boundaries[label] += 1
                if self._boundaries[label] == BOUNDARIES:
                    self._tell(label, other, f"at {BOUNDARIES} boundaries in a row")
        self._watch_values(bool(outer or others))

    def _other(
        self, label: str, others: Iterable[torch.optim.Optimizer]
    ) -> torch.optim.Optimizer | None:
        mine = {id(param) for param in self._params_of(label)}
        return next((o for o in others if not mine.isdisjoint(_members(o))), None)

    def _watch_values(self, somebody_stepped: bool) -> None:
        """A step that torch calls no hook for still changes parameters, most ways of doing it."""
        if somebody_stepped:
            self._changed, self._counters = 0, None
            return
        before, params = self._counters, list(self._state.model.parameters())
        self._counters = list(map(_counter, params))
        if before is None or len(before) != len(params):
            return
        moved = [p for p, a, b in zip(params, before, self._counters, strict=True) if a != b]
        self._changed = self._changed + 1 if moved else 0
        if self._changed == BOUNDARIES and "" not in self._told:
            self._told.add("")
            names = some([self._state.name_of(param) for param in moved])
            ours = some([f"{n!r}, {optimizer_class(o)}" for n, o in self._state.given.items()])
            self._say(
                f"step() was called {BOUNDARIES + 1} times while parameters changed ({names}) and "
                f"no step was seen of what the checkpointer was given ({ours}): no checkpoint is "
                "taken. It sees calls of step() of a torch.optim.Optimizer alone. Where weights "
                "are changed in another way (during the backward pass, as LOMO does), train with "
                "an optimizer whose step() the loop calls",
                logging.ERROR,
            )

    def _tell(self, label: str, other: torch.optim.Optimizer, when: str) -> None:
        if label in self._told:
            return
        self._told.add(label)
        mine, name = optimizer_class(self._state.given[label]), optimizer_class(other)
        names = some([self._state.name_of(p) for p in self._params_of(label)])
        lone = len(self._state.given) == 1
        lost = "no checkpoint is taken" if lone else "its state in all checkpoints is the first one"
        line = "optimizer=..." if lone else f"optimizer={{{label!r}: ..., ...}}"
        self._say(
            f"optimizer {label!r}, a {mine}, made no step {when}, and a {name} that the "
            f"checkpointer was not given steps its parameters ({names}): {lost}. Give it the one "
            f"whose step() the loop calls: {line} with that {name}",
            logging.ERROR,
        )


def _members(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


__all__ = ["BOUNDARIES", "STEPS", "IdleOptimizers"]
