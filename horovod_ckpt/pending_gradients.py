"""Gradients that are there at a boundary, and that no step has used yet.

With several backward passes a step, a boundary of one optimizer may lie between the passes of
another one. A version has no gradients in it: taken there, a resumed run would go on without those.
So it is no version, on any rank, if it is none on one.

But many a loop leaves gradients that it drops before any step could use them: where a GAN's
generator is trained through the discriminator, `netD.zero_grad()` comes before the discriminator's
next pass. Nothing says so at the boundary. Whether they were still there when their optimizer made
its next step does say it, afterwards; where those of an optimizer were dropped LEARNT times in a
row, they are taken to be dropped, until they are not.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping

import torch

from .reductions import Reductions

LEARNT = 3
Gradients = list[tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]]
"""Parameters, and what their `grad` was."""


class PendingGradients:
    """One rank's. Training thread; keeps no gradient alive."""

    def __init__(self, reductions: Mapping[str, Reductions]) -> None:
        """By optimizer; they stay their owner's."""
        self._reductions = reductions
        self._left: dict[str, Gradients] = {}
        """Of the last boundary, by optimizer; those that made no step since."""
        self._dropped: Counter[str] = Counter()
        """How often in a row each dropped them."""

    @property
    def names(self) -> list[str]:
        """Optimizers that are between the passes of a step on this rank, and have gradients that
        a step may use."""
        return [name for name in self._look() if not self._drops(name)]

    def at_boundary(self) -> bool:
        """True where there are some that a step may use."""
        for name, left in self._left.items():
            self._dropped[name] += not _are_there(left)
        self._left = self._look()
        return not all(map(self._drops, self._left))

    def step_begins(self, name: str) -> bool:
        """An optimizer's step begins; True when it uses what was taken to be dropped."""
        left = self._left.pop(name, None)
        if left is None:
            return False
        trusted, used = self._drops(name), _are_there(left)
        self._dropped[name] = 0 if used else self._dropped[name] + 1
        return used and trusted

    def _drops(self, name: str) -> bool:
        return self._dropped[name] >= LEARNT

    def forget(self) -> None:
        """The gradients of an iteration that was cut short are none."""
        self._left = {}

    def _look(self) -> dict[str, Gradients]:
        found = {n: each.gradients() for n, each in self._reductions.items() if each.accumulating}
        return {
            name: [(weakref.ref(param), weakref.ref(gradient)) for param, gradient in gradients]
            for name, gradients in found.items()
            if gradients
        }


def _are_there(left: Gradients) -> bool:
    for param_of, gradient_of in left:
        param, gradient = param_of(), gradient_of()
        if param is not None and gradient is not None and param.grad is gradient:
            return True
    return False


__all__ = ["PendingGradients"]
