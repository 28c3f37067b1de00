"""Gradients that a manual optimization keeps from one batch to the next.

Gradients are in no version. If a training step accumulates those of one optimizer while another
one steps, the boundary waits until no optimizer has any.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from tierckpt.integrations.frameworks import Say

PATIENCE_BATCHES = 100
NEVER = (
    f"no checkpoint was taken for {PATIENCE_BATCHES} batches: parameters keep gradients, and their "
    "optimizer made no step. If the training step does not accumulate these gradients, let it call "
    "zero_grad() of that optimizer"
)


class KeptGradients:
    """Watches the steps of all optimizers of a fit. Training thread."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], say: Say) -> None:
        self._optimizers, self._say = optimizers, say
        self._stepped: set[int] = set()
        self._batches = 0
        self._hooks = [each.register_step_post_hook(self._after_step) for each in optimizers]

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))

    def are_kept(self) -> bool:
        """Whether an optimizer that made no step since the last call has gradients. Called once
        after each batch with a step of some optimizer."""
        others = [each for each in self._optimizers if id(each) not in self._stepped]
        self._stepped.clear()
        kept = any(
            param.grad is not None
            for optimizer in others
            for group in optimizer.param_groups
            for param in group["params"]
        )
        self._batches = self._batches + 1 if kept else 0
        if self._batches == PATIENCE_BATCHES:
            self._say(NEVER, logging.ERROR)
        return kept

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


__all__ = ["KeptGradients"]
