"""Survivors: processes of a run that outlive its command.

Launchers give ranks sessions of their own, and a killed launcher leaves its ranks running. All have
the run's order in their environment, which identifies them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

from tierckpt.coordination.proof_order import VARIABLE

END_SECONDS = 10.0
"""Time to wait for the end of a process after SIGKILL."""


def end_survivors(folder: Path) -> int:
    """Kill all processes on this machine that have the run's order; returns their number. All have
    ended on return, except those stuck in the kernel."""
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
    """A pidfd for each, which the caller closes: a process number alone may have been reused."""
    mark = os.fsencode(f"{VARIABLE}={folder}")
    for number in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
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
