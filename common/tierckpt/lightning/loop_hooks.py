"""Places in Lightning's fit loop for which it has no callback.

Methods of one Trainer's loops are replaced by ones that call them, until `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replaced:
    """Takes the place of a method on one object. In a copy of the object (`copy.deepcopy(trainer)`
    or a pickle in a fit) it is the plain method."""

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner, self._name, self._call = owner, name, call
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what takes the place."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles: the owner's copy exists then, without its attributes."""
        return getattr, (self._owner, self._name)


class LoopHooks:
    """The replaced methods of one fit loop. Training thread."""

    def __init__(
        self, fit_loop: Any, after_batch: Callable[[], None], after_run: Callable[[], None]
    ) -> None:
        """`after_batch`: called after all work of a batch, validation and logging included.
        `after_run`: called after the training, unless it ends with an exception."""
        self._loop = fit_loop
        self._replaced: list[tuple[Any, str]] = []
        self._then(fit_loop.epoch_loop, "on_advance_end", after_batch)
        self._then(fit_loop, "run", after_run)

    def resume(self, amid_epoch: bool, place: Callable[[], None]) -> None:
        """Let the next epoch be a resumed one: `place` sets the state, and is called last before
        the first batch. If `amid_epoch`, the epoch's start is left out: it was before."""
        epoch, start = self._loop.epoch_loop, self._loop.on_advance_start

        def on_advance_start() -> None:
            self._give_back(self._loop, "on_advance_start")
            place() if not amid_epoch else None
            start() if not amid_epoch else None

        self._replace(self._loop, "on_advance_start", on_advance_start)
        if not amid_epoch:
            return

        def reset() -> None:
            """Keep the counters of the epoch."""
            self._give_back(epoch, "reset")

        begin = epoch.on_run_start

        def on_run_start(fetcher: Any) -> None:
            self._give_back(epoch, "on_run_start")
            begin(fetcher)
            place()

        self._replace(epoch, "reset", reset)
        self._replace(epoch, "on_run_start", on_run_start)

    def close(self) -> None:
        """Give all methods back."""
        for owner, name in [*self._replaced]:
            self._give_back(owner, name)

    def _then(self, owner: Any, name: str, call: Callable[[], None]) -> None:
        method = getattr(owner, name)

        def both(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            call()
            return result

        self._replace(owner, name, both)

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        Replaced(owner, name, method)
        self._replaced.append((owner, name))

    def _give_back(self, owner: Any, name: str) -> None:
        vars(owner).pop(name, None)
        if (owner, name) in self._replaced:
            self._replaced.remove((owner, name))


__all__ = ["LoopHooks", "Replaced"]
