"""The checkpointer of a rank outside its optimizer's process set: it takes no checkpoints.

Horovod lets every rank make the optimizer, and ranks outside the set step without reductions. So
one script runs on all ranks: on such a rank these methods do nothing, and no checkpoint contains
the rank's state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd

import tierckpt

OUTSIDE = (
    "rank %d is not in the optimizer's process set %s: its state is in no checkpoint, its "
    "restore() returns 0, and Horovod does not reduce its gradients. If it is to follow the other "
    "ranks, broadcast the result of their restore() to it"
)


class Outside:
    """The methods of a Checkpointer that loops call. None of them waits for another rank."""

    version = iteration = 0
    metric: float | None = None
    exit_reason = ""
    interrupted = False
    end: tierckpt.JobEnd | None = None

    def __init__(self) -> None:
        self.restored = tierckpt.Restored(0)
        self.closed = False

    def restore(self, *_: Any, **__: Any) -> tierckpt.Restored:
        """Restore nothing; returns 0."""
        return self.restored

    def should_exit(self) -> bool:
        """False."""
        return False

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """True: there is nothing to wait for."""
        return True

    def pin(self, version: int) -> tuple[str, ...]:
        """Nothing."""
        return ()

    unpin = pin

    def step(self, metric: float | None = None) -> None:
        """Nothing."""

    def save(self, now: bool = False) -> None:
        """Nothing."""

    def register(self, name: str, obj: Any, per_rank: bool = False) -> None:
        """Nothing."""

    def add_callbacks(self, callbacks: tierckpt.Callbacks) -> None:
        """Nothing: they would never be called."""

    def complete(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Only set `closed`."""
        self.closed = True

    abandon = close_or_abandon = close

    def __enter__(self) -> Outside:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stands_outside(optimizers: Iterable[Any]) -> bool:
    """True if all optimizers have one process set, and this rank is not in it. Logs a warning."""
    sets = [getattr(each, "process_set", hvd.global_process_set) for each in optimizers]
    if not sets or any(each is not sets[0] for each in sets) or sets[0].included():
        return False
    logging.getLogger("tierckpt").warning(OUTSIDE, hvd.rank(), sets[0].ranks)
    return True


__all__ = ["Outside", "stands_outside"]
