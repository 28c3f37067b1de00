"""Promotion: the next steps after a version is complete on all local disks.

All ranks learn from the votes, at the same boundary, that it is complete (`agreement`). Then older
versions may be removed, and the new one goes from the nodes' disks to other nodes and to the
persistent level, as in SCR. The agents do the work; here the ranks of a node give its agent the
orders.
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
"""Makes the order to a node's agent to flush a version, from the arguments about that version."""


def flush_order(
    config: Config, group: Group, node: Node, job: JobDirectory, host: str
) -> Order | None:
    """Return the flush order of this rank's node; None if another rank there gives the orders."""
    if node.first != group.rank:
        return None
    return functools.partial(
        FlushOrder,
        directory=config.directory,
        here=node.ranks,
        node=f"{host}, {job.path}{_device_of(job)}",
    )


def _device_of(job: JobDirectory) -> str:
    """Name the device of the job's folder: containers with the same host name may have different
    memories at the same path."""
    with contextlib.suppress(OSError):
        return f" on device {job.path.stat().st_dev:x}"
    return ""


class Promotion:
    """One rank's promotion of versions. All ranks receive the same facts, so all decide the same.

    Training thread. Nothing here waits (except `Backlog`), and nothing is collective. All arguments
    stay their owners'. Gives orders to the agent, and records the state of the peer level in the
    agreement.
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
        """`best`: the best versions of the local level. `order`: see `flush_order`. `backlog`: its
        `go_on` is called at every boundary. `spared` receives versions that are complete on the
        local level."""
        self._best, self._agent, self._agreement = best, agent, agreement
        self._peers, self._history, self._order = peers, history, order
        self.backlog = backlog
        self.spared = spared or Spared()
        self._to_flush: dict[VersionId, VersionFacts] = {}
        """Versions that are to go to the persistent level when they are complete on local."""
        self.ordered: VersionId | None = None
        """The newest version that was handed over to be flushed."""

    def restart(self) -> None:
        """Start with a run that continues an earlier run: the best versions of that run stay."""
        self._best.restart(self._history.metrics())
        self.backlog.restart()

    def taken(self, facts: VersionFacts, levels: Collection[Level]) -> None:
        """Record that a version is on its way to these levels."""
        if PERSISTENT in levels:
            self.flush_when_safe(facts)

    def flush_when_safe(self, facts: VersionFacts) -> None:
        """Flush this version to the persistent level when it is complete on local."""
        self._to_flush[facts.id] = facts

    def awaits(self, id_: VersionId) -> bool:
        """True if the version is still to be flushed."""
        return id_ in self._to_flush

    def local_safe(self, safe: VersionId, largest_bytes: int, metric: float | None) -> None:
        """Promote a version that is complete on all local levels, and retire older ones.

        `largest_bytes` is the size of its largest shard.
        """
        self._best.add(safe, metric)
        self.spared.whole(safe)
        self.retire()
        self.protect(safe)
        self._flush(safe, largest_bytes, metric)

    def retire(self) -> None:
        """Have the agent remove versions that are no longer needed. Called when one more version
        was found complete, or broken, on the local levels."""
        local, lineage = self._agreement.local, self._history.lineage
        void = [id_ for id_ in local.broken if id_ not in local.open]  # open: it is tried again
        # A version that peers can rebuild stays until they can rebuild a newer one.
        keep = self._agreement.peer.protected() | self._best.versions | self.backlog.versions
        keep |= self.spared.versions
        self._agent.retire(local.safe, lineage, keep, void)

    def protect(self, safe: VersionId) -> None:
        """Protect a version that is complete on all local levels: parity goes to other nodes."""
        if self._peers.ready:
            self._agreement.open_later(PEER, safe)
            if not self._peers.protect(safe):
                self._agreement.tell(PEER, safe, DONE)

    def _flush(self, safe: VersionId, largest_bytes: int, metric: float | None) -> None:
        facts = self._to_flush.pop(safe, None)
        for id_ in [i for i in self._to_flush if i < safe]:
            self._to_flush.pop(id_)  # it is broken
        if facts is None:
            return
        self.ordered = safe
        order = None
        if self._order is not None:
            facts = replace(facts, metric=metric)
            order = self._order(facts=facts, largest_bytes=largest_bytes)
        self.backlog.add(safe, order)


class Backlog:
    """One rank's queue of at most one version that waits for an earlier flush to end.

    Training thread. Waits only with `when_busy="wait"`, and never for a hanging store."""

    def __init__(
        self,
        config: Config,
        agent: AgentClient,
        agreement: Agreement,
        passed_over: Callable[[int, str], None],
    ) -> None:
        """`passed_over` is called with a version that is dropped, and the reason."""
        self._agent, self._agreement, self._passed_over = agent, agreement, passed_over
        self._drops_superseded = config.persistent.drop_superseded
        self._patient = config.when_busy == "wait"
        self.restart()

    def restart(self) -> None:
        """Forget the version that waits: it is another run's."""
        self._waiting: tuple[VersionId, FlushOrder | None] | None = None
        self._superseded = 0
        """Flushes in a row that were ordered while an earlier one was in progress."""

    @property
    def versions(self) -> set[VersionId]:
        """Versions that must stay on the local disks until they are flushed."""
        waiting = {self._waiting[0]} if self._waiting is not None else set()
        return {*self._agreement.persistent.open, *waiting}

    def add(self, id_: VersionId, order: FlushOrder | None) -> None:
        """Flush a version as soon as no other flush is in progress.

        `order` is for the node's agent; None: another rank of the node gives it.
        """
        self.go_on()  # at this boundary the last flush may have been found complete
        if self._waiting is not None and self._patient:
            self._wait(*self._waiting)
        if self._waiting is not None:
            flushing = self._agreement.persistent.open[0].version
            why = f"v{flushing} is still being flushed by some node, and v{id_.version} is newer"
            self._passed_over(self._waiting[0].version, why)
        self._waiting = (id_, order)
        self.go_on()

    def _wait(self, id_: VersionId, order: FlushOrder | None) -> None:
        """Wait for this node's agent; then flush `id_`, the version that has waited.

        If this node's store hangs, other ranks do not know it and order the flush. So this rank
        opens the version in the agreement as they do, and marks it as done on this node: a version
        that no agent flushes must not fill the local disks.
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
        """Flush the waiting version if it may go now. Called at every boundary, when the votes have
        shown which nodes have ended the last flush."""
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
        """Order the waiting flush now, even if another is in progress; also at the end of the job,
        after which no boundary comes."""
        if self._waiting is None:
            return
        (id_, order), self._waiting = self._waiting, None
        self._agreement.open_later(PERSISTENT, id_)
        if order is None:
            self._agreement.tell(PERSISTENT, id_, DONE)
        else:
            self._agent.flush(order)


__all__ = ["Backlog", "Promotion", "flush_order"]
