"""Halt requests: a file in a job's checkpoint directory by which an operator ends the job early.

The conditions are those of SCR (Scalable Checkpoint/Restart, Moody et al., SC 2010): after a
version, before a time, when a given time of the allocation is left, at once. The request stays
until it is cleared: a job restarted with the request in place ends again, and reports why.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path

from tierckpt.core.decisions import HaltRequest
from tierckpt.errors import ConfigError, FormatError
from tierckpt.storage.durable import open_plain, replacing

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
    """Replace the request atomically. Raises OSError."""
    with replacing(Path(directory) / FILE_NAME) as temp:
        temp.write_text(request.encode())


def clear(directory: str | os.PathLike[str]) -> bool:
    """Remove the request; True when there was one. Raises OSError."""
    try:
        (Path(directory) / FILE_NAME).unlink()
    except FileNotFoundError:
        return False
    return True


# --- times ---------------------------------------------------------------------------------------


def parse_time(text: str, now: datetime) -> float:
    """Unix seconds of `HH:MM` (its next occurrence), or of an ISO 8601 date and time. Times without
    an offset are local. Raises ConfigError."""
    with contextlib.suppress(ValueError):
        clock = datetime.strptime(text, "%H:%M")
        then = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
        return (then if then > now else then + timedelta(days=1)).timestamp()
    with contextlib.suppress(ValueError, OverflowError):  # OverflowError: the year 1
        return datetime.fromisoformat(text).timestamp()
    raise ConfigError(
        f"{text!r} is not a time; give HH:MM, or date and time, for example 2026-12-24T18:00"
    )


def allocation_end(environment: Mapping[str, str]) -> float | None:
    """The end of this job's allocation in Unix seconds, if the environment has it: newer versions
    of Slurm set SLURM_JOB_END_TIME (22.05 does not). A time in the past is None: the allocation was
    extended since it was set."""
    seconds = _end_named(environment)
    return seconds if seconds is not None and seconds > time.time() else None


def why_no_end(environment: Mapping[str, str]) -> str:
    """The reason why `allocation_end` is None."""
    if END_VARIABLE not in environment:
        return f"{END_VARIABLE} is not set"
    value = f"{END_VARIABLE} is {environment[END_VARIABLE]!r}"
    if _end_named(environment) is None:
        return f"{value}, which is not a Unix time in seconds"
    return f"{value}, which is in the past"


def _end_named(environment: Mapping[str, str]) -> float | None:
    try:
        seconds = float(environment[END_VARIABLE])
    except (KeyError, ValueError):
        return None
    return seconds if math.isfinite(seconds) else None
