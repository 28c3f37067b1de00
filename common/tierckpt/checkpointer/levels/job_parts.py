"""The parts that a rank of every job has, whatever it stores: a training state, or files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from tierckpt.agent.client import AgentClient
from tierckpt.callbacks import CallbackList
from tierckpt.config import Config
from tierckpt.coordination.agreement import Agreement
from tierckpt.coordination.ballots.vote_exchange import Ballots
from tierckpt.coordination.job_history import JobHistory
from tierckpt.coordination.peer_setup import Groups
from tierckpt.coordination.reports import Reports
from tierckpt.coordination.settings_check import JobTopology
from tierckpt.events import Callback, EventLog
from tierckpt.exporters.setting import exporters_of
from tierckpt.group import Group
from tierckpt.storage.memory.slot_pool import SlotPool

from .node_resources import NodeResources
from .place_in_job import place_in_job
from .sealed_versions import SealedVersions
from .tiers import Tiers


class JobParts:
    """One rank's event log, agreement with the other ranks, place on its node, and levels.

    Made in three steps: the constructor, `enter` and `connect`. Each part is known to `undo` as
    soon as it holds something. After the last step the owner ends them: it closes the agent, and
    calls `leave` and `close_log`. Training thread.
    """

    agreement: Agreement
    reports: Reports
    resources: NodeResources
    pool: SlotPool
    levels: Tiers
    history: JobHistory
    agent: AgentClient
    sealed: SealedVersions

    def __init__(
        self,
        config: Config,
        group: Group,
        topology: JobTopology,
        callbacks: CallbackList,
        on_event: Callback | None,
        undo: contextlib.ExitStack,
    ) -> None:
        """Open the event log. The callbacks, and the exporters of the settings, learn of the job
        before its first event. Raises OSError if `events_dir` cannot be used."""
        self.config, self.group, self.node = config, group, topology.node(group.rank)
        self.callbacks = callbacks
        self.topology, self._undo = topology, undo
        for exporter in exporters_of(config.export):
            callbacks.add(exporter)
        undo.callback(callbacks.close)
        callbacks.attach(place_in_job(config, group, self.node))
        by_child = config.agent != "inline"
        folder = config.events_dir or None
        self.log = EventLog(group.rank, folder, on_event, callbacks, by_child)
        undo.callback(self.log.close)

    def enter(self, ballots: Ballots, slots: int, version: Callable[[], int]) -> None:
        """Vote by `ballots` from now on, and take this rank's place on its node, with `slots`
        slots. Events are about `version()`. Collective; raises the errors of `NodeResources`."""
        config, group = self.config, self.group
        self.agreement = Agreement(
            group,
            ballots,
            config,
            lambda *safe: self.levels.promotion.local_safe(*safe),
            lambda: self.levels.promotion.retire(),
            lambda text: self.reports.notice_of_all(text),
        )
        self._undo.callback(self.agreement.close)
        self.reports = Reports(config, self.log, self.callbacks, self.agreement, version)
        if ballots.problem and group.rank == 0:
            self.reports.notice(ballots.problem, logging.INFO)
        self.resources = NodeResources(config, group, self.topology, slots, self.reports)
        self._undo.callback(self.resources.let_go)
        self.pool = self.resources.pool

    def connect(self, groups: Groups) -> None:
        """Make the levels, and find the node's agent. `groups`: see `redundancy_groups`."""
        config, group, topology = self.config, self.group, self.topology
        parts = self.resources, self.agreement, self.reports
        self.levels = Tiers(config, group, topology, groups, *parts)
        self.history, self.agent = self.levels.history, self.levels.agent
        self._undo.callback(self.agent.close, abandoned=True)
        self.levels.open()
        self.sealed = SealedVersions(config, group, self.levels)

    def leave(self, remove: bool) -> None:
        """Leave the other ranks and the node, after the agent is closed; emit what threads have
        reported until their end. `remove`: free memory. Not collective."""
        self.levels.run_notes.close()
        self.reports.say()
        self.resources.leave(remove)
        self.group.close()

    def close_log(self) -> None:
        """Close the event log, and the callbacks."""
        self.log.close()
        self.callbacks.close()


__all__ = ["JobParts"]
