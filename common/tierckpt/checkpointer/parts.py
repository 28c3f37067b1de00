"""The parts of a checkpointer: made at attach, in the order of this file, and released at the end.

| part | attributes |
|---|---|
| the job | `config`, `group`, `adapter`, `_node`, `_state` |
| books | `_callbacks`, `_log`, `_heartbeat`, `_agreement`, `_position`, `_reports` |
| levels | `_resources`, `_pool`, `_levels` with `_history` and `_agent`, `_sealed`, `_forks` |
| decisions | `_schedule`, `_meter`, `_rounds` |
| capture | `_active`, `_journal`, `_replicas`, `_unchanged`, `_epoch_ends` |
| the loop | `_iterations`, `_trace`, `_own_hooks`, `_halt` |
| the live state as a whole | `_live`, `_restart`, `_save_now` |
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import time
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Unpack

import torch

from tierckpt import _milestones
from tierckpt.callbacks import CallbackList, Callbacks
from tierckpt.coordination.agreement import Agreement
from tierckpt.coordination.ballots.vote_exchange import ballots_for
from tierckpt.coordination.peer_setup import Groups, redundancy_groups
from tierckpt.coordination.reports import Reports
from tierckpt.coordination.settings_check import JobTopology
from tierckpt.core.schedule import Schedule
from tierckpt.core.tuning.autotune import StepTimer
from tierckpt.core.votes import VOTE_WIDTH
from tierckpt.events import Callback, EventLog, check_receiver
from tierckpt.exporters.setting import exporters_of
from tierckpt.goodput.heartbeat import Heartbeat
from tierckpt.group import Group, SingleGroup
from tierckpt.halt.controller import HaltController
from tierckpt.hooks.accumulation import Accumulation
from tierckpt.hooks.epoch_ends import EpochEnds
from tierckpt.hooks.install import Hooks
from tierckpt.hooks.iterations import Iterations, Unattached
from tierckpt.journal.journal import Journal
from tierckpt.journal.recorder import JournalRecorder
from tierckpt.lineage.fork import Forks
from tierckpt.proof.recorder import record_if_ordered
from tierckpt.replicas.monitor import ReplicaMonitor
from tierckpt.replicas.unchanged import Unchanged
from tierckpt.restored import Restored
from tierckpt.settings import Settings
from tierckpt.storage.routed.folders import FileFolders
from tierckpt.tracing.recorder import open_trace

from . import attach, shutdown
from .active_snapshot import ActiveSnapshot
from .adapter import Adapter, Handle, check_adapter
from .levels.node_resources import NodeResources
from .levels.place_in_job import place_in_job
from .levels.sealed_versions import SealedVersions
from .levels.tiers import Tiers
from .live_state import LiveState, Position
from .restart import Restart
from .rounds import Rounds
from .save_now import SaveNow


class CheckpointerParts(abc.ABC):
    """The parts of a `Checkpointer`, and what they call in it. Training thread."""

    restored: Restored
    """The result of the last `restore()`."""
    _folders: FileFolders | None = None
    """Folders of routed files; None before the first use."""
    _restored_paths: Mapping[str, str] | None = MappingProxyType({})
    """Paths of restored files by name; None before they are written."""
    _closed = _shutdown = False
    """True after the end, and during it."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: attach.Optimizers,
        *,
        adapter: Adapter | None = None,
        group: Group | None = None,
        extra: Mapping[str, Any] | None = None,
        extra_per_rank: Mapping[str, Any] | None = None,
        on_event: Callback | None = None,
        callbacks: Iterable[Callbacks] = (),
        config_file: str | os.PathLike[str] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self._process = os.getpid()
        begin = time.monotonic()
        _milestones.reached(_milestones.ATTACH)
        self.group: Group = group or SingleGroup()
        check_receiver(on_event)  # this and the next checks: while no rank waits for another
        self.adapter = check_adapter(adapter)
        self._callbacks = CallbackList(callbacks)
        given = model, optimizer, extra, extra_per_rank, settings, config_file
        self._state, self.config, topology = attach.agree(self.group, self.adapter, *given)
        self._node = topology.node(self.group.rank)
        # Nothing has been started yet.
        groups, unprotected = redundancy_groups(self.config, topology, self.group)
        slots = self.config.slots or (3 if self._uses_cuda() else 2)
        unwell = attach.check_health(self.config, self._state, self.group, self._node, slots)
        self.restored = Restored(0)
        with contextlib.ExitStack() as undo:  # a failed try must not disturb the next one
            undo.callback(self.group.close)
            self._open_books(on_event, begin, undo)
            self._resources = NodeResources(self.config, self.group, topology, slots, self._reports)
            undo.callback(self._resources.let_go)
            self._pool = self._resources.pool
            self._resources.tell_of_room(
                attach.shard_bytes(self._state, self.group.size), self.group, self._node
            )
            about = self.config, self.group, self._state, self._reports
            attach.report_problems(*about, unwell, unprotected)
            self._connect_levels(topology, groups, undo)
            self._prepare_copies(undo)
            self._watch_loop(model, undo)
            record_if_ordered(self)
            undo.callback(self._adapter_closed)
            self.adapter.attached(Handle(self))
            shutdown.at_exit(self._end_with_process)
            undo.pop_all()
        self._heartbeat.attached(self._history.job)
        _milestones.reached(_milestones.ATTACHED)

    def _uses_cuda(self) -> bool:
        return any(p.is_cuda for p in self._state.walk().params)

    def _open_books(
        self, on_event: Callback | None, begin_seconds: float, undo: contextlib.ExitStack
    ) -> None:
        """Open the event log and the votes of all ranks. The attach began at `begin_seconds`."""
        for exporter in exporters_of(self.config.export):
            self._callbacks.add(exporter)
        undo.callback(self._callbacks.close)
        self._callbacks.attach(place_in_job(self.config, self.group, self._node))
        folder = self.config.events_dir or None
        self._log = EventLog(self.group.rank, folder, on_event, self._callbacks)
        undo.callback(self._log.close)
        period = self.config.heartbeat_seconds
        self._heartbeat = Heartbeat(self._log, period, self.group.size, begin_seconds)
        ballots = ballots_for(self.group, self._node, VOTE_WIDTH, self.config.peer.interface)
        self._agreement = Agreement(
            self.group,
            ballots,
            self.config,
            lambda *safe: self._levels.promotion.local_safe(*safe),
            lambda: self._levels.promotion.retire(),
            lambda text: self._reports.notice_of_all(text),
        )
        undo.callback(self._agreement.close)
        self._position = Position()
        self._reports = Reports(
            self.config, self._log, self._callbacks, self._agreement, lambda: self.version
        )
        if ballots.problem and self.group.rank == 0:
            self._reports.notice(ballots.problem, logging.INFO)

    def _connect_levels(
        self, topology: JobTopology, groups: Groups, undo: contextlib.ExitStack
    ) -> None:
        """Connect the levels, and make the parts that decide what goes there."""
        config, group, agreement, reports = self.config, self.group, self._agreement, self._reports
        self._levels = Tiers(config, group, topology, groups, self._resources, agreement, reports)
        self._history, self._agent = self._levels.history, self._levels.agent
        undo.callback(self._agent.close, abandoned=True)
        self._levels.open()
        host = topology.hosts[group.rank]
        self._forks = Forks(config, group, self._node, host, self._state, reports)
        self._schedule = Schedule(config)
        automatic = self._schedule.tuner.every_steps
        self._meter = StepTimer("persistent" in automatic) if automatic else None
        self._rounds = Rounds(config, self._schedule, self._meter, self._levels)
        self._sealed = SealedVersions(config, group, self._levels)

    def _prepare_copies(self, undo: contextlib.ExitStack) -> None:
        """Make the parts that read the state between a boundary and the next change."""
        about = self.config, self.group, self._state
        self._unchanged = Unchanged(self._state, self._reports.notice_of_all)
        self._epoch_ends = EpochEnds(self._state)
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
        submit = self._active.submit
        self._journal = Journal(self.config.directory, self.group.size)
        if self.config.local.journal_steps:
            peers, capture = self._levels.peers, self._active.capture
            self._journal = JournalRecorder(
                self.config, self.group, peers, self._state, capture, self._reports, submit
            )
        undo.callback(self._journal.close)
        self._replicas = ReplicaMonitor(
            *about,
            self._reports,
            submit,
            lambda: self._live.keep_apart(),
            self._levels.drift.alike,
            self._levels.drift.found,
        )

    def _watch_loop(self, model: torch.nn.Module, undo: contextlib.ExitStack) -> None:
        """Install the hooks that show the begin and end of iterations and optimizer steps, and
        handle signals; make the parts that need to know what the loop has done."""
        say = self._reports.notice_of_all
        accumulation = Accumulation(self._state)
        self._iterations = Iterations(
            self.config.boundary,
            boundary=self._boundary,
            before_step=self._before_step,
            made_step=self.adapter.step_completed,
            stepped=accumulation.stepped,
            keep_streams=self._active.capture.keep_streams,
            say=say,
            step_class=self.adapter.step_class,
            no_calls=self.adapter.no_calls_notice,
        )
        self._trace = open_trace(self.config, self.group.rank, self._state.name_of, self._log)
        if self._trace is not None:
            undo.callback(self._trace.close)
        self._own_hooks = Hooks(
            model,
            self._state,
            self._iterations,
            self._barrier,
            self._before_change,
            say,
            self._trace,
            self.adapter.extra_syntax,
        )
        undo.callback(self._own_hooks.close)
        capture = self._active.capture
        place = self.group, self.adapter, self._state, self._position, self._iterations
        self._live = LiveState(*place, capture, self._replicas, self._unchanged, self._reports)
        about = self.config, self.group, self._live, self._levels
        going_on = self._journal, self._forks, self._schedule, self._heartbeat
        self._restart = Restart(*about, *going_on, accumulation, self.complete)
        take = partial(self._boundary, force=True)
        around = self._sealed, self._epoch_ends, self._heartbeat
        self._save_now = SaveNow(self.group, self._live, self._levels, *around, take, self.wait)
        self._halt = HaltController(self.config, self.group.rank, self._node, self._reports.notice)
        undo.callback(self._halt.close)

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep out of `copy.deepcopy(model)` and `torch.save(model)`, which include the hooks."""
        return (Unattached, ())

    # --- the end --------------------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        """True after or during the end, and in a forked child: the checkpointer belongs to the
        parent process."""
        return self._closed or self._shutdown or os.getpid() != self._process

    def _shut_down(self, remove: bool, abandoned: bool = False) -> None:
        self._levels.run_notes.end(self._halt.reason.text(), abandoned, self.version)
        self._adapter_closed()
        self._closed = True
        self._halt.close()
        self._own_hooks.close()
        # The copier would wait for layers that are never released.
        self._active.give_up("the job ended in the middle of an iteration")
        self._agreement.close()  # the copier may wait for the vote of a rank that ended
        self._active.close()
        self._journal.close(remove)
        self._replicas.restart()  # also frees its references to the state
        self._levels.drift.wait()
        if self._folders is not None:
            self._folders.close()
        self._agent.close(abandoned=abandoned)
        self._forks.marks.settle(self._agreement.local.safe, self._agreement.memory.safe)
        self._forks.marks.close()
        self._levels.run_notes.close()
        self._reports.say()
        self._resources.leave(remove)
        self.group.close()
        if self._trace is not None:
            self._trace.close()
        if abandoned:
            self._heartbeat.ended()
        self._log.close()
        self._callbacks.close()

    def _adapter_closed(self) -> None:
        try:
            self.adapter.closed()
        except Exception as error:
            self._reports.notice(f"the adapter could not detach: {error!r}", logging.ERROR)

    # --- what the parts call --------------------------------------------------------------------

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

    @abc.abstractmethod
    def _boundary(self, force: bool = False) -> None:
        """An iteration has ended. With `force` its version is taken, to all levels."""

    @abc.abstractmethod
    def _release(
        self,
        params: Iterable[torch.Tensor],
        reduction: torch.futures.Future[Any] | None,
        launched_seconds: float | None,
    ) -> None:
        """See `Handle.release`."""

    @abc.abstractmethod
    def _before_step(self, label: str) -> None:
        """The step of the registered optimizer of this label begins."""

    @abc.abstractmethod
    def _barrier(self) -> None:
        """The step of any optimizer begins: return when the state may change."""

    @abc.abstractmethod
    def _before_change(self) -> None:
        """Weights change outside a step: return when they may."""

    @abc.abstractmethod
    def complete(self) -> None:
        """See `Checkpointer`."""

    @abc.abstractmethod
    def wait(self, timeout_seconds: float | None = None) -> bool:
        """See `Checkpointer`."""

    @abc.abstractmethod
    def close(self) -> None:
        """See `Checkpointer`."""

    @abc.abstractmethod
    def _end_with_process(self) -> None:
        """Called when the process ends and this was not closed."""


__all__ = ["CheckpointerParts"]
