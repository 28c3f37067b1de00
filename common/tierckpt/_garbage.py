"""Garbage collection, paused while many long-lived objects are made.

Python's collector runs after so many new objects, and looks at all that there are each time. While
a list of 80,000 tensors is made, that takes longer than the list. Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Context without automatic collections, for code that makes no garbage in cycles. Any thread;
    contexts may be nested."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


__all__ = ["paused"]
