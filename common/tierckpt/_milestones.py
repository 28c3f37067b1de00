"""Milestones of a training process, for the program that started it (`tierckpt run`).

A checkpointer reports them; without a listener that costs one comparison. Any thread; standard
library only.
"""

from __future__ import annotations

from collections.abc import Callable

ATTEMPT_VARIABLE = "TIERCKPT_ATTEMPT"
"""Set in a script's environment by `tierckpt run`: the number of the attempt, from 1."""
RESTART_VARIABLE = "TIERCKPT_RESTART"
"""Set by `tierckpt run` from the second attempt on: when the failure happened, was noticed, and all
processes of the last attempt had ended, in Unix seconds."""
ATTACH, REFUSED, ATTACHED, RESTORED, BOUNDARY, HALTING = names = (
    "attach",
    "refused",
    "attached",
    "restored",
    "boundary",
    "halting",
)
"""A checkpointer starts to attach; it is refused, and would be in each attempt; it is attached; a
restore is complete; a boundary is passed; the ranks have agreed to end the job early."""
listeners: list[Callable[[str], None]] = []
"""Called by `reached`."""


def listen(listener: Callable[[str], None]) -> None:
    """Call `listener` with the name of each milestone from now on. It must not raise."""
    listeners.append(listener)


def reached(name: str) -> None:
    """Report a milestone."""
    for listener in listeners:
        listener(name)


__all__ = [
    "ATTACH",
    "ATTACHED",
    "ATTEMPT_VARIABLE",
    "BOUNDARY",
    "HALTING",
    "REFUSED",
    "RESTART_VARIABLE",
    "RESTORED",
    "listen",
    "listeners",
    "reached",
]
