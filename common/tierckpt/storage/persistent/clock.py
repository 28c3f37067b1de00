"""Time, handed in, so that tests of waiting do not wait."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Both times and sleep of one clock."""

    def now(self) -> float:
        """Unix time in seconds: for what several machines compare."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
