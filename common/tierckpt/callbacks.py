"""Callbacks: what a user may hang on a job's checkpoints; the same for every adapter.

class Watch(tierckpt.Callbacks):
    def on_sealed(self, event):
        print(f"v{event.version} is in memory after {event.seconds['sealed_after']:.3f} s")

ckpt.add_callbacks(Watch())
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .events import RepeatedErrorLog

if TYPE_CHECKING:
    import torch

    from .events import Event
    from .restored import Restored


class Callbacks:
    """Subclass it and override what you need.

    All methods are called on the training thread, on every rank, and must not enter a collective of
    their own unless all ranks do. What they raise is logged (once, then counted), and training
    goes on.
    """

    def on_allreduce_launched(self, params: Iterable[torch.Tensor]) -> None:
        """The reduction of these parameters' gradients is under way (during the backward pass)."""

    def on_step_boundary(self, version: int) -> None:
        """A boundary was passed: the state is that after `version` optimizer steps.

        Whether or not a checkpoint is taken there. If one is, nothing may be changed in the state
        before the next optimizer step.
        """

    def on_sealed(self, event: Event) -> None:
        """This rank's shard of `event.version` is complete in memory; heard one boundary later."""

    def on_committed(self, event: Event) -> None:
        """This rank's shard of `event.version` is durable on `event.level`."""

    def on_restored(self, restored: Restored) -> None:
        """`restore()` is done, also when it found nothing (`restored.levels` is then empty)."""


AT_EASE = ("on_step_boundary", "on_restored")
"""Called when their occasion is over, on all ranks at the same place; the others, amid a step or a
boundary, and at different ones."""


def check_callbacks(given: Iterable[Callbacks]) -> list[Callbacks]:
    """They, as a list. Raises TypeError for what is none: it would fail at every call."""
    if isinstance(given, type | Callbacks) or not isinstance(given, Iterable):
        raise TypeError(f"callbacks is {given!r}; give a list of them, callbacks=[Watch()]")
    callbacks = list(given)
    for each in callbacks:
        if not isinstance(each, Callbacks):
            raise TypeError(
                f"{each!r} is no tierckpt.Callbacks; derive a class from that, override what you "
                "need, and give an object of it (a function that is to hear events is on_event)"
            )
    return callbacks


class CallbackList:
    """Calls everybody's callbacks. Training thread; calling never raises."""

    def __init__(self, registered: Iterable[Callbacks] = ()) -> None:
        """Raises TypeError for what are no callbacks; so does `add`."""
        self._registered = check_callbacks(registered)
        self._repeated_errors = RepeatedErrorLog()
        self.telling = 0
        """While others than AT_EASE are called: how many calls are within each other."""

    def __bool__(self) -> bool:
        return bool(self._registered)

    def add(self, callbacks: Callbacks) -> None:
        """Register one more."""
        self._registered += check_callbacks([callbacks])

    def call(self, name: str, *args: Any) -> None:
        """Call the method `name` of all."""
        amid = name not in AT_EASE
        self.telling += amid
        try:
            for which, callbacks in enumerate(self._registered):
                self._tell(which, callbacks, name, args)
        finally:
            self.telling -= amid

    def _tell(self, which: int, callbacks: Callbacks, name: str, args: tuple[Any, ...]) -> None:
        try:
            getattr(callbacks, name)(*args)
        except Exception as error:
            text = f"{name} of a {type(callbacks).__name__} failed"
            self._repeated_errors.log((which, name), text, error)
