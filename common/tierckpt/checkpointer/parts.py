"""The parts of a checkpointer below the loop: made at attach, in the order of this file.

| part | attributes |
|---|---|
| the job | `config`, `group`, `adapter`, `_node`, `_state` |
| log and votes | `_callbacks`, `_log`, `_heartbeat`, `_agreement`, `_position`, `_reports` |
| levels | `_resources`, `_pool`, `_levels` with `_history` and `_agent`, `_sealed`, `_forks` |
| decisions | `_schedule`, `_meter`, `_rounds` |
| capture | `_active`, `_journal`, `_replicas`, `_unchanged`, `_epoch_ends`, `_data_witness` |

`CheckpointerCore` makes those of the loop, which call its hooks.
"""

from __future__ import annotations

import contextlib
from typing import Any

from tierckpt.callbacks import CallbackList
from tierckpt.config import Config
from tierckpt.coordination.ballots.vote_exchange import ballots_for
from tierckpt.coordination.peer_setup import Groups
from tierckpt.coordination.settings_check import JobTopology
from tierckpt.core.schedule import Schedule
from tierckpt.core.tuning.autotune import StepTimer
from tierckpt.core.votes import VOTE_WIDTH
from tierckpt.events import Callback
from tierckpt.goodput.heartbeat import Heartbeat
from tierckpt.group import Group
from tierckpt.hooks.epoch_ends import EpochEnds
from tierckpt.hooks.iterations import Unattached
from tierckpt.journal.journal import Journal
from tierckpt.journal.recorder import JournalRecorder
from tierckpt.lineage.fork import Forks
from tierckpt.replicas.monitor import ReplicaMonitor
from tierckpt.replicas.unchanged import Unchanged
from tierckpt.restored import Restored
from tierckpt.state.training_state import TrainingState

from .active_snapshot import ActiveSnapshot
from .adapter import Adapter
from .data_witness import DataWitness
from .levels.job_parts import JobParts
from .levels.rounds import Rounds
from .live_state import LiveState, Position


class CheckpointerParts:
    """The parts of a `Checkpointer` that call nothing of it. Training thread.

    Each method makes some of them, and gives them to `undo` as soon as they hold something.
    """

    _live: LiveState
    """Made with the loop's parts."""

    def __init__(
        self,
        group: Group,
        adapter: Adapter,
        state: TrainingState,
        config: Config,
        topology: JobTopology,
    ) -> None:
        """Start nothing. The last three: the result of `attach.agree`."""
        self.group, self.adapter, self.config = group, adapter, config
        self._state, self._node = state, topology.node(group.rank)
        self.restored = Restored(0)
        """The result of the last `restore()`."""

    def _join(
        self,
        topology: JobTopology,
        callbacks: CallbackList,
        on_event: Callback | None,
        begin_seconds: float,
        slots: int,
        undo: contextlib.ExitStack,
    ) -> None:
        """Open the event log, begin to vote, and take this rank's place on its node. Collective.
        The attach began at `begin_seconds`, by `time.monotonic()`."""
        config, group = self.config, self.group
        self._job = job = JobParts(config, group, topology, callbacks, on_event, undo)
        self._callbacks, self._log = callbacks, job.log
        self._heartbeat = Heartbeat(job.log, config.heartbeat_seconds, group.size, begin_seconds)
        self._position = Position()
        ballots = ballots_for(group, self._node, VOTE_WIDTH, config.peer.interface)
        job.enter(ballots, slots, lambda: self.version)
        self._agreement, self._reports = job.agreement, job.reports
        self._resources, self._pool = job.resources, job.pool

    def _connect_levels(self, groups: Groups) -> None:
        """Connect the levels, and make the parts that decide what goes there."""
        job = self._job
        job.connect(groups)
        self._levels, self._history, self._agent = job.levels, job.history, job.agent
        self._sealed = job.sealed
        host = job.topology.hosts[self.group.rank]
        about = self.config, self.group, self._node, host
        self._forks = Forks(*about, self._state, self._reports)
        self._schedule = Schedule(self.config)
        automatic = self._schedule.tuner.every_steps
        self._meter = StepTimer("persistent" in automatic) if automatic else None
        self._rounds = Rounds(self.config, self._schedule, self._meter, self._levels)

    def _prepare_copies(self, undo: contextlib.ExitStack) -> None:
        """Make the parts that read the state between a boundary and the next change."""
        about = self.config, self.group, self._state
        self._unchanged = Unchanged(self._state, self._reports.notice_of_all)
        self._epoch_ends = EpochEnds(self._state, self._reports.notice_of_all)
        witness = self.config.data_witness
        self._data_witness = DataWitness(witness, self.group, self._state, self._reports)
        self._active = ActiveSnapshot(
            self.config,
            self._state,
            self.group,
            self._pool,
            self._levels.slot_handoff,
            self._reports,
            self._meter,
            self.adapter.releases_by_layer,
            self._unchanged,
        )
        undo.callback(self._active.close)
        self._journal = self._make_journal()
        undo.callback(self._journal.close)
        self._replicas = ReplicaMonitor(
            *about,
            self._reports,
            self._active.submit,
            lambda: self._live.keep_apart(),
            self._levels.drift.alike,
            self._levels.drift.found,
        )

    def _make_journal(self) -> Journal:
        config, group = self.config, self.group
        if not config.local.journal_steps:
            return Journal(config, group, self._node)
        peers, active = self._levels.peers, self._active
        reads = self._state, active.capture, self._reports, active.submit
        return JournalRecorder(config, group, peers, *reads)

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep out of `copy.deepcopy(model)` and `torch.save(model)`, which include the hooks."""
        return (Unattached, ())

    # --- the position of the loop ---------------------------------------------------------------

    @property
    def version(self) -> int:
        """Completed optimizer steps."""
        return self._position.version

    @property
    def iteration(self) -> int:
        """The result of `restore()`, plus the calls of `step()` since then
        (`boundary="explicit"`)."""
        return self._position.iteration

    @property
    def metric(self) -> float | None:
        """The metric of the current state, see `step`. The one of rank 0 counts."""
        return self._position.metric

    @metric.setter
    def metric(self, value: float | None) -> None:
        self._position.metric = value


__all__ = ["CheckpointerParts"]
