"""How long a folder in shared memory has been seen to be nobody's.

Whoever first sees it so leaves a mark there, by a clock that counts from the machine's start and
that nobody can set. A mark of another boot, or of a namespace whose clock is another one, tells
nothing, and is made anew. Standard library only.
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
    """Since when it has a mark; 0.0 where it had none, and has one now. Who asks has the folder to
    itself, and has seen that nobody lives there. Raises OSError."""
    path, now_seconds = folder / NAME, time.clock_gettime(time.CLOCK_MONOTONIC)
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        with durable.open_plain(path) as file:
            told = json.loads(file.read(MOST_BYTES))
        seen_seconds = float(told["monotonic_seconds"])
        if told["clock"] == _clock() and seen_seconds <= now_seconds:
            return now_seconds - seen_seconds
    path.write_text(json.dumps({"clock": _clock(), "monotonic_seconds": now_seconds}))
    return 0.0


def forget(folder: Path) -> None:
    """Somebody lives there again. Raises OSError."""
    durable.remove(folder / NAME)


def _clock() -> str:
    """Which clock it is: this boot's, in this namespace."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/time")
    return f"{boot_id()} {space}"


__all__ = ["dead_seconds", "forget"]
