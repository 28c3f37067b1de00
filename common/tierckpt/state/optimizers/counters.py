"""Detect numbers that an optimizer counts in its attributes and saves nowhere.

No checkpoint can store a value that `state_dict()` does not return: `torch.save` would lose it as
well, and a resumed run begins with its first value again. Numbers that change with every step are
of this kind, and are found by comparing a few boundaries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from tierckpt.state.training_state import TrainingState

from .nested import Foreign, class_name

LOOKS = 3
"""Boundaries with steps at which numbers are compared."""
# Set by torch's schedulers and profilers.
NOT_THEIRS = ("_step_count", "_opt_called")


class Counters:
    """Compares the numbers of the first boundaries. Training thread."""

    def __init__(self, state: TrainingState, say: Callable[[str, int], None]) -> None:
        self._state, self._say = state, say
        self._seen: list[dict[str, dict[str, Any]]] = []
        self.done = False
        """True when enough boundaries were compared."""

    def boundary(self) -> None:
        """Look at the numbers; to be called at boundaries after steps."""
        if self.done:
            return
        optimizers = self._state.optimizers.items()
        self._seen.append({label: _numbers(optimizer) for label, optimizer in optimizers})
        if len(self._seen) < LOOKS:
            return
        self.done = True
        for label, optimizer in optimizers:
            changing = [n for n in self._seen[-1][label] if self._goes_on(label, n)]
            if changing:
                self._warn(label, optimizer, changing)
        self._seen.clear()

    def _goes_on(self, label: str, name: str) -> bool:
        values = [seen.get(label, {}).get(name) for seen in self._seen]
        return all(a != b for a, b in pairwise(values))

    def _warn(self, label: str, optimizer: torch.optim.Optimizer, names: list[str]) -> None:
        remainder = self._state.optimizer_tree.remainders().get(label, {})
        saved = set(_leaves(remainder))
        for name in names:
            now = self._seen[-1][label][name]
            if now in saved:
                continue
            values = ", ".join(str(seen[label][name]) for seen in self._seen)
            self._say(
                f"optimizer {label!r}: {class_name(optimizer)}.{name} changes with the steps "
                f"({values}) and is not in its state_dict(): a resumed run begins with its first "
                "value again. Let state_dict() and load_state_dict() of the class, or hooks, save "
                "it (see docs/models.md); then it is in all checkpoints",
                logging.WARNING,
            )


def _numbers(optimizer: Any) -> dict[str, Any]:
    held = vars(optimizer.outside if isinstance(optimizer, Foreign) else optimizer)
    return {n: v for n, v in held.items() if type(v) in (int, float) and n not in NOT_THEIRS}


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    elif type(value) in (int, float):
        yield value


__all__ = ["LOOKS", "Counters"]
