"""The order in which gradients arrive in a module's first backward pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .gradient_hooks import watch_gradients


class GradientOrder:
    """Records the order until `stop()`. DDP makes its final buckets in this order, after the first
    pass.

    Threads: `note` runs on autograd's threads.
    """

    def __init__(self, params: list[torch.nn.Parameter], number: Mapping[int, int]) -> None:
        """`number`: the number of each parameter, by `id`."""
        self._number = number
        self._arrived: dict[int, None] = {}
        self._hooks = watch_gradients(params, self.note)

    def note(self, param: torch.Tensor) -> None:
        """Record that the gradient of `param` has arrived."""
        number = self._number[id(param)]
        if number in self._arrived:  # a new pass: the previous one was under no_sync()
            self._arrived.clear()
        self._arrived[number] = None

    def order(self) -> list[int]:
        """The parameters' numbers, in the order of their gradients."""
        return list(self._arrived)

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
