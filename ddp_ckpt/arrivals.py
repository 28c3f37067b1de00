"""The order in which gradients come in a module's first backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch


class Arrivals:
    """Watches until `stop()`. DDP makes its final buckets by this order, after the first pass.

    Threads: gradients come on autograd's.
    """

    def __init__(self, params: list[torch.nn.Parameter], number: Mapping[int, int]) -> None:
        """`number` is each parameter's, by `id`."""
        self._number = number
        self._came: dict[int, None] = {}
        watcher = _Watcher(self)
        trained = [param for param in params if param.requires_grad]
        self._hooks: list[Any] = [p.register_post_accumulate_grad_hook(watcher) for p in trained]

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


class _Watcher:
    """A parameter's hook. Holds no reference: a parameter is where Python's collector does not
    look, and with it everything that it held."""

    def __init__(self, owner: Arrivals) -> None:
        self._owner = weakref.ref(owner)

    def __call__(self, param: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.note(param)
