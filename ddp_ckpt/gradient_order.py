"""The order in which gradients arrive in the first backward pass of a module that DDP reduces."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.parallel import DistributedDataParallel

from .gradient_hooks import watch_gradients


class GradientOrder:
    """Records the order. DDP makes its final buckets in this order, after that pass.

    Threads: `note` runs on autograd's threads.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        params: list[torch.nn.Parameter],
        number: Mapping[int, int],
    ) -> None:
        """`number`: the number of each parameter, by `id`."""
        self._ddp, self._number = ddp, number
        self._arrived: dict[int, None] = {}
        self.reduced = False
        """True if DDP reduces the newest recorded pass."""
        self._over = False
        self._final: list[int] = []
        self._hooks = watch_gradients(params, self.note)
        self._expected = len(self._hooks)

    def note(self, param: torch.Tensor) -> None:
        """Record that the gradient of `param` has arrived."""
        if self._over:
            return
        number = self._number[id(param)]
        if number in self._arrived:  # a new pass; the previous one failed, or was under no_sync()
            self._arrived.clear()
        self._arrived[number] = None
        self.reduced = self._ddp.require_forward_param_sync
        self._over = self.reduced and len(self._arrived) == self._expected

    def order(self) -> list[int]:
        """The parameters' numbers, in the order of their gradients; the same list once the pass is
        over."""
        if not self._over:
            return list(self._arrived)
        self._final = self._final or list(self._arrived)
        return self._final

    def stop_if_over(self) -> None:
        """Remove the hooks if the pass is over. Not to be called by one of them."""
        if self._hooks and self._over:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
