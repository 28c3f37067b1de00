"""Onward: what follows for other versions and levels once one is complete on all local disks.

The ballots tell every rank at the same boundary (`agreement`). Older versions may go then, and the
new one goes on from the nodes' disks, as in SCR: to other nodes and to the persistent level. The
agents do all that; each is told here, by the ranks of its node, what to begin with and what to
leave alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection
from dataclasses import replace

from tierckpt.agent.client import AgentClient
from tierckpt.agent.flusher import MOST_SUPERSEDED
from tierckpt.agent.protocol import FlushOrder
from tierckpt.config import Config
from tierckpt.coordination.agreement import Agreement
from tierckpt.coordination.job_history import JobHistory
from tierckpt.coordination.peer_setup import PeerSetup
from tierckpt.core.ledger import DONE
from tierckpt.core.levels import PEER, PERSISTENT, Level
from tierckpt.core.retention import Best
from tierckpt.core.stall_timeout import most_quiet_seconds
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import VersionId
from tierckpt.group import Group, Node
from tierckpt.replicas.drift import Spared
from tierckpt.storage.memory.job_directory import JobDirectory

Order = functools.partial[FlushOrder]
"""How a node's agent is told to flush a version; what is about that version is still to come."""


def flush_order(
    config: Config, group: Group, node: Node, job: JobDirectory, host: str
) -> Order | None:
    """Of this rank's node; None when it is for another rank there to tell the agent."""
    if node.first != group.rank:
        return None
    return functools.partial(
        FlushOrder,
        directory=config.directory,
        here=node.ranks,
        node=f"{host}, {job.path}{_device_of(job)}",
    )


def _device_of(job: JobDirectory) -> str:
    """Containers may share a host's name, and have memories of their own at the same path."""
    with contextlib.suppress(OSError):
        return f" on device {job.path.stat().st_dev:x}"
    return ""


class Promotion:
    """One rank's part. All ranks are told the same of versions, so all come to the same.

    Training thread. Nothing here waits (but see `Backlog`), or is collective. What it is given
    stays its owner's: it gives orders to the agent, and enters into the agreement's books what
    becomes of the peer level.
    """

    def __init__(
        self,
        best: Best,
        agent: AgentClient,
        agreement: Agreement,
        peers: PeerSetup,
        history: JobHistory,
        order: Order | None,
        backlog: Backlog,
        spared: Spared | None = None,
    ) -> None:
        """`best`: of the local level. `order`: see `flush_order`. `promotion` is asked to go on at
        every boundary. `spared` hears what is complete there."""
        self._best, self._agent, self._agreement = best, agent, agreement
        self._peers, self._history, self._order = peers, history, order
        self.backlog = backlog
        self.spared = spared or Spared()
        self._to_flush: dict[VersionId, VersionFacts] = {}
        """Versions under way to the persistent level."""
        self.ordered: VersionId | None = None
        """The last version that was to be flushed and could be."""

    def restart(self) -> None:
        """A run has begun that goes on from an earlier one's: its best versions stay."""
        self._best.restart(self._history.metrics())
        self.backlog.restart()

    def taken(self, facts: VersionFacts, levels: Collection[Level]) -> None:
        """A version is on its way to these levels."""
        if PERSISTENT in levels:
            self.flush_when_safe(facts)

    def flush_when_safe(self, facts: VersionFacts) -> None:
        """A version is to go to the persistent level."""
        self._to_flush[facts.id] = facts

    def awaits(self, id_: VersionId) -> bool:
        """Whether the version is still to be flushed."""
        return id_ in self._to_flush

    def local_safe(self, safe: VersionId, largest_bytes: int, metric: float | None) -> None:
        """A version is complete on all local levels: older ones may go, and it goes on.

        `largest_bytes` is the size of its largest shard.
        """
        self._best.add(safe, metric)
        self.spared.whole(safe)
        self.retire()
        self.protect(safe)
        self._flush(safe, largest_bytes, metric)

    def retire(self) -> None:
        """It is known of one more version whether it is complete on all local levels."""
        local, lineage = self._agreement.local, self._history.lineage
        void = [id_ for id_ in local.broken if id_ not in local.open]  # else it is tried again
        # What peers can bring back stays until they can bring back something newer.
        keep = self._agreement.peer.protected() | self._best.versions | self.backlog.versions
        keep |= self.spared.versions
        self._agent.retire(local.safe, lineage, keep, void)

    def protect(self, safe: VersionId) -> None:
        """A version that is complete on all local levels goes to the other nodes."""
        if self._peers.ready:
            self._agreement.open_later(PEER, safe)
            if not self._peers.protect(safe):
                self._agreement.tell(PEER, safe, DONE)

    def _flush(self, safe: VersionId, largest_bytes: int, metric: float | None) -> None:
        facts = self._to_flush.pop(safe, None)
        for id_ in [i for i in self._to_flush if i < safe]:
            self._to_flush.pop(id_)  # it broke
        if facts is None:
            return
        self.ordered = safe
        order = None
        if self._order is not None:
            facts = replace(facts, metric=metric)
            order = self._order(facts=facts, largest_bytes=largest_bytes)
        self.backlog.add(safe, order)


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
        """Another run begins: what waited is not its."""
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
        self._agreement.open_later(PERSISTENT, id_)
        self._agreement.tell(PERSISTENT, id_, DONE)
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
        self._agreement.open_later(PERSISTENT, id_)
        if order is None:
            self._agreement.tell(PERSISTENT, id_, DONE)
        else:
            self._agent.flush(order)


__all__ = ["Backlog", "Promotion", "flush_order"]
