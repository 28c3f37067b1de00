"""The order in which gradients come in a module's first backward pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .gradient_hooks import watch_gradients


class GradientOrder:
    """Watches until `stop()`. DDP makes its final buckets by this order, after the first pass.

    Threads: gradients come on autograd's.
    """

    def __init__(self, params: list[torch.nn.Parameter], number: Mapping[int, int]) -> None:
        """`number` is each parameter's, by `id`."""
        self._number = number
        self._came: dict[int, None] = {}
        self._hooks = watch_gradients(params, self.note)

    def note(self, param: torch.Tensor) -> None:
        """The gradient of `param` has come."""
        number = self._number[id(param)]
        if number in self._came:  # of another pass: the one before was under no_sync()
            self._came.clear()
        self._came[number] = None

    def order(self) -> list[int]:
        """The parameters' numbers."""
        return list(self._came)

    def stop(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
