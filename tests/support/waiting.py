"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def is_seen(true: Callable[[], Any], patience_seconds: float) -> bool:
    """Poll until the condition holds; False if it does not within that time."""
    deadline = time.monotonic() + patience_seconds
    pause_seconds = 0.002
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_seconds)  # polling takes CPU time from the processes waited for
        pause_seconds = min(1.5 * pause_seconds, 0.05)
    return True


def until(true: Callable[[], Any], patience_seconds: float = 120.0) -> None:
    """Poll until the condition holds; it must, within that time."""
    assert is_seen(true, patience_seconds), "waited in vain"
