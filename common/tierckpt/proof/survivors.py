"""Processes of a run that outlive its command: launchers give ranks sessions of their own, and one
that is killed while it waits for them leaves them behind. All have the run's order in their
environment, and are found by it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

from tierckpt.coordination.proof_order import VARIABLE

END_SECONDS = 10.0
"""So long the end of one is waited for, after SIGKILL."""


def end_survivors(folder: Path) -> int:
    """Kill what was started with that run's order, on this machine; returns how many those were.
    Afterwards they have ended, but for one that the kernel holds."""
    ended = 0
    while found := [*_survivors(folder)]:
        for pidfd in found:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        stuck = [pidfd for pidfd in found if not select.select([pidfd], [], [], END_SECONDS)[0]]
        for pidfd in found:
            os.close(pidfd)
        ended += len(found)
        if stuck:
            break
    return ended


def _survivors(folder: Path) -> Iterator[int]:
    """A pidfd of each, the caller's: a number alone may be another process's by now."""
    mark = os.fsencode(f"{VARIABLE}={folder}")
    for number in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            pidfd = os.pidfd_open(number)
            try:
                theirs = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
            except OSError:
                theirs = []
            if mark in theirs and number != os.getpid():
                yield pidfd
            else:
                os.close(pidfd)


__all__ = ["end_survivors"]
