"""Clock: whether the kernel's clock follows a time server.

No decision depends on a clock. Wrong clocks spoil timelines, and the times that `list` shows.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator

from .finding import Finding, Subject, absent, good, warning

_UNSYNCHRONIZED = 0x40
"""STA_UNSYNC of <linux/timex.h>."""
CURE = "start a time service: systemctl start chronyd (or systemd-timesyncd)"


class _Timex(ctypes.Structure):
    """The beginning of `struct timex`, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def kernel_clock() -> tuple[bool, float]:
    """True if the clock follows a server, and the bound of its error in seconds. Raises OSError
    where the kernel does not say (some containers)."""
    state = _Timex()
    library = ctypes.CDLL(None, use_errno=True)
    if library.adjtimex(ctypes.byref(state)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return not state.status & _UNSYNCHRONIZED, state.maxerror / 1e6


def synchronized(subject: Subject) -> Iterator[Finding]:
    """The state of the clock, by the kernel, or by chrony if that only watches it."""
    try:
        follows, error_seconds = kernel_clock()
    except OSError as error:
        yield absent("clock", f"the kernel does not say whether it is synchronized ({error})")
        return
    if follows:
        yield good("clock", f"synchronized, within {1000 * error_seconds:.3g} ms")
    elif chrony := _chrony():
        yield good("clock", f"synchronized by chrony: {chrony}")
    else:
        text = "follows no time server: timelines of several nodes do not match"
        yield warning("clock", text, CURE)


def _chrony() -> str:
    """The state that chrony reports; empty if it is not there, or follows no server."""
    if shutil.which("chronyc") is None:
        return ""
    done = subprocess.run(
        ["chronyc", "-n", "tracking"], capture_output=True, text=True, timeout=10.0
    )
    lines = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    found = {name.strip(): value.strip() for name, value in lines.items()}
    return found.get("System time", "") if found.get("Leap status") == "Normal" else ""
