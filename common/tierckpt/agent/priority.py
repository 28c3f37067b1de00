"""Priority: the agent yields the processor and the disk to training."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import time
from pathlib import Path


def lower_priority(nice: int, pid: int = 0) -> None:
    """Have a process of one thread (0: this one) give way to the training, on the CPU and on the
    device. What the system refuses is let be."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, nice)
    with contextlib.suppress(OSError):
        _lower_session(nice, pid or os.getpid(), tries=1 if pid else 5)
    number = {"x86_64": 251, "aarch64": 30}.get(platform.machine())
    if number is not None:
        best_effort_lowest = 2 << 13 | 7
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, pid, best_effort_lowest)


def _lower_session(nice: int, pid: int, tries: int) -> None:
    """Where Linux groups processes by session (sched(7), autogroup), niceness counts within one
    alone, and one process in a session of its own has as much of the CPU as all that train in
    theirs. So the session is made nicer, too; only one that the process leads. Of such changes the
    machine takes ten a second: with more `tries` this waits for its turn. Raises OSError."""
    if os.getsid(pid) != pid:
        return
    for left in reversed(range(tries)):
        with contextlib.suppress(BlockingIOError):
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))
            return
        if left:
            time.sleep(0.1)


__all__ = ["lower_priority"]
