"""Patience: how long to wait for what goes on elsewhere, by whether it gets on.

A store that is slow is waited for as long as it takes bytes, one that hangs is not: a job must come
to its end. The agent tells since when its flushes have not got on; one that does not answer gets on
with nothing.
"""

from __future__ import annotations

QUIET_SECONDS, SLOWEST_BYTES_PER_SECOND, MOST_QUIET_SECONDS = 600.0, 10e6, 1500.0
"""A disk, or a store, that has been quiet for so long, and what a node's shards take at that rate
besides (a file system may tell of nothing before all is with it), is as good as dead. No longer
than that, as other ranks wait in a collective, which gloo ends after half an hour."""


def most_quiet_seconds(nbytes: int) -> float:
    """How long a level may be quiet while it takes so many bytes of a node."""
    return min(QUIET_SECONDS + nbytes / SLOWEST_BYTES_PER_SECOND, MOST_QUIET_SECONDS)


class StallTimeout:
    """One wait. Times are of one clock that does not jump."""

    def __init__(self, quiet_seconds: float, now: float) -> None:
        """It begins now, and nothing is known yet."""
        self.quiet_seconds = quiet_seconds
        self._moved_at = now
        self._was_over = False

    def heard(self, quiet_seconds: float, now: float) -> None:
        """Nothing has moved for so long, says who would know; before this wait began, perhaps."""
        self._moved_at = now - quiet_seconds

    def is_over(self, now: float) -> bool:
        """Asked now and then, with something heard in between where somebody answers.

        True at the second time in a row only: all of a machine may have been stopped, and who is
        to answer goes on in a moment.
        """
        over = now - self._moved_at > self.quiet_seconds
        was_over, self._was_over = self._was_over, over
        return over and was_over


__all__ = ["StallTimeout", "most_quiet_seconds"]
