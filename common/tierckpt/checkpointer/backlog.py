"""The backlog: versions for the persistent level, one under way and one that waits.

A version is complete there only if every node flushes it, so all must flush the same ones; but
nodes are fast and slow, and each for itself would drop others. So none drops any. What is ordered
is flushed; the next one is ordered when the ballots say that every node is through, and what became
due meanwhile waits here, the newest of it alone. Every rank knows the same, and keeps and drops the
same; a slow store costs versions on that level, and no local disk fills up with what waits.
"""

from __future__ import annotations

from collections.abc import Callable

from tierckpt.agent.client import AgentClient
from tierckpt.agent.flusher import MOST_SUPERSEDED, FlushOrder
from tierckpt.config import Config
from tierckpt.coordination.agreement import Agreement
from tierckpt.core.schedule import DONE
from tierckpt.core.stall_timeout import most_quiet_seconds
from tierckpt.format.ids import VersionId


class Backlog:
    """One rank's part. Training thread; nothing waits, but with `when_busy="wait"`, and then for
    no store that hangs."""

    def __init__(
        self,
        config: Config,
        agent: AgentClient,
        agreement: Agreement,
        passed_over: Callable[[int, str], None],
    ) -> None:
        """`passed_over` hears of a version that is dropped, and why."""
        self._agent, self._agreement, self._passed_over = agent, agreement, passed_over
        self._drops_superseded = config.persistent.drop_superseded
        self._patient = config.when_busy == "wait"
        self.restart()

    def restart(self) -> None:
        """Another life begins: what waited is not its."""
        self._waiting: tuple[VersionId, FlushOrder | None] | None = None
        self._superseded = 0
        """Flushes in a row that were ordered while another one was under way."""

    @property
    def versions(self) -> set[VersionId]:
        """Those that must stay on the local disks."""
        waiting = {self._waiting[0]} if self._waiting is not None else set()
        return {*self._agreement.persistent.open, *waiting}

    def add(self, id_: VersionId, order: FlushOrder | None) -> None:
        """Flush a version, as soon as there is nothing else to be flushed.

        `order` is for the node's agent; None: another rank tells that.
        """
        self.go_on()  # this boundary may have told that nothing is under way any more
        if self._waiting is not None and self._patient:
            self._wait(*self._waiting)
        if self._waiting is not None:
            behind = self._agreement.persistent.open[0].version
            why = f"v{behind} is still being flushed by some node, and v{id_.version} is newer"
            self._passed_over(self._waiting[0].version, why)
        self._waiting = (id_, order)
        self.go_on()

    def _wait(self, id_: VersionId, order: FlushOrder | None) -> None:
        """For this node's agent; then `id_`, which has waited, is to be flushed.

        Other ranks do not know that this node's store hangs, and order it. So it is entered into
        the books here as there, as a version that this node is through with: what no agent takes
        on must not fill the local disks.
        """
        nbytes = order.largest_bytes * len(order.here) if order is not None else 0
        if self._agent.outlast(most_quiet_seconds(nbytes)):
            self.flush_last()
            return
        self._waiting = None
        self._agreement.open_flush(id_)
        self._agreement.tell("persistent", id_, DONE)
        self._passed_over(id_.version, "this node's part of an older one is stuck: its store hangs")

    def go_on(self) -> None:
        """At every boundary, when it is known which nodes are through with the last flush."""
        under_way = bool(self._agreement.persistent.open)
        if self._waiting is None:
            return
        if not under_way:
            self._superseded = 0
            self.flush_last()
        elif self._drops_superseded and self._superseded < MOST_SUPERSEDED:
            self._superseded += 1
            self.flush_last()

    def flush_last(self) -> None:
        """Order what waits, whatever is under way: at the end there is no later boundary."""
        if self._waiting is None:
            return
        (id_, order), self._waiting = self._waiting, None
        self._agreement.open_flush(id_)
        if order is None:
            self._agreement.tell("persistent", id_, DONE)
        else:
            self._agent.flush(order)


__all__ = ["Backlog"]
