"""A ballot is one round of votes that is under way, and what this rank voted about in it.

A rank whose vote does not come may be waiting for this one's gradients: it skipped an optimizer
step that others made, so it passes its boundaries one iteration later. The training thread
therefore waits for a vote only for a bounded time.
"""

from __future__ import annotations

import time

from tierckpt.core.levels import Level
from tierckpt.core.votes import Vote
from tierckpt.format.ids import VersionId

from .vote_exchange import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Cast, Rows

PATIENCE_SECONDS = 30.0
"""The training thread waits this long for a vote. Where ranks make the same steps, all votes were
cast before the gradients came that the thread has had since, so only the network may delay one."""
PATIENCE_APART_SECONDS = 5.0
"""The same where the votes that were read last came from different iterations."""


class Ballot:
    """One rank's view of a round of votes. Made by `Agreement`."""

    def __init__(
        self,
        pending: Cast,
        newest: VersionId,
        about: dict[Level, VersionId],
    ) -> None:
        """`newest`: the version of the boundary of the vote; `about`: the version that its state
        of a level is about, for levels that have one."""
        self._pending = pending
        self.newest = newest
        self.about = about

    def came(self, patience_seconds: float) -> bool:
        """True when `result` will not wait; False when that took too long, or will not be before
        this rank goes on. Training thread, with the gradients of this iteration there."""
        deadline, pause = time.monotonic() + patience_seconds, FIRST_PAUSE_SECONDS
        while not self._pending.done():
            if time.monotonic() >= deadline or self._pending.passed_over():
                return self._pending.done()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return True

    def result(self) -> Vote:
        """The minimum of all ranks' votes, waiting for it. Any thread."""
        return Vote.unpack(self._pending.wait())

    def rows(self) -> Rows:
        """What ranks gave along with their votes, likewise."""
        return self._pending.rows()

    def missing(self) -> list[int]:
        """Ranks that are known not to have voted yet."""
        return self._pending.missing()

    def passed_over(self) -> bool:
        """True when a rank is known to be further than this one, without its vote. As `came`."""
        return self._pending.passed_over()
