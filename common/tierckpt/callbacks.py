"""Callbacks: methods of a user's object, called on events of a job's checkpoints.

They are the same for every adapter::

    class Watch(tierckpt.Callbacks):
        def on_sealed(self, event):
            print(f"v{event.version} is in memory after {event.seconds['sealed_after']:.3f} s")

    ckpt.add_callbacks(Watch())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from .events import RepeatedErrorLog

if TYPE_CHECKING:
    import torch

    from .events import Event
    from .restored import Restored


class Job(Struct, frozen=True):
    """A rank's place in its job."""

    job_id: str
    """Identity of the job, the same after a restart."""
    rank: int
    ranks: int
    """Number of ranks."""
    local_rank: int
    """Index among the ranks of this node."""
    levels: tuple[str, ...]
    """Levels that versions go to."""


class Callbacks:
    """Subclass it and override the methods that you need.

    All methods are called on the training thread, on every rank. They must not start a collective
    unless all ranks do. An exception is logged (with its traceback once, then counted), and
    training continues.
    """

    def on_attached(self, job: Job) -> None:
        """A checkpointer starts; the first call. Under elastic Horovod each reset makes another
        one."""

    def on_event(self, event: Event) -> None:
        """Any event; those with a method of their own included."""

    def on_closed(self) -> None:
        """The checkpointer was closed or abandoned; the last call."""

    def on_allreduce_launched(self, params: Iterable[torch.Tensor]) -> None:
        """The reduction of these parameters' gradients is in progress or starts (during the
        backward pass)."""

    def on_step_boundary(self, version: int) -> None:
        """A boundary was passed: the state is that after `version` optimizer steps.

        It is called whether or not a checkpoint is taken. If one is taken, the state must not
        change before the next optimizer step.
        """

    def on_sealed(self, event: Event) -> None:
        """This rank's shard of `event.version` is complete in memory; called one boundary later."""

    def on_committed(self, event: Event) -> None:
        """This rank's shard of `event.version` is durable on `event.level`."""

    def on_restored(self, restored: Restored) -> None:
        """`restore()` has ended; also called if it found nothing (`restored.levels` is then
        empty)."""


COLLECTIVE = ("on_step_boundary", "on_restored")
"""Called after the fact, on all ranks at the same point. The other methods are called within a step
or a boundary, at points that differ between ranks."""


def check_callbacks(given: Iterable[Callbacks]) -> list[Callbacks]:
    """The callbacks as a list. Raises TypeError for an object that would fail at every call."""
    if isinstance(given, type | Callbacks) or not isinstance(given, Iterable):
        raise TypeError(f"callbacks is {given!r}; give a list of them, callbacks=[Watch()]")
    callbacks = list(given)
    for each in callbacks:
        if not isinstance(each, Callbacks):
            raise TypeError(
                f"{each!r} is not a tierckpt.Callbacks; derive a class from it, override the "
                "methods that you need, and give an object of that class (a function that receives "
                "events is on_event)"
            )
    return callbacks


class CallbackList:
    """Calls all registered callbacks. Training thread; calling never raises."""

    def __init__(self, registered: Iterable[Callbacks] = ()) -> None:
        """Register the callbacks. Raises TypeError as `check_callbacks` does; so does `add`."""
        self._registered = check_callbacks(registered)
        self._repeated_errors = RepeatedErrorLog()
        self._job: Job | None = None
        self.depth = 0
        """Number of nested calls of methods that are not COLLECTIVE."""
        self.on_added: Callable[[], None] = lambda: None
        """Called when one more is registered."""

    def __bool__(self) -> bool:
        return bool(self._registered)

    def add(self, callbacks: Callbacks) -> None:
        """Register one more."""
        self._registered += check_callbacks([callbacks])
        self.on_added()
        if self._job is not None:
            self._call_one(len(self._registered) - 1, callbacks, "on_attached", (self._job,))

    def attach(self, job: Job) -> None:
        """Call `on_attached` of all, and of those that are added later."""
        self._job = job
        self.call("on_attached", job)

    def close(self) -> None:
        """Call `on_closed` of all, once."""
        if self._job is not None:
            self._job = None
            self.call("on_closed")

    def call(self, name: str, *args: Any) -> None:
        """Call the method `name` of all."""
        nested = name not in COLLECTIVE
        self.depth += nested
        try:
            for which, callbacks in enumerate(self._registered):
                self._call_one(which, callbacks, name, args)
        finally:
            self.depth -= nested

    def _call_one(self, which: int, callbacks: Callbacks, name: str, args: tuple[Any, ...]) -> None:
        try:
            getattr(callbacks, name)(*args)
        except Exception as error:
            text = f"{name} of a {type(callbacks).__name__} failed"
            self._repeated_errors.log((which, name), text, error)
