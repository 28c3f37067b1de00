"""Closures: a step whose first act is to call its closure need not wait for copies before that.

Where forward and backward pass are the closure of `optimizer.step(closure)`, the step begins before
them, and a barrier at its beginning would have nothing to overlap with. All optimizers of torch's
own call the closure before they change anything, so the barrier of such a step comes after the
first call. Of any other step it comes before all else: a step that is not known here may change
weights first (SAM does), and so may hooks of others.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a step is called with, the optimizer itself first."""

CALL_IT_FIRST = frozenset(
    f"torch.optim.{module}.{name}.step"
    for module, name in (
        *(("_adafactor", "Adafactor"), ("_muon", "Muon"), ("adadelta", "Adadelta")),
        *(("adagrad", "Adagrad"), ("adam", "Adam"), ("adamax", "Adamax"), ("asgd", "ASGD")),
        *(("lbfgs", "LBFGS"), ("nadam", "NAdam"), ("radam", "RAdam"), ("rmsprop", "RMSprop")),
        *(("rprop", "Rprop"), ("sgd", "SGD"), ("sparse_adam", "SparseAdam")),
    )
)
"""Steps that were read, and are tried by a test. AdamW's is Adam's since torch 2.7; an older one of
its own, like any step that is not here, has the barrier before it."""

_TORCH = os.path.dirname(torch.__file__) + os.sep


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure that a step is called with, if any."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def after_first_call(
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    then: Callable[[], None],
) -> Arguments | None:
    """Other arguments for `step`, by which `then` is called once, when the closure has returned for
    the first time. None where something may change before that, or there is no closure: then
    nothing was arranged."""
    closure = closure_of(args, kwargs)
    if not callable(closure) or not _calls_it_first(step) or others_come_first(optimizer):
        return None
    if step.__qualname__ == "LBFGS.step" and not optimizer.state:
        return None  # it makes an entry there before the call
    ours = _in_place_of(closure, then)
    if len(args) > 1:
        return (args[0], ours, *args[2:]), kwargs
    return args, {**kwargs, "closure": ours}


def _in_place_of(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    """For one step. Where that is compiled, the closure still is, and `then` is not."""
    left = [torch.compiler.disable(then)]

    def first_call() -> Any:
        loss = closure()
        if left:
            left.pop()()
        return loss

    ours: Callable[[], Any] = torch.compiler.disable(first_call, recursive=False)
    return ours


def others_come_first(optimizer: Any) -> bool:
    """Whether pre-hooks that are not ours may change weights before a step does."""
    hooks = [
        *getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(),
        *_global_optimizer_pre_hooks.values(),
    ]
    return any(not (getattr(h, "__module__", None) or "").startswith("tierckpt.") for h in hooks)


@functools.lru_cache(256)
def _calls_it_first(step: Callable[..., Any]) -> bool:
    """Whether it is one of torch's own, with nothing but torch's own around it."""
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
