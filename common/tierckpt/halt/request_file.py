"""Halt requests: an operator's wish that a job end early, as a file in its checkpoints' directory.

The conditions are SCR's (Scalable Checkpoint/Restart, Moody et al., SC 2010): after a version,
before a time, when so many seconds of the allocation are left, at once. The request stays until it
is cleared: a job that is started again under it ends again, and says why.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path

from tierckpt.core.halt_conditions import HaltRequest
from tierckpt.errors import ConfigError, FormatError
from tierckpt.storage.files.durable import open_plain

FILE_NAME = "halt.json"
END_VARIABLE = "SLURM_JOB_END_TIME"


# --- the file ------------------------------------------------------------------------------------


def read(directory: str | os.PathLike[str]) -> HaltRequest | None:
    """The request in a directory; None without one. Raises OSError, FormatError."""
    try:
        with open_plain(Path(directory) / FILE_NAME) as file:
            content = file.read()
    except FileNotFoundError:
        return None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"not a halt request: {content[:40]!r} ({error})") from error
    return HaltRequest.decode(text)


def write(directory: str | os.PathLike[str], request: HaltRequest) -> None:
    """Put the request in place of one that is there, atomically. Raises OSError."""
    folder = Path(directory)
    temp = folder / f".{FILE_NAME}.{socket.gethostname()}.{os.getpid()}.tmp"
    try:
        temp.write_text(request.encode())
        temp.replace(folder / FILE_NAME)
    except OSError:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)
        raise


def clear(directory: str | os.PathLike[str]) -> bool:
    """Remove the request; True when there was one. Raises OSError."""
    try:
        (Path(directory) / FILE_NAME).unlink()
    except FileNotFoundError:
        return False
    return True


# --- times ---------------------------------------------------------------------------------------


def parse_time(text: str, now: datetime) -> float:
    """Unix seconds of `HH:MM` (the next one), or of a date and time as ISO 8601 writes them, in
    local time unless it names an offset. Raises ConfigError."""
    with contextlib.suppress(ValueError):
        clock = datetime.strptime(text, "%H:%M")
        then = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
        return (then if then > now else then + timedelta(days=1)).timestamp()
    with contextlib.suppress(ValueError, OverflowError):  # the latter: the year 1
        return datetime.fromisoformat(text).timestamp()
    raise ConfigError(
        f"{text!r} is no time; give HH:MM, or date and time, for example 2026-12-24T18:00"
    )


def allocation_end(environment: Mapping[str, str]) -> float | None:
    """When the scheduler ends this job, in Unix seconds, if its environment tells: that of newer
    versions of Slurm does (SLURM_JOB_END_TIME; 22.05 does not set it). One that is over is that of
    before the allocation was prolonged, and tells nothing."""
    seconds = _end_named(environment)
    return seconds if seconds is not None and seconds > time.time() else None


def why_no_end(environment: Mapping[str, str]) -> str:
    """Why `allocation_end` is None, in words."""
    if END_VARIABLE not in environment:
        return f"{END_VARIABLE} is not set"
    said = f"{END_VARIABLE} is {environment[END_VARIABLE]!r}"
    if _end_named(environment) is None:
        return f"{said}, which is no Unix time in seconds"
    return f"{said}, which is over already"


def _end_named(environment: Mapping[str, str]) -> float | None:
    try:
        seconds = float(environment[END_VARIABLE])
    except (KeyError, ValueError):
        return None
    return seconds if math.isfinite(seconds) else None
