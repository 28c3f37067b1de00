"""The storage levels below shared memory, and their updates at the start of a run.

`history` has the versions that earlier runs of the job left there. `slot_handoff` hands new
versions to this node's agent, and `promotion` sends them to other nodes (`peers`) and to the
persistent level.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable

from tierckpt import _garbage
from tierckpt._children import module_path
from tierckpt.agent.address import AgentSettings
from tierckpt.agent.client import AgentClient
from tierckpt.agent.protocol import PersistentSettings, SessionSettings
from tierckpt.config import Config
from tierckpt.coordination.agreement import Agreement
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.former_nodes import FormerNodes
from tierckpt.coordination.job_history import JobHistory
from tierckpt.coordination.peer_setup import Groups, PeerSetup
from tierckpt.coordination.reports import Reports
from tierckpt.coordination.settings_check import JobTopology
from tierckpt.coordination.slot_handoff import SlotHandoff
from tierckpt.core.levels import INTERVALS, LOCAL, MEMORY, PEER, PERSISTENT
from tierckpt.core.retention import Best
from tierckpt.format.ids import Lineage, VersionId
from tierckpt.group import Group, Node
from tierckpt.lineage.run_notes import RunNotes
from tierckpt.replicas.drift import Drift, Spared
from tierckpt.restored import Restored
from tierckpt.storage.local.pins import LocalPins
from tierckpt.storage.local.store import LocalStore
from tierckpt.storage.memory.job_directory import JobDirectory

from .node_resources import NodeResources
from .promotion import Backlog, Promotion, flush_order


class Tiers:
    """One rank's access to the levels. Training thread.

    Owns its parts, but not `resources`, the slots in `pool`, `agreement` and `reports`.
    """

    def __init__(
        self,
        config: Config,
        group: Group,
        topology: JobTopology,
        groups: Groups,
        resources: NodeResources,
        agreement: Agreement,
        reports: Reports,
    ) -> None:
        """Make the parts, but start nothing yet. `groups`: see `redundancy_groups`."""
        self._config, self._group, self._node = config, group, topology.node(group.rank)
        self.resources, self.pool = resources, resources.pool
        self.agreement, self.reports = agreement, reports
        host, job = topology.hosts[group.rank], resources.job
        environment = topology.environment[self._node.first]
        may_start = topology.environment[group.rank] == environment
        self.agent = agent_client(config, group, job, self._node, environment, may_start)
        with contextlib.ExitStack() as undo:
            undo.callback(self.agent.close)
            self.agent.stall_watch.outlook = lambda: self.pool.outlook
            asks = config.uses("peer") and self._node.first == group.rank
            self.former_nodes = FormerNodes(self.agent, topology.hosts, asks)
            store = LocalStore(config.directory)
            directory = (resources.directory_is_new, resources.directory_is_another)
            self.history = JobHistory(
                config,
                group,
                job,
                store,
                host,
                self.former_nodes,
                *directory,
                lambda text: reports.notice(text, logging.WARNING),
            )
            self.run_notes = RunNotes(config, group, topology, reports)
            self.peers = PeerSetup(config, group, topology, self.agent, groups)
            self.promotion = Promotion(
                Best(config.local.keep_best, config.best == "lowest"),
                self.agent,
                agreement,
                self.peers,
                self.history,
                flush_order(config, group, self._node, job, host),
                Backlog(config, self.agent, agreement, reports.passed_over),
                Spared(config.replica_check_steps > 0 and group.size > 1),
            )
            self.slot_handoff = SlotHandoff(group, resources.pool, self.agent, agreement, reports)
            self.drift = Drift(
                config,
                group,
                self._node,
                job,
                self.history,
                agreement,
                self.promotion.spared,
                reports,
            )
            undo.pop_all()

    def open(self) -> None:
        """Find the agent, if there is one; `meet` starts it otherwise. If nodes are to meet, all of
        them would wait there for its start, so it is started now, beside the restore."""
        if self.peers.slow_coding and self._group.rank == 0:
            self.reports.notice(self.peers.slow_coding, logging.WARNING)
        self._have_agent(self.agent.start if self.peers.groups else self.agent.find)

    def _have_agent(self, have: Callable[[bool], None]) -> None:
        if self._config.uses(LOCAL):
            try:
                have(self._node.first == self._group.rank)
            except OSError as error:
                self.reports.notice(f"the agent could not be started: {error}", logging.ERROR)

    def collect(self) -> None:
        """Process the agent's messages."""
        awaited = bool(self.agreement.local.open or self.agreement.persistent.open)
        for message in self.agent.poll(awaited):
            self.reports.on_agent_message(message)

    def tell_of_stalls(self) -> None:
        """Report what hangs, during a wait for the agent."""
        for problem in self.agent.problems():
            self.reports.on_agent_message(problem)

    # --- a run begins, on all ranks -----------------------------------------------------------

    def begin_afresh(self) -> None:
        """Start a run that restores nothing; look first at versions of earlier runs. Collective."""
        self.history.look()
        self.history.begin_afresh()
        self.meet()
        old = self.history.newest()
        self.history.forget()
        if old is not None and self._group.rank == 0:
            self.reports.notice(
                f"{self._config.path} holds {old} of an earlier run, and restore() was not "
                "called: this run starts afresh beside it. The files of the earlier run are kept, "
                "but will not be restored any more; delete them, or call restore() before the "
                "first step",
                logging.WARNING,
            )

    def go_on_from(
        self, lineage: Lineage, result: Restored, error_barrier: ErrorBarrier | None
    ) -> None:
        """Start a run from the version that the live state equals: one of this job, of the newest
        run in `lineage`, or, with an empty lineage, of another job. Inside a block of
        `error_barrier`, if that is given. Collective."""
        self.run_notes.began = VersionId(lineage[-1][0], result.version) if lineage else None
        self.run_notes.fork = "" if lineage else self.run_notes.fork
        with _garbage.paused():  # the history of many ranks is many objects
            self._learn_from_history(lineage, result)
        self.meet(error_barrier)

    def _learn_from_history(self, lineage: Lineage, result: Restored) -> None:
        self.history.go_on_from(lineage, result.version)
        id_ = result.base or VersionId(result.generation, result.version)
        self._pin_as_elsewhere(id_)
        # Also if some shards came from other levels: those in memory may be the only copies.
        memory = id_ if MEMORY in result.levels else self.history.newest(MEMORY, id_)
        # Until a newer version is protected, a rebuilt one may have to be rebuilt again.
        peer = id_ if PEER in result.levels else self.history.newest_protected(id_)
        newest = {level: self.history.newest(level, id_) for level in INTERVALS if level != MEMORY}
        ages_seconds = {
            level: self.history.age_seconds(found, id_) for level, found in newest.items()
        }
        if PEER in result.levels:  # the rebuilt shards are on their way there (see `repair`)
            del ages_seconds[LOCAL]
        self.reports.restart(newest[PERSISTENT])
        safe = {MEMORY: memory, LOCAL: newest[LOCAL], PEER: peer}
        self.agreement.restart(safe, self.history.incomplete(), ages_seconds)
        self.promotion.restart()
        self.promotion.spared.restart(self.history.newest_clean(id_, LOCAL))

    def _pin_as_elsewhere(self, id_: VersionId) -> None:
        """Pin a version on this node that is pinned on some other node. A node that gets the
        version only now, by a repair (see `repair`), does not have the mark yet."""
        pins = {pin for each in self.history.pins for pin in each if pin.version == id_}
        pins_here = self.history.pins[self._group.rank]
        is_first = self._node.first == self._group.rank
        if not (pins.difference(pins_here) and is_first and self._config.uses(LOCAL)):
            return
        try:
            LocalPins(self._config.directory).pin([id_], any(pin.everywhere for pin in pins))
        except OSError as error:
            text = f"{id_} is pinned on other nodes, and could not be pinned here: {error}"
            self.reports.notice(text, logging.ERROR)

    def meet(self, error_barrier: ErrorBarrier | None = None) -> None:
        """Start the nodes' agents where they are missing, and have them meet under the name of the
        new run. Inside a block of `error_barrier`, if that is given. Collective.

        They are not started earlier if nobody waits for them: a start takes 0.1 s of work, and more
        of memory traffic, while a restore needs the cores."""
        self._have_agent(self.agent.start)
        history, former_nodes = self.history, self.former_nodes.alive
        self.run_notes.write(history.name, history.generation)

        def complain(text: str) -> None:
            self.reports.notice(text, logging.ERROR)

        run = history.secret, history.generation
        self.peers.meet(error_barrier or self._group, *run, former_nodes, complain)


