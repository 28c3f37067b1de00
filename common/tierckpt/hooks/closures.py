"""Closures: a step that calls its closure first needs no barrier before that call.

If the forward and backward pass are the closure of `optimizer.step(closure)`, the step starts
before them, and a barrier at its start would overlap with nothing. All optimizers of torch call the
closure before they change anything, so the barrier of such a step comes after the first call. For
any other step the barrier comes before everything else: an unknown step may change weights first
(SAM does), and so may other hooks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a step, the optimizer itself first."""

CALL_IT_FIRST = frozenset(
    f"torch.optim.{module}.{name}.step"
    for module, name in (
        *(("_adafactor", "Adafactor"), ("_muon", "Muon"), ("adadelta", "Adadelta")),
        *(("adagrad", "Adagrad"), ("adam", "Adam"), ("adamax", "Adamax"), ("asgd", "ASGD")),
        *(("lbfgs", "LBFGS"), ("nadam", "NAdam"), ("radam", "RAdam"), ("rmsprop", "RMSprop")),
        *(("rprop", "Rprop"), ("sgd", "SGD"), ("sparse_adam", "SparseAdam")),
    )
)
"""Steps whose source was read; a test checks them, too. AdamW uses Adam's step since torch 2.7; an
older AdamW, like any step that is not listed, has the barrier before it."""

_TORCH = os.path.dirname(torch.__file__) + os.sep


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure argument of a step, or None."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def after_first_call(
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    then: Callable[[], None],
) -> Arguments | None:
    """Other arguments for `step`: with them `then` is called once, after the closure has returned
    for the first time. None, and no effect, if there is no closure or if something may change
    before the closure is called."""
    closure = closure_of(args, kwargs)
    if not callable(closure) or not _calls_it_first(step) or others_come_first(optimizer):
        return None
    if step.__qualname__ == "LBFGS.step" and not optimizer.state:
        return None  # the first step makes an entry there before the call
    ours = _in_place_of(closure, then)
    if len(args) > 1:
        return (args[0], ours, *args[2:]), kwargs
    return args, {**kwargs, "closure": ours}


def _in_place_of(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    """A replacement of the closure for one step. In a compiled step the closure is still compiled,
    and `then` is not."""
    left = [torch.compiler.disable(then)]

    def first_call() -> Any:
        loss = closure()
        if left:
            left.pop()()
        return loss

    ours: Callable[[], Any] = torch.compiler.disable(first_call, recursive=False)
    return ours


def others_come_first(optimizer: Any) -> bool:
    """Whether pre-hooks of other code may change weights before a step does."""
    hooks = [
        *getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(),
        *_global_optimizer_pre_hooks.values(),
    ]
    return any(not (getattr(h, "__module__", None) or "").startswith("tierckpt.") for h in hooks)


@functools.lru_cache(256)
def _calls_it_first(step: Callable[..., Any]) -> bool:
    """Whether it is a step of torch, wrapped by nothing but torch."""
    if f"{step.__module__}.{step.__qualname__}" not in CALL_IT_FIRST:
        return False
    while True:
        code = getattr(step, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCH):
            return False
        if not hasattr(step, "__wrapped__"):
            return True
        step = step.__wrapped__


__all__ = ["CALL_IT_FIRST", "Arguments", "after_first_call", "closure_of", "others_come_first"]
