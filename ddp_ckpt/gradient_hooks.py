"""Hooks on parameters that hear of a gradient when it was accumulated, right before DDP does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


def watch_gradients(
    params: Iterable[torch.nn.Parameter], hear: Callable[[torch.Tensor], None]
) -> list[Any]:
    """Call `hear`, a bound method, with each parameter that is trained when its gradient has come,
    on autograd's thread; returns the hooks, to be removed.

    They hold no reference to the method's object: a parameter is where Python's collector does not
    look, and with it everything that it held.
    """
    weak = weakref.WeakMethod(hear)

    def came(param: torch.Tensor) -> None:
        method = weak()
        if method is not None:
            method(param)

    trained = [param for param in params if param.requires_grad]
    return [param.register_post_accumulate_grad_hook(came) for param in trained]
