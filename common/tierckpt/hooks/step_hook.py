"""Stepwatch: who is called before any step of any optimizer of this process, and before all hooks.

What is being copied must not change before the barrier. Hooks of the user's may change it (a weight
decay of their own, through `.data`), and torch calls them in the order in which they were
registered, those for all optimizers first. So ours is one of these, and is put in front.
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
"""Takes the optimizer, and what its step was called with; returns what it is to be called with."""

Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(reason: str) -> Callable[[Function], Function]:
    """Have `torch.compile` leave the function as it is: what is compiled has a graph break there,
    or, with `fullgraph=True`, an error that tells the reason where this torch can."""
    tells = "reason" in inspect.signature(torch.compiler.disable).parameters

    def marked(function: Function) -> Function:
        disabled: Function = torch.compiler.disable(
            function, **({"reason": reason} if tells else {})
        )
        return disabled

    return marked


class GlobalStepHook:
    """Owns the hook: `close` removes it."""

    def __init__(self, before_step: BeforeStep) -> None:
        """`before_step` is a method, whose object is not kept alive. It is called by whoever makes
        the step: the training thread."""
        # A forked child has the hook as well, and no thread that copies what is waited for.
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
        """Be called no more."""
        self._hook.remove()


def _put_first(handle: Any) -> None:
    """Have a hook called before those that are there already, as far as this torch allows."""
    hooks = getattr(handle, "hooks_dict_ref", lambda: None)()
    if isinstance(hooks, OrderedDict) and handle.id in hooks:
        hooks.move_to_end(handle.id, last=False)


__all__ = ["GlobalStepHook", "never_compiled"]
