"""Ballot: one round of votes under way, with the versions that this rank voted about.

A rank whose vote is missing may itself wait for this rank's gradients: it skipped an optimizer step
that others made, so it reaches its boundaries one iteration later. The training thread therefore
waits for a vote only for a bounded time.
"""

from __future__ import annotations

import time

from tierckpt.core.levels import Level
from tierckpt.core.votes import Vote
from tierckpt.format.ids import VersionId

from .vote_exchange import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Cast, Rows

PATIENCE_SECONDS = 30.0
"""Time that the training thread waits for a vote. Where ranks make the same steps, all votes were
cast before the last gradients came, so only the network may delay one."""
PATIENCE_APART_SECONDS = 5.0
"""The same time where the votes read last came from different iterations."""


class Ballot:
    """One rank's view of a round of votes. Made by `Agreement`."""

    def __init__(
        self,
        pending: Cast,
        newest: VersionId,
        about: dict[Level, VersionId],
    ) -> None:
        """`newest`: the version of the vote's boundary; `about`: by level, the version that the
        state in the vote is about."""
        self._pending = pending
        self.newest = newest
        self.about = about
        self._result: Vote | None = None

    def is_here(self) -> bool:
        """True when `result` will not block. Any thread."""
        return self._pending.done()

    def came(self, patience_seconds: float) -> bool:
        """Wait for the votes. True when `result` will not block; False after the time is over, or
        when the votes cannot come before this rank continues. Training thread, with the gradients
        of this iteration complete."""
        if self._result is not None:
            return True
        deadline, pause = time.monotonic() + patience_seconds, FIRST_PAUSE_SECONDS
        while not self._pending.done():
            if time.monotonic() >= deadline or self._pending.passed_over():
                return self._pending.done()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return True

    def result(self) -> Vote:
        """Return the minimum of all ranks' votes; waits for it. Any thread."""
        if self._result is None:
            self._result = Vote.unpack(self._pending.wait())
        return self._result

    def rows(self) -> Rows:
        """Return the integers that ranks gave along with their votes; waits, too."""
        return self._pending.rows()

    def missing(self) -> list[int]:
        """Return the ranks that are known not to have voted yet."""
        return self._pending.missing()

    def passed_over(self) -> bool:
        """True when a rank is known to be ahead of this one without its vote. Thread: as `came`."""
        return self._pending.passed_over()