def agent_client(
    config: Config,
    group: Group,
    job: JobDirectory,
    node: Node,
    environment: str,
    may_start: bool = True,
) -> AgentClient:
    """This rank's client of the node's agent, which is not started here.

    `environment`: the environment of the node's first rank. `may_start`: this rank's environment
    is the same, so that this rank may start the agent too."""
    persistent = None
    if config.uses("persistent"):
        level = dataclasses.asdict(config.persistent)
        where = {"node": node.index, "nodes": node.count, "best": config.best}
        persistent = PersistentSettings(**{**level, **where})
    return AgentClient(
        AgentSettings(
            root=str(job.root),
            folder=job.path.name,
            nice=config.agent_nice,
            linger_seconds=config.agent_linger_seconds,
            peers=config.uses(PEER),
            module_path=tuple(module_path()),
        ),
        SessionSettings(
            directory=config.directory,
            shard=group.rank,
            shards=group.size,
            keep_last=config.local.keep_last,
            keep_every=config.local.keep_every,
            persistent=persistent,
            codecs=config.local.codecs,
            ranks=node.ranks,
            trace_dir=os.path.abspath(config.trace_dir) if config.trace_dir else "",
        ),
        inline=config.agent == "inline",
        environment=environment,
        may_start=may_start,
    )


__all__ = ["Tiers", "agent_client"]
