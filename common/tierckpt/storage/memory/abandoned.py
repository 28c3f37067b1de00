"""Marks on folders in shared memory that no process uses: since when they are unused.

The first process that finds a folder unused leaves a mark in it. Its time comes from a clock that
counts from the machine's start and cannot be set. A mark of another boot, or of a namespace with
another clock, says nothing and is replaced. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from tierckpt._host import boot_id
from tierckpt.storage.files import durable

NAME = "seen.dead"
MOST_BYTES = 4096


def dead_seconds(folder: Path) -> float:
    """Seconds since the folder was marked as unused; 0.0 if it had no mark, and is marked now. The
    caller must hold the folder's gate and have found no process in it. Raises OSError."""
    path, now_seconds = folder / NAME, time.clock_gettime(time.CLOCK_MONOTONIC)
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        with durable.open_plain(path) as file:
            mark = json.loads(file.read(MOST_BYTES))
        seen_seconds = float(mark["monotonic_seconds"])
        if mark["clock"] == _clock() and seen_seconds <= now_seconds:
            return now_seconds - seen_seconds
    path.write_text(json.dumps({"clock": _clock(), "monotonic_seconds": now_seconds}))
    return 0.0


def forget(folder: Path) -> None:
    """Remove the mark, because the folder is in use again. Raises OSError."""
    durable.remove(folder / NAME)


def _clock() -> str:
    """Identity of the clock: of this boot, in this namespace."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/time")
    return f"{boot_id()} {space}"


__all__ = ["dead_seconds", "forget"]
