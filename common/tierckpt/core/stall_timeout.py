"""Stall timeout: how long to wait for work elsewhere, depending on its progress.

A slow store is waited for as long as it accepts bytes. A store that hangs is not: a job must come
to its end. The agent reports since when its flushes have made no progress. An agent that does not
answer counts as making no progress.
"""

from __future__ import annotations

QUIET_SECONDS, SLOWEST_BYTES_PER_SECOND, MOST_QUIET_SECONDS = 600.0, 10e6, 1500.0
"""A disk or store has failed when it is quiet for QUIET_SECONDS plus the time that the node's
shards take at SLOWEST_BYTES_PER_SECOND (a file system may report nothing before it has written
all). The limit is MOST_QUIET_SECONDS: other ranks wait in a collective, and gloo ends that after
30 minutes."""


def most_quiet_seconds(nbytes: int) -> float:
    """Return how long a level may be quiet while it takes `nbytes` of a node."""
    return min(QUIET_SECONDS + nbytes / SLOWEST_BYTES_PER_SECOND, MOST_QUIET_SECONDS)


class StallTimeout:
    """One wait. All times come from one monotonic clock."""

    def __init__(self, quiet_seconds: float, now: float) -> None:
        """Start the wait at `now`, with no report yet."""
        self.quiet_seconds = quiet_seconds
        self._moved_at = now
        self._was_over = False

    def heard(self, quiet_seconds: float, now: float) -> None:
        """Record that nothing has moved for `quiet_seconds`, possibly since before this wait."""
        self._moved_at = now - quiet_seconds

    def is_over(self, now: float) -> bool:
        """Check now and then whether the time is over; call `heard` in between if an answer came.

        True only at the second time in a row: the whole machine may have been stopped, and then
        the process that has to answer continues in a moment.
        """
        over = now - self._moved_at > self.quiet_seconds
        was_over, self._was_over = self._was_over, over
        return over and was_over


__all__ = ["StallTimeout", "most_quiet_seconds"]
