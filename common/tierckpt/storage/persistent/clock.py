"""Clocks as arguments, so that tests of waiting do not wait."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time and sleep of one clock."""

    def now(self) -> float:
        """Unix time in seconds, to compare between machines."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        ...


class SystemClock:
    """The clock of this machine."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
