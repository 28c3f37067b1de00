"""Custom methods: those of an optimizer's class beside torch's, which may change weights outside a
step.

SAM climbs in `first_step()`, ScheduleFree swaps weights in `train()` and `eval()`. torch calls no
hook before these, so the snapshot would be torn. Each of them therefore waits for copies, as a step
does; and so does the step of an optimizer for which torch calls no hooks.
"""

from __future__ import annotations

import contextlib
import os
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .step_hook import never_compiled

# Horovod's methods wait for reductions, and copying goes on meanwhile; its step has torch's hooks.
NOT_THEIRS = ("torch.", "horovod.", "tierckpt", "abc", "builtins", "typing")


class CustomMethods:
    """Owns the replaced methods: `close` restores them. Training thread."""

    def __init__(
        self, optimizers: Iterable[Any], hollow: Iterable[Any], barrier: Callable[[], None]
    ) -> None:
        """`barrier`, a method whose object is not kept alive, returns when weights may change. The
        steps of the `hollow` optimizers wait, too."""
        weak, process = weakref.WeakMethod(barrier), os.getpid()

        @never_compiled("Tierckpt waits here for copies")
        def before() -> None:
            call = weak()
            if call is not None and os.getpid() == process:
                call()

        self._put: list[tuple[weakref.ref[Any], str, Waiting]] = []
        steps = {id(each) for each in hollow}
        for each in optimizers:
            for name, function in _own(type(each), with_step=id(each) in steps):
                with contextlib.suppress(AttributeError, TypeError):
                    waiting = Waiting(each, function, before, vars(each).get(name))
                    setattr(each, name, waiting)
                    self._put.append((weakref.ref(each), name, waiting))

    def close(self) -> None:
        """Restore the methods, except those that other code has replaced since."""
        for weak, name, waiting in self._put:
            each = weak()
            if each is None or vars(each).get(name) is not waiting:
                continue
            if waiting.before is None:
                delattr(each, name)
            else:
                setattr(each, name, waiting.before)
        self._put.clear()


class Waiting:
    """A method of one object that waits before it runs. In a copy of the object it is the plain
    method."""

    def __init__(
        self,
        owner: Any,
        function: Callable[..., Any],
        wait: Callable[[], None],
        before: Callable[..., Any] | None,
    ) -> None:
        """`before`: an earlier replacement of the class's `function` on this object, such as a
        scheduler's."""
        self.before = before
        self._owner = weakref.ref(owner)
        if before is not None:
            self._function = _of_nobody(before)
        else:
            self._function = function
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        plain = self._function

        def waits(owner: Any, *args: Any, **kwargs: Any) -> Any:
            wait()
            return plain(owner, *args, **kwargs)

        self.__func__ = waits
        """The attribute of a bound method that schedulers read."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return self.__func__(self._owner(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy for `copy.deepcopy`: the owner's copy is in `memo` before its attributes are
        copied."""
        owner = self._owner()
        return types.MethodType(self._function, memo.get(id(owner), owner))

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce for pickle."""
        return getattr, (self._owner(), self.__name__)


def _of_nobody(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an additional first argument that is ignored."""

    def called(_owner: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return called


def _own(kind: type, with_step: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods that torch.optim.Optimizer does not have, as the class defines them."""
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


__all__ = ["CustomMethods", "Waiting"]
