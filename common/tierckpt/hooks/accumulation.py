"""Gradients that a loop accumulates: those of backward passes since an optimizer's last step.

They belong to the weights of these passes. `load_from` refuses to put other weights below them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from tierckpt._text import some
from tierckpt.errors import RestoreError
from tierckpt.state.training_state import TrainingState

REMEDY = (
    "Call load_from() after the step that uses these gradients (Accelerate: where "
    "accelerator.sync_gradients is true). To give them up: model.zero_grad() first"
)

Seen = tuple[weakref.ref[torch.Tensor], int] | None
"""A gradient and its version counter; None: there was none."""


class Accumulation:
    """Knows whether an optimizer has gradients that no step has used. Training thread; keeps no
    gradient alive.

    A backward pass makes a gradient, or adds to one, and then the gradient's version counter grows.
    So a gradient that is the same as after the optimizer's step was used by it. Those that another
    optimizer's backward pass has left in the same iteration are no accumulation: a GAN's generator
    is trained through the discriminator, which drops them.
    """

    def __init__(self, state: TrainingState) -> None:
        """`state` stays its owner's."""
        self._state = state
        self._seen: dict[str, list[Seen]] = {}
        """By optimizer, the watched gradients after the last step of the iteration."""

    def stepped(self, labels: Iterable[str]) -> None:
        """A step has ended; `labels`: the optimizers with steps in this iteration."""
        for label in labels:
            if label in self._state.optimizers:
                self._seen[label] = _look(self._state.optimizers[label].param_groups)

    def refuse(self) -> None:
        """Raise RestoreError if this rank accumulates gradients."""
        if names := [repr(label) for label in self._state.optimizers if self._accumulates(label)]:
            raise RestoreError(
                "load_from() in the middle of a gradient accumulation: optimizer "
                f"{some(names)} has gradients of backward passes since its last step. Its next "
                "step would add them up with those of other weights. Nothing was changed",
                REMEDY,
            )

    def _accumulates(self, label: str) -> bool:
        groups = self._state.optimizers[label].param_groups
        now = _look(groups)
        before = self._seen.get(label) or [None] * len(now)
        if not any(a is not None and a != b for a, b in zip(now, before, strict=False)):
            return False
        gradients = [*_gradients_of(param for group in groups for param in group["params"])]
        # A step that a GradScaler skipped leaves infinite ones, and the loop drops them.
        finite = all(bool(torch.isfinite(each).all()) for each in gradients)
        return finite and any(bool(each.any()) for each in gradients)


def _look(groups: Sequence[Any]) -> list[Seen]:
    """The gradients of a few parameters of an optimizer. One call, as it is in every step."""
    if not groups:
        return []
    seen: list[Seen] = []
    first, last = groups[0]["params"], groups[-1]["params"]
    middles = *first[len(first) // 2 :][:1], *last[len(last) // 2 :][:1]
    for param in (*first[:1], *middles, *last[-1:]):
        gradient = param.grad
        seen.append(None if gradient is None else (weakref.ref(gradient), gradient._version))
    return seen


def _gradients_of(params: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for param in params:
        if (gradient := param.grad) is not None:
            yield gradient.coalesce().values() if gradient.is_sparse else gradient


__all__ = ["Accumulation"]
