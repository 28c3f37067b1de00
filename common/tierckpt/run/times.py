"""The times of a restart, from the failure to the first boundary of the next attempt."""

from __future__ import annotations

import contextlib
import json
import time

from tierckpt._milestones import BOUNDARY

from .job.channel import Message

PARTS = ("noticed", "ended", "forked", "script", "attach", "attached", "restored", BOUNDARY)
"""Moments, in order. Each part of a restart is the time from the moment before."""


class Times:
    """Moments of the current attempt, on rank 0. Seconds since the epoch."""

    def __init__(self, records: bool, path: str) -> None:
        self._records, self._path = records, path
        self._failed: float | None = None
        self._moments: dict[str, float] = {}

    def begin(self, order: Message) -> None:
        """An order to start an attempt has come."""
        self._failed, self._moments = order.get("failed"), {"noticed": time.time()}

    def note(self, name: str, at: float | None = None) -> bool:
        """Note a moment. True for the first boundary after a failure, with which the restart is
        complete."""
        if name in self._moments:
            return False
        self._moments[name] = time.time() if at is None else at
        complete = self._records and self._failed is not None and name == BOUNDARY
        if complete and self._path:
            line = {"failed": self._failed, **self._moments, "parts": self.parts()}
            with contextlib.suppress(OSError), open(self._path, "a") as file:
                file.write(json.dumps(line) + "\n")
        return complete

    def since_failure(self) -> str:
        """The failure, and the moments since then, in order; empty at a first start."""
        if self._failed is None:
            return ""
        return " ".join(f"{at:.6f}" for at in (self._failed, *self._moments.values()))

    def parts(self) -> dict[str, float]:
        """Seconds from each moment to the next."""
        assert self._failed is not None
        found, last = {}, self._failed
        for name in PARTS:
            if name in self._moments:
                found[name], last = self._moments[name] - last, self._moments[name]
        return found

    def text(self, attempt: int) -> str:
        """A line for the user."""
        parts = self.parts()
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
        total = sum(parts.values())
        return (
            f"attempt {attempt} passed its first boundary {total:.2f} s after the failure ({shown})"
        )


__all__ = ["PARTS", "Times"]
