"""Halt requests: an operator's wish that a job end early, as a file in its checkpoints' directory.

The conditions are SCR's (Scalable Checkpoint/Restart, Moody et al., SC 2010): after a version,
before a time, when so many seconds of the allocation are left, at once. The request stays until it
is cleared: a job that is started again under it ends again, and says why.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tierckpt.errors import ConfigError, FormatError
from tierckpt.storage.files.regular_file import open_plain

FILE_NAME = "halt.json"
KIND = "tierckpt-halt"
FORMAT_VERSION = 1
END_VARIABLE = "SLURM_JOB_END_TIME"
LAST_SECONDS = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""Unix time, in every time zone one that can be told as a date."""


class Reason(enum.IntEnum):
    """Why a job ends early; of several the smallest is told, so ranks agree by a minimum."""

    SIGNAL = 0
    NOW = 1
    TIME = 2
    VERSION = 3
    ALLOCATION = 4
    NONE = 9

    @property
    def is_interruption(self) -> bool:
        """True when nobody wants the job to end: its processes or its allocation do."""
        return self in (Reason.SIGNAL, Reason.ALLOCATION)

    def text(self) -> str:
        """For people."""
        return {
            Reason.SIGNAL: "a signal told some rank to end",
            Reason.NOW: "a halt was asked for",
            Reason.TIME: "its time is over",
            Reason.ALLOCATION: "its allocation ends",
            Reason.VERSION: "it has the version after which a halt was asked for",
            Reason.NONE: "",
        }[self]


@dataclass(frozen=True)
class HaltRequest:
    """The conditions; any of them is enough. Times are Unix seconds."""

    now: bool = False
    after_version: int | None = None
    """End when this version, or a later one, is taken."""
    before_seconds: float | None = None
    """End in time before this moment. What is in time, `seconds_left` says, or else the job's
    `halt_seconds_left`; without either it ends at the first boundary after that moment."""
    seconds_left: float | None = None
    """How long before that, and before the end of the scheduler's allocation, is in time."""

    def nonsense(self) -> str:
        """What no job can act on, and what is valid instead; empty when all makes sense."""
        if self.after_version is not None and self.after_version < 0:
            return f"after version {self.after_version}: versions are numbers from 0 on"
        for name in ("before_seconds", "seconds_left"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < math.inf:
                return f"{name} is {seconds:g}: it is a finite number of seconds, 0 or more"
        if self.before_seconds is not None and self.before_seconds >= LAST_SECONDS:
            return f"before_seconds is {self.before_seconds:g}: that is the year 9999, or later"
        return ""

    def with_margin(self, configured_seconds: float) -> HaltRequest:
        """As a job reads it whose `halt_seconds_left` is that; 0: it is not set."""
        asks = self.before_seconds is not None and self.seconds_left is None
        return replace(self, seconds_left=configured_seconds or None) if asks else self

    def reason(self, version: int, now_seconds: float, end_seconds: float | None) -> Reason:
        """Which condition the next boundary after `version` meets, or NONE. Pure.

        What is found out at one boundary happens at the next, so the next version counts.
        `end_seconds` is the end of the allocation, if that is known.
        """
        if self.now:
            return Reason.NOW
        margin_seconds = self.seconds_left or 0
        if self.before_seconds is not None and now_seconds >= self.before_seconds - margin_seconds:
            return Reason.TIME
        if self.after_version is not None and version + 1 >= self.after_version:
            return Reason.VERSION
        last_seconds = None if self.seconds_left is None else end_seconds
        if last_seconds is not None and now_seconds >= last_seconds - margin_seconds:
            return Reason.ALLOCATION
        return Reason.NONE

    def unknown(self, end_seconds: float | None) -> bool:
        """True when it asks for seconds before an end that nobody named."""
        return bool(self.seconds_left) and self.before_seconds is None and end_seconds is None

    def text(self) -> str:
        """The conditions in words."""
        parts = ["now"] if self.now else []
        if self.after_version is not None:
            parts.append(f"after version {self.after_version}")
        margin = f"{self.seconds_left:g} seconds" if self.seconds_left is not None else ""
        if self.before_seconds is not None:
            when = datetime.fromtimestamp(self.before_seconds).astimezone()
            how_long = margin or "the job's halt_seconds_left"
            parts.append(f"{how_long} before {when:%Y-%m-%d %H:%M:%S %Z}")
        if margin:
            parts.append(f"when {margin} of the allocation are left")
        return ", or ".join(parts)

    def merged(self, other: HaltRequest) -> HaltRequest:
        """With what `other` sets in place of what is there."""
        plain = HaltRequest()
        changes = {
            f.name: getattr(other, f.name)
            for f in fields(self)
            if getattr(other, f.name) != getattr(plain, f.name)
        }
        return replace(self, **changes)

    def encode(self) -> str:
        """As the file has it."""
        head = {"kind": KIND, "version": FORMAT_VERSION}
        return json.dumps({**head, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def decode(text: str) -> HaltRequest:
        """The inverse of `encode`. Raises FormatError."""
        try:
            found = json.loads(text)
            if found["kind"] != KIND or found["version"] > FORMAT_VERSION:
                raise FormatError(f"no halt request that this release can read: {text[:80]!r}")
            after, before = found["after_version"], found["before_seconds"]
            left = found["seconds_left"]
            request = HaltRequest(
                now=bool(found["now"]),
                after_version=None if after is None else int(after),
                before_seconds=None if before is None else float(before),
                seconds_left=None if left is None else float(left),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise FormatError(f"not a halt request: {text[:80]!r} ({error!r})") from error
        if wrong := request.nonsense():
            raise FormatError(f"not a halt request that a job can act on: {wrong}")
        return request


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
