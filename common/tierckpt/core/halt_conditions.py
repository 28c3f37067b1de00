"""Halt conditions: when a job is asked to take a last checkpoint and end."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime

from tierckpt.errors import FormatError

KIND = "tierckpt-halt"
FORMAT_VERSION = 1
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


__all__ = ["FORMAT_VERSION", "KIND", "LAST_SECONDS", "HaltRequest", "Reason"]
