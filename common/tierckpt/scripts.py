"""For scripts whose loop cannot be touched: restore at the start, and a checkpoint at the end."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

from .checkpointer import Checkpointer

MEET_SECONDS = 30.0
"""At the end of a process: how long to wait for the other ranks before ending alone."""


def serve(checkpointer: Checkpointer, restore: bool, ends_with_script: bool) -> None:
    """Do what the script does not: restore now if asked to, and close when the process ends."""
    if restore:
        checkpointer.restore()
    if ends_with_script:
        close_at_exit(lambda: checkpointer)


def close_at_exit(current: Callable[[], Checkpointer | None]) -> Callable[[], None]:
    """When the process ends, close the checkpointer that `current()` then gives, if any.

    Returns what was registered with `atexit`, which calls in reverse order: who starts the
    communication library anew has to register it again, to be called before that is shut down.

    Close if all ranks get there; else every rank by itself makes durable what it has. A rank may
    have ended with an error that cannot be seen from here, and scripts end their communication
    before they end, so this never enters a collective that could hang.
    """
    pid = os.getpid()

    def close() -> None:
        checkpointer = current()
        if checkpointer is None or os.getpid() != pid:
            return  # or a forked child's copy
        failed = getattr(sys, "last_value", None) is not None
        if not failed and checkpointer.group.meet(MEET_SECONDS):
            checkpointer.close()
        else:
            checkpointer.abandon(commit_newest=not failed)

    return atexit.register(close)
