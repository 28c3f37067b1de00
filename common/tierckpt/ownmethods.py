"""Own methods: what an optimizer's class has beside torch's, and may change weights outside a step.

SAM climbs in `first_step()`, ScheduleFree swaps weights in `train()` and `eval()`; torch calls no
hook before these, so what is being copied would be torn. Each of them therefore waits for copies,
as a step does; and so does the step of one for which torch calls no hooks.
"""

from __future__ import annotations

import contextlib
import os
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .stepwatch import never_compiled

# Horovod's wait for reductions, under which copying goes on; its step has torch's hooks.
NOT_THEIRS = ("torch.", "horovod.", "tierckpt", "abc", "builtins", "typing")


class OwnMethods:
    """Owns what it puts in their place: `close` takes it away. Training thread."""

    def __init__(
        self, optimizers: Iterable[Any], hollow: Iterable[Any], barrier: Callable[[], None]
    ) -> None:
        """`barrier`, a method whose object is not kept alive, returns when weights may change. Of
        the `hollow` ones the steps wait, too."""
        weak, process = weakref.WeakMethod(barrier), os.getpid()

        @never_compiled("Tierckpt waits here for copies")
        def before() -> None:
            call = weak()
            if call is not None and os.getpid() == process:
                call()

        self._put: list[tuple[weakref.ref[Any], str]] = []
        steps = {id(each) for each in hollow}
        for each in optimizers:
            for name, function in _own(type(each), with_step=id(each) in steps):
                if name in vars(each):
                    continue  # somebody else put something in its place
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(each, name, Waiting(each, function, before))
                    self._put.append((weakref.ref(each), name))

    def close(self) -> None:
        """The inverse."""
        for weak, name in self._put:
            each = weak()
            if each is not None and isinstance(vars(each).get(name), Waiting):
                delattr(each, name)
        self._put.clear()


class Waiting:
    """A method of one object that waits before it begins. In a copy of that object it is the plain
    method."""

    def __init__(self, owner: Any, function: Callable[..., Any], before: Callable[[], None]):
        self._owner, self._function, self._before = weakref.ref(owner), function, before
        self.__doc__, self.__name__ = function.__doc__, getattr(function, "__name__", "")
        self.__wrapped__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the method."""
        self._before()
        return self._function(self._owner(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """See `copy.deepcopy`: the copy is in `memo` before its attributes are copied."""
        owner = self._owner()
        return types.MethodType(self._function, memo.get(id(owner), owner))

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle."""
        return types.MethodType, (self._function, self._owner())


def _own(kind: type, with_step: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods that torch.optim.Optimizer does not have, as the class sees them."""
    base = vars(torch.optim.Optimizer)
    found: dict[str, Callable[..., Any]] = {}
    for each in kind.__mro__:
        if f"{each.__module__}.".startswith(NOT_THEIRS):
            continue
        for name, function in vars(each).items():
            if isinstance(function, types.FunctionType) and not name.startswith("_"):
                found.setdefault(name, function)
    for name, function in found.items():
        if (name == "step" and with_step) or (name not in base and name != "step"):
            yield name, function


__all__ = ["OwnMethods", "Waiting"]
