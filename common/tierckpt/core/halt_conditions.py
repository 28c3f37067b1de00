"""Halt conditions: when a job is asked to take a last checkpoint and stop."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import NamedTuple

from tierckpt._text import in_words
from tierckpt.errors import FormatError

KIND = "tierckpt-halt"
FORMAT_VERSION = 1
LAST_SECONDS = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""The latest Unix time that is a valid date in every time zone."""

NEVER_SECONDS = 1 << 31
"""Stands for seconds until an end that nobody has announced; larger than all others."""


class Reason(enum.IntEnum):
    """Why a job stops early. The smallest of several counts, so ranks agree by a minimum."""

    SIGNAL = 0
    PREEMPTION = 1
    NOW = 2
    TIME = 3
    VERSION = 4
    ALLOCATION = 5
    NONE = 9

    @property
    def is_interruption(self) -> bool:
        """True when a signal, a preemption or the end of the allocation interrupts the job, not a
        request."""
        return self in (Reason.SIGNAL, Reason.PREEMPTION, Reason.ALLOCATION)

    def text(self) -> str:
        """The reason in words."""
        return {
            Reason.SIGNAL: "a rank received a signal to stop",
            Reason.PREEMPTION: "the cloud takes a node away",
            Reason.NOW: "a halt was requested",
            Reason.TIME: "the requested time has come",
            Reason.ALLOCATION: "its allocation ends",
            Reason.VERSION: "it has taken the version after which a halt was requested",
            Reason.NONE: "",
        }[self]


class HaltVote(NamedTuple):
    """One rank's vote on the end of the job."""

    reason: Reason = Reason.NONE
    silent: bool = False
    """The rank's script has evidently never called `should_exit()`."""
    seconds_left: int = NEVER_SECONDS
    """Seconds until the cloud takes this rank's node away."""


NO_HALT = HaltVote()
"""The vote of a rank without a wish to end."""


@dataclass(frozen=True)
class HaltRequest:
    """Conditions to stop; one of them is enough. Times are Unix seconds."""

    now: bool = False
    after_version: int | None = None
    """Stop once this version, or a later one, is taken."""
    before_seconds: float | None = None
    """Stop early enough to be done at this moment: `seconds_left` before it, or else the job's
    `halt_seconds_left`. Without either, stop at the first boundary after this moment."""
    seconds_left: float | None = None
    """Seconds before that moment, or before the end of the scheduler's allocation, to stop."""

    def nonsense(self) -> str:
        """Return which value is invalid and what is valid instead; empty when all are valid."""
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
        """Return the request with the job's `halt_seconds_left` filled in; 0 means not set."""
        asks = self.before_seconds is not None and self.seconds_left is None
        return replace(self, seconds_left=configured_seconds or None) if asks else self

    def reason(self, version: int, now_seconds: float, end_seconds: float | None) -> Reason:
        """Return the condition that the next boundary after `version` meets, or NONE. Pure.

        Ranks act at the next boundary on a condition found at this one, so the next version counts.
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
        """True when the request counts back from an end that is not known."""
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
        """Return this request with the values that `other` sets in place of its own."""
        plain = HaltRequest()
        changes = {
            f.name: getattr(other, f.name)
            for f in fields(self)
            if getattr(other, f.name) != getattr(plain, f.name)
        }
        return replace(self, **changes)

    def encode(self) -> str:
        """Return the text of the request's file."""
        head = {"kind": KIND, "version": FORMAT_VERSION}
        return json.dumps({**head, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def decode(text: str) -> HaltRequest:
        """Read the text that `encode` made. Raises FormatError."""
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
            raise FormatError(f"not a halt request: {text[:80]!r} ({in_words(error)})") from error
        if wrong := request.nonsense():
            raise FormatError(f"not a halt request that a job can act on: {wrong}")
        return request


__all__ = [
    "FORMAT_VERSION",
    "KIND",
    "LAST_SECONDS",
    "NEVER_SECONDS",
    "NO_HALT",
    "HaltRequest",
    "HaltVote",
    "Reason",
]
