"""Hooks on parameters that run after a gradient is accumulated, right before DDP's own hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


def watch_gradients(
    params: Iterable[torch.nn.Parameter], on_gradient: Callable[[torch.Tensor], None]
) -> list[Any]:
    """Call `on_gradient`, a bound method, with each trained parameter after its gradient is
    accumulated, on autograd's thread; returns the hooks, for the caller to remove.

    The hooks keep no reference to the method's object: Python's garbage collector does not see
    references from a parameter, so the object would never be freed.
    """
    weak = weakref.WeakMethod(on_gradient)

    def accumulated(param: torch.Tensor) -> None:
        method = weak()
        if method is not None:
            method(param)

    trained = [param for param in params if param.requires_grad]
    return [param.register_post_accumulate_grad_hook(accumulated) for param in trained]
