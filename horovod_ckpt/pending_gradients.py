"""Pending gradients: gradients that exist at a boundary and that no step has used yet.

With several backward passes per step, a boundary of one optimizer may lie between the passes of
another one. A version contains no gradients, so a run that is resumed from there would continue
without them. So no rank takes a version at a boundary where some rank has pending gradients.

But some loops drop such gradients before a step could use them: if a GAN's generator is trained
through the discriminator, `netD.zero_grad()` comes before the discriminator's next pass. The
boundary does not show that. The next step of the optimizer does: the gradients of the boundary
still exist, or not. After an optimizer's gradients were dropped LEARNT times in a row, they are
assumed to be dropped, until a step uses them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping

import torch

from .reductions import Reductions

LEARNT = 3
Gradients = list[tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]]
"""Parameters and their gradients at the boundary."""


class PendingGradients:
    """The pending gradients of one rank. Training thread; keeps no gradient alive."""

    def __init__(self, reductions: Mapping[str, Reductions]) -> None:
        """`reductions`: those of each optimizer; they stay their owner's."""
        self._reductions = reductions
        self._left: dict[str, Gradients] = {}
        """The gradients of the last boundary, for each optimizer without a step since then."""
        self._dropped: Counter[str] = Counter()
        """For each optimizer, how many times in a row its gradients were dropped."""

    @property
    def names(self) -> list[str]:
        """Optimizers that are between the passes of a step on this rank, with gradients that a step
        may use."""
        return [name for name in self._look() if not self._drops(name)]

    def at_boundary(self) -> bool:
        """Look at the gradients of a boundary; True if a step may use some of them."""
        for name, left in self._left.items():
            self._dropped[name] += not _are_there(left)
        self._left = self._look()
        return not all(map(self._drops, self._left))

    def step_begins(self, name: str) -> bool:
        """Note that an optimizer's step begins; True if it uses gradients that were assumed to be
        dropped."""
        left = self._left.pop(name, None)
        if left is None:
            return False
        trusted, used = self._drops(name), _are_there(left)
        self._dropped[name] = 0 if used else self._dropped[name] + 1
        return used and trusted

    def _drops(self, name: str) -> bool:
        return self._dropped[name] >= LEARNT

    def forget(self) -> None:
        """Forget the gradients of an interrupted iteration."""
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
