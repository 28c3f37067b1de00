"""Priority: the agent yields the processor and the disk to training."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import time
from pathlib import Path

SHORTEST_SLICE_NANOSECONDS = 100_000
"""The kernel gives no less."""
TRIES = 5


def lower_priority(nice: int) -> None:
    """Lower the priority of this process, which has one thread, below the training's, for CPU and
    disk. A refusal of the system is ignored."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    with contextlib.suppress(OSError):
        _lower_session(nice)
    number = {"x86_64": 251, "aarch64": 30}.get(platform.machine())
    if number is not None:
        best_effort_lowest = 2 << 13 | 7
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, best_effort_lowest)


def shorten_slices() -> None:
    """Let the calling thread run soon after it wakes up, for a short time, at the same share of the
    processor. For a thread that mostly waits for a device: with long slices it would have to wait
    for those of all others after each wait. Linux 6.12 and newer; ignored elsewhere."""
    number = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
    if number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        asked = _SchedAttr(ctypes.sizeof(_SchedAttr), nice=nice, runtime=SHORTEST_SLICE_NANOSECONDS)
        ctypes.CDLL(None, use_errno=True).syscall(number, 0, ctypes.byref(asked), 0)


class _SchedAttr(ctypes.Structure):
    """`struct sched_attr` of sched_setattr(2). For ordinary threads, `runtime` is the slice."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def _lower_session(nice: int) -> None:
    """Lower the priority of this process's session, if the process leads it. Raises OSError.

    Where Linux groups processes by session (sched(7), autogroup), niceness counts only within a
    session, and one process alone in its session gets as much CPU as all trainers in theirs. The
    machine allows ten such changes a second.
    """
    if os.getsid(0) != os.getpid():
        return
    for _ in range(TRIES):
        with contextlib.suppress(BlockingIOError):
            Path("/proc/self/autogroup").write_text(str(nice))
            return
        time.sleep(0.1)


__all__ = ["lower_priority", "shorten_slices"]
