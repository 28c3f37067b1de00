"""The step hook: called before any step of any optimizer of this process, and before all other
hooks.

State that is being copied must not change before the barrier. A user's hook may change it (its own
weight decay, through `.data`), and torch calls hooks in order of registration, the global ones
first. So this hook is a global one, and is moved to the front.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .closures import Arguments

BeforeStep = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Arguments | None]
"""Takes the optimizer and its step's arguments; returns other arguments, or None."""

Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(reason: str) -> Callable[[Function], Function]:
    """Exclude a function from `torch.compile`: compiled code has a graph break there or, with
    `fullgraph=True`, an error, which contains the reason if this torch supports that."""
    with_reason = "reason" in inspect.signature(torch.compiler.disable).parameters

    def marked(function: Function) -> Function:
        disabled: Function = torch.compiler.disable(
            function, **({"reason": reason} if with_reason else {})
        )
        return disabled

    return marked


class GlobalStepHook:
    """Owns the hook: `close` removes it."""

    def __init__(self, before_step: BeforeStep) -> None:
        """`before_step` is a method; its object is not kept alive. It is called on the thread that
        makes the step: the training thread."""
        # A forked child has the hook as well, but not the thread that makes the copies.
        weak, process = weakref.WeakMethod(before_step), os.getpid()

        @never_compiled("Tierckpt waits here for copies; leave optimizer.step() out of the graph")
        def before_any_step(
            optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Arguments | None:
            call = weak()
            if call is None or os.getpid() != process:
                return None
            return call(optimizer, args, kwargs)

        self._hook: Any = register_optimizer_step_pre_hook(before_any_step)
        _put_first(self._hook)

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()


def _put_first(handle: Any) -> None:
    """Move a hook before the existing ones, as far as this torch allows."""
    hooks = getattr(handle, "hooks_dict_ref", lambda: None)()
    if isinstance(hooks, OrderedDict) and handle.id in hooks:
        hooks.move_to_end(handle.id, last=False)


__all__ = ["GlobalStepHook", "never_compiled"]
