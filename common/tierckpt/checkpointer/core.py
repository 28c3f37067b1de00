"""The training side: capture at the boundary, release by layer, barrier before the step, seal,
commit.

`CheckpointerCore` has the parts of a checkpointer, and the code that runs in hooks and at
boundaries; `Checkpointer` has the methods for scripts. Everything that depends on the gradient
library is in the `Adapter`.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Unpack

import torch

from tierckpt import _garbage, _milestones
from tierckpt._text import some
from tierckpt.callbacks import CallbackList, Callbacks, Job
from tierckpt.config import Config
from tierckpt.coordination.agreement import Agreement
from tierckpt.coordination.ballots.vote_exchange import ballots_for
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.peer_setup import Groups, redundancy_groups
from tierckpt.coordination.reports import Reports
from tierckpt.coordination.rollback_records import keep_record
from tierckpt.coordination.settings_check import JobTopology, agree_on_settings, refused
from tierckpt.core.halt_conditions import Reason
from tierckpt.core.levels import LEDGERS, LOCAL, MEMORY, Level
from tierckpt.core.schedule import Schedule
from tierckpt.core.tuning.autotune import StepTimer
from tierckpt.core.votes import VOID, VOTE_WIDTH
from tierckpt.errors import TierckptError
from tierckpt.events import Callback, EventLog, check_receiver
from tierckpt.exporters.setting import exporters_of
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import Lineage, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.goodput.heartbeat import Heartbeat
from tierckpt.group import Group, SingleGroup
from tierckpt.halt.controller import HaltController
from tierckpt.hooks.epoch_ends import EpochEnds
from tierckpt.hooks.install import Hooks
from tierckpt.hooks.iterations import Iterations, Unattached
from tierckpt.journal.journal import journal_of
from tierckpt.journal.replay import Replay
from tierckpt.journal.support import check_support
from tierckpt.lineage.fork import ForkOrder, Forks
from tierckpt.lineage.selection import PartReport, Selection
from tierckpt.proof.recorder import record_if_ordered
from tierckpt.replicas.monitor import ReplicaMonitor
from tierckpt.replicas.unchanged import Unchanged
from tierckpt.restore.progress import Progress
from tierckpt.restore.session import LoadedVersion, RestoreSession
from tierckpt.restore.verified_version import VerifiedVersion, all_finished
from tierckpt.restored import Restored
from tierckpt.settings import Settings
from tierckpt.snapshot.snapshot import Snapshot
from tierckpt.snapshot.staging import normal_mode
from tierckpt.state.training_state import TrainingState, label_optimizers
from tierckpt.state.validate import refuse_model
from tierckpt.storage.memory.job_directory import job_directory
from tierckpt.storage.routed.folders import FileFolders
from tierckpt.tracing.recorder import open_trace

from . import attach, shutdown
from .active_snapshot import ActiveSnapshot
from .adapter import Adapter, Handle, check_adapter
from .boundary import Boundary
from .node_resources import NodeResources
from .repair import repair
from .save_now import SaveNow, Sealed
from .tiers import Tiers

HEAVY = (
    "{names} in the state_dict() of optimizers, besides state and options, are copied at every "
    "boundary while the training waits. Store these tensors in optimizer.state, under their "
    "parameters: then they are copied during the allreduce"
)
WAIT_SECONDS = 60.0
ORPHANS = (
    "{names}: an optimizer steps this parameter, but the model no longer has it (did the forward "
    "pass replace it?). After a restart the optimizer has the model's parameter instead, and only "
    "restore(strict=False) accepts this state. Change the values in place without gradients, or "
    "make them a buffer, or give the optimizer the new parameter"
)


def _load_later(value: Any) -> None:
    """Load no values of the adapter: those of a later record follow."""


def as_number(metric: Any) -> float:
    """Convert to a float. Raises TypeError for anything but one number."""
    try:
        return float(metric.detach() if isinstance(metric, torch.Tensor) else metric)
    except (TypeError, ValueError, RuntimeError):
        text = f"metric must be one number or a one-element tensor, not a {type(metric).__name__}"
        raise TypeError(text) from None


class CheckpointerCore(abc.ABC):
    """The part of a `Checkpointer` that scripts do not call. Training thread."""

    version = 0
    """Completed optimizer steps."""
    iteration = 0
    """The result of `restore()`, plus the calls of `step()` since then (`boundary="explicit"`)."""
    metric: float | None = None
    """The metric of the current state, see `step`. The one of rank 0 counts."""
    restored: Restored
    """The result of the last `restore()`."""
    _released = 0
    """Number of calls of `_release`: the progress of a rank if forward passes are boundaries."""
    _parted: VersionId | None = None
    """The value of `Agreement.parted` that was reported last."""
    _folders: FileFolders | None = None
    """Folders of routed files; None before the first use."""
    _restored_paths: Mapping[str, str] | None = MappingProxyType({})
    """Paths of restored files by name; None before they are written."""
    _went_back = False
    """The last restore chose an older version than the newest one."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer
        | Sequence[torch.optim.Optimizer]
        | Mapping[str, torch.optim.Optimizer],
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
        self.config: Config
        try:
            refuse_model(model)
            optimizers = label_optimizers(optimizer)
            reduced = self.adapter.reduced_parameters()
            untrained = self.adapter.untrained_parameters()
            with _garbage.paused():
                self._state = TrainingState(
                    model, optimizers, extra, extra_per_rank, reduced, untrained
                )
                attach.check_state(self._state)
        except TierckptError as error:
            raise refused(error, self.group) from error.__cause__
        self.config, topology = agree_on_settings(settings, config_file, self.group)
        try:
            check_support(
                self.config, self._state, self.adapter.repeats_steps, self.adapter.step_class
            )
        except TierckptError as error:
            raise refused(error, self.group) from error.__cause__
        self._state.forward_changes(self.config.forward_changes)
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
            self._report_problems(unwell, unprotected)
            self._join(topology, groups, undo)
            self._watch(model, undo)
            self._halt = HaltController(
                self.config, self.group.rank, self._node, self._reports.notice
            )
            undo.callback(self._halt.close)
            record_if_ordered(self)
            undo.callback(self._adapter_closed)
            self.adapter.attached(Handle(self))
            shutdown.at_exit(self._end_with_process)
            undo.pop_all()
        self._heartbeat.attached(self._history.job)
        _milestones.reached(_milestones.ATTACHED)

    def _report_problems(self, *severe: str) -> None:
        """Report `severe` problems if they are not empty, settings without effect, and state that
        is not stored or is stored in a way of its own."""
        for text in severe:
            if text and self.group.rank == 0:
                self._reports.notice(text, logging.ERROR)
        if idle := self.config.idle:
            self._warn(f"without persistent_path there is no effect of {some(idle)}")
        if omitted := attach.left_out(self._state):
            self._say(omitted, logging.INFO)
        for text in attach.own_ways(self._state):
            self._warn(text)

    def _open_books(
        self, on_event: Callback | None, begin_seconds: float, undo: contextlib.ExitStack
    ) -> None:
        """Open the event log and the votes of all ranks. The attach began at `begin_seconds`."""
        for exporter in exporters_of(self.config.export):
            self._callbacks.add(exporter)
        undo.callback(self._callbacks.close)
        self._callbacks.attach(self._job())
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
            self._say_of_all,
        )
        undo.callback(self._agreement.close)
        self._reports = Reports(
            self.config, self._log, self._callbacks, self._agreement, lambda: self.version
        )
        if ballots.problem and self.group.rank == 0:
            self._reports.notice(ballots.problem, logging.INFO)

    def _say_of_all(self, text: str) -> None:
        """Warn of something that all ranks know."""
        self._reports.notice(text, logging.DEBUG if self.group.rank else logging.WARNING)

    def _job(self) -> Job:
        """This rank's place in the job, for callbacks."""
        rank, ranks = self.group.rank, self._node.ranks
        levels = tuple(str(e) for e in LEDGERS if e == MEMORY or self.config.uses(e))
        job_id = job_directory(self.config).job
        return Job(job_id, rank, self.group.size, ranks.index(rank), levels)

    def _join(self, topology: JobTopology, groups: Groups, undo: contextlib.ExitStack) -> None:
        """Connect the levels, and make the parts that copy into slots."""
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
        self._rounds = Boundary(
            config, self._schedule, self._meter, agreement, self._pool, self._levels, reports
        )
        self._demand = SaveNow(config, group, self._pool, agreement, self._levels)
        self._unchanged = Unchanged(self._state, self._say)
        self._epoch_ends = EpochEnds(self._state)
        self._active = ActiveSnapshot(
            config,
            self._state,
            group,
            self._pool,
            self._levels.slot_handoff,
            reports,
            self._meter,
            self.adapter.releases_by_layer,
            self._unchanged,
        )
        undo.callback(self._active.close)
        parts = self._state, self._active.capture, reports, self._active.submit
        self._journal = journal_of(config, group, *parts)
        undo.callback(self._journal.close)
        self._replicas = ReplicaMonitor(
            config,
            group,
            self._state,
            reports,
            self._active.submit,
            self._keep_apart,
            self._levels.drift.alike,
            self._levels.drift.found,
        )

    def _watch(self, model: torch.nn.Module, undo: contextlib.ExitStack) -> None:
        """Install the hooks that show the begin and end of iterations and optimizer steps."""
        self._ahead = 0
        """1 if the live state contains the optimizer step of an iteration whose `step()` call is
        still to come."""
        self._closed = self._shutdown = self._saving = False
        self._iterations = Iterations(
            self.config.boundary,
            boundary=self._boundary,
            before_step=self._before_step,
            made_step=self.adapter.step_completed,
            keep_streams=self._active.capture.keep_streams,
            say=self._say,
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
            self._say,
            self._trace,
            self.adapter.extra_syntax,
        )
        undo.callback(self._own_hooks.close)

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep out of `copy.deepcopy(model)` and `torch.save(model)`, which include the hooks."""
        return (Unattached, ())

    # --- the boundary ---------------------------------------------------------------------------

    def _boundary(self, force: bool = False) -> None:
        self.adapter.boundary_begins(force)
        self._own_hooks.unsaved.boundary(speaks=self.group.rank == 0)
        begin = time.perf_counter()
        self._active.finish()
        self.version += self._iterations.pass_boundary()
        if not self._history.lineage:
            self._levels.begin_afresh()
        agreed = self._rounds.hear()
        if self._rounds.has_lost:
            self._rounds.has_lost = False
            self._active.capture.look_at_all()
        if self._agreement.parted is not None:
            self._part()
        place = self.iteration if self._iterations.explicit else self._released
        self._replicas.compare(agreed, self._agreement.rows, place)
        self._unchanged.compare(agreed.unchanged)
        id_ = VersionId(self._history.generation, self.version)
        if self._agreement.superseded_earlier(id_.generation):
            self._resources.clear(self._node)
        unattended = self._halt.receive(agreed)
        if self._halt.reason is not Reason.NONE:
            _milestones.reached(_milestones.HALTING)
        take, vote = self._rounds.decide(self.version, agreed, force), self.adapter.vote()
        stopped = self._replicas.refusing or self._agreement.parted is not None
        if stopped:
            if self._replicas.asking:  # the result may be that nothing differs
                self._schedule.requested |= frozenset(take)
            take = ()
            if force:
                details = self._replicas.suspicion or "the details are known in a few steps"
                self._reports.lost(self.version, f"replicas differ: {details}")
        sound, local = not stopped and vote != VOID, LOCAL in take
        safe = self._agreement.local.safe
        self._journal.boundary(id_, self._facts, self._packed, sound, local, safe)
        snapshot = self._open_snapshot(id_, take, vote == VOID) if take else None
        halt, check = self._halt.vote(self.version), self._replicas.vote(place)
        row, unchanged = self._replicas.row(), self._unchanged.count
        self._rounds.vote(id_, begin, take, halt, vote, check, unchanged, row)
        self._replicas.begin(self.version, self._active.release_early)
        if snapshot is not None:
            self._active.begin(snapshot, begin, self._trace)
        if self._trace is not None:
            self._trace = self._trace.boundary(self.version, begin)
        self._heartbeat.boundary(self.version, begin, self._history.name)
        self.adapter.boundary_passed(agreed.adapter)
        if self._forks.marks.needs is not None:
            self._forks.marks.settle(self._agreement.local.safe)
        _milestones.reached(_milestones.BOUNDARY)
        self._callbacks.call("on_step_boundary", self.version)
        if self._replicas.error is not None:
            self._levels.drift.wait()
            self._replicas.raise_error()
        if force or not (unattended or agreed.no_close == 0):
            return
        self.close()
        if unattended:
            interrupted = self._halt.reason.is_interruption
            raise SystemExit(self.config.halt_exit_status if interrupted else 0)

    def _part(self) -> None:
        """Report once that ranks make different numbers of optimizer steps."""
        self._halt.end_alone()
        parted = self._agreement.parted
        if parted is None or parted == self._parted:
            return
        self._parted, together = parted, self._agreement.together
        self._pool.void(parted)
        place = f"in iteration {self.iteration}" if self._iterations.explicit else "at a boundary"
        at = f"rank {self.group.rank} is at v{self.version} {place}"
        number = together.version if together is not None else None
        self._replicas.part(parted.version, number, at, self._agreement.missing)

    def _open_snapshot(
        self, id_: VersionId, levels: tuple[Level, ...], void: bool
    ) -> Snapshot | None:
        """Begin a version: capture the state that changes first. A failure breaks the version and
        not the training. With `void` the adapter rejects the version."""
        # First in the ledgers: even after a failure all ranks have the same list of versions.
        self._agreement.open(id_, levels)
        facts = self._facts(id_)
        self._levels.promotion.taken(facts, levels)
        if void:
            self._levels.slot_handoff.broken(id_)
            return None
        taken = self._active.take(facts, levels, self._measured, self._packed)
        if orphans := self._state.new_orphans():
            self._warn(ORPHANS.format(names=some(orphans)))
        if heavy := self._state.new_heavy():
            self._warn(HEAVY.format(names=heavy))
        return taken

    def _facts(self, id_: VersionId) -> VersionFacts:
        """The facts of a version of the current state, without the metric; equal on all ranks."""
        return VersionFacts(
            job=self._resources.job.job,
            run_id=self._history.name,
            id=id_,
            shards=self.group.size,
            lineage=self._history.lineage,
            iteration=self._at(),
            iteration_counts=self._iterations.counts,
            complete=self._agreement.local.safe,
            suspect=self._replicas.suspicion,
        )

    def _packed(self) -> Any:
        """The adapter's values, after a last check which parameters are each rank's own."""
        self._keep_apart()
        return self.adapter.pack()

    def _measured(self) -> float | None:
        """The metric on rank 0, if it is a finite number; None on other ranks."""
        metric = None if self.metric is None or self.group.rank else as_number(self.metric)
        return metric if metric is not None and math.isfinite(metric) else None

    def _id(self) -> VersionId:
        return VersionId(self._history.generation, self.version)

    def _at(self) -> int:
        """The number that `restore()` will return: calls of `step()`, or optimizer steps."""
        if self._iterations.explicit:
            return self.adapter.resume_iteration(self._live_iteration)
        return self.version

    @property
    def _live_iteration(self) -> int:
        """Calls of `step()` up to the live state, including one that is still to come."""
        return self.iteration + self._ahead

    @property
    def _steps_made(self) -> int:
        """Completed optimizer steps, including those since the last boundary."""
        return self.version + self._iterations.steps

    # --- a restore ------------------------------------------------------------------------------

    def _restore(
        self,
        version: int | None,
        strict: bool,
        bar: Progress,
        fork: ForkOrder,
        repeats: bool = True,
    ) -> Restored:
        """Restore, and make the journal's steps again if it `repeats`."""
        begin = time.perf_counter()
        # The version in progress is valid: no step has changed the state yet.
        self._agreement.even_out()  # the copier may wait for a vote
        error_barrier = ErrorBarrier(self.group)
        with error_barrier:
            self.complete()
            self._journal.pause()
            self._agreement.void()
            self._agent.wait(None)
            self._collect()
            restore_session = RestoreSession(
                self.config,
                error_barrier,
                self._state,
                self._history,
                self._reports,
                bar,
                begin,
                self._resources.left_elsewhere,
            )
        attempt = restore_session.find(version, self.version)
        if attempt is None:
            return self._begin_elsewhere(fork, bar, restore_session)
        repeats = repeats and strict and restore_session.takes_newest
        with contextlib.closing(attempt), self._replay_of(attempt, repeats) as replay:
            with _garbage.paused():
                load_adapter = self.adapter.load if replay is None else _load_later
                loaded: LoadedVersion | None = restore_session.load(attempt, strict, load_adapter)
                if replay is not None and loaded is not None:
                    loaded = replay.run(loaded, attempt.trouble, self.adapter.load)
            if loaded is not None:
                return self._begin_with(attempt, loaded, restore_session)
        return self._restore(version, strict, bar, fork, repeats=False)

    @contextlib.contextmanager
    def _replay_of(self, attempt: VerifiedVersion, repeats: bool) -> Iterator[Replay | None]:
        """The records of the journal that follow a version; None without any. Collective."""
        base, began, barrier = attempt.plan.id, self._history.began_last, ErrorBarrier(self.group)
        replay = None
        if repeats:
            replay = self._journal.records_after(base, began, barrier, self.adapter.step_class)
        if replay is None:
            yield None
            return
        with contextlib.closing(replay):
            self._iterations.repeating = True
            try:
                yield replay
            finally:
                self._iterations.repeating = False

    def _begin_with(
        self, attempt: VerifiedVersion, loaded: LoadedVersion, restore_session: RestoreSession
    ) -> Restored:
        """Begin a run with a loaded version. Collective. Raises StateTornError on all ranks if one
        of them cannot."""
        error_barrier = ErrorBarrier(self.group, attempt.incomplete)
        with error_barrier:
            self._go_on_from(loaded.manifest.facts.lineage, loaded.result, error_barrier)
            all_finished(attempt, error_barrier)
            self._went_back = restore_session.went_back(attempt)
            restore_session.settle_rollback(attempt)
            self._state.drop_gradients()  # left by an interrupted iteration
            books = (self._agreement, self._pool, self._reports)
            mended = not self._local_enabled() or repair(attempt, self.group, self._levels, *books)
            if not mended or loaded.result.base is not None:
                self._schedule.requested = frozenset((MEMORY, LOCAL))
            if self._went_back:  # records alone do not give up the newer versions of an earlier run
                self._schedule.requested |= self._journal.begins_with
            self._forks.marks.has_versions()
            return restore_session.report(loaded.result)

    def _begin_elsewhere(
        self, order: ForkOrder, bar: Progress, restore_session: RestoreSession
    ) -> Restored:
        """Begin this job, which has no version of its own, from a version of another job, if one
        was ordered; else from nothing. Collective, as `_begin_with`."""
        forked = self._forks.begin(order, bar, self.adapter.load)
        if forked is None:
            with ErrorBarrier(self.group) as error_barrier:
                self._levels.meet(error_barrier)
                return restore_session.report(Restored(0))
        self._levels.run_notes.fork = forked.result.forked_from
        error_barrier = ErrorBarrier(self.group, forked.found.incomplete)
        with contextlib.closing(forked.found), error_barrier:
            self._go_on_from((), forked.start, error_barrier)
            all_finished(forked.found, error_barrier)
            self._state.drop_gradients()
            if self._local_enabled():  # the source's version is held until then
                self._schedule.requested = frozenset((MEMORY, LOCAL))
            return restore_session.report(forked.result)

    def _load_from(
        self, source: str, selection: Selection, strict: bool, bar: Progress
    ) -> PartReport:
        self.complete()
        self._journal.pause()
        report = self._forks.load_from(source, selection, strict, bar)
        self._active.capture.forget()
        self._replicas.restart()
        self._unchanged.forget()
        self._schedule.requested |= self._journal.begins_with
        return report

    def _go_on_from(
        self, lineage: Lineage, result: Restored, error_barrier: ErrorBarrier | None = None
    ) -> None:
        """Set all counters to those of `result`, which the live state equals now. Inside a block of
        `error_barrier`, if that is given. Collective."""
        self.version, self.iteration, self.metric = result.version, int(result), None
        self._ahead = self._released = 0
        self._iterations.go_on_from(result)
        self._active.capture.forget()
        self._replicas.restart()
        self._unchanged.forget()
        self._schedule.start_at(result.version)
        self._levels.go_on_from(lineage, result, error_barrier)
        self._heartbeat.resumed(result.version)
        if lineage:
            id_ = VersionId(result.generation, result.version)
            self._journal.begin_at(id_, self._history.generation)
        self.adapter.resumed(self.iteration)

    def _carry_on(self, version: int, iteration: int, lineage: Lineage) -> None:
        """See `Handle.carry_on`."""
        self._history.look()
        live = Restored(iteration)
        live.version, live.generation = version, lineage[-1][0] if lineage else 0
        live.iteration_counts = self._iterations.counts
        self._go_on_from(lineage, live)
        keep_record(self.config, self.group.rank, self._history, self._reports)  # on a new node
        self._history.forget()

    # --- a version on demand --------------------------------------------------------------------

    def _save_now(self, end: float = math.inf) -> None:
        """Store the current state in memory and on local. Collective; waits for the disk until
        `end` (monotonic clock). A version that is not on disk then is broken."""
        with self._heartbeat.saving():
            self._save_until(end)

    def _save_until(self, end: float) -> None:
        self.wait(end - time.monotonic())
        before = VersionId(self._id().generation, self._steps_made)
        if self._iterations.steps > 0:
            self._ahead = 1
        self._saving = True
        try:
            trained = self._iterations.steps > 0
            with self.adapter.saving_now(), self._epoch_ends.between(trained):
                found = self._demand.commit(before, self._is_live)
                if found is Sealed.MOVED_ON:
                    self._history.take_again(self.version)
                if found is not Sealed.LIVE:
                    self._boundary(force=True)
        finally:
            self._saving = False
        self.wait(end - time.monotonic())
        self._demand.settle(self._id())
        if found is Sealed.MOVED_ON and self._agreement.memory.safe != self._id():
            self._save_as_it_was(before, end)

    def _is_live(self, manifest: Manifest, image: memoryview) -> bool:
        """True if the live state equals the sealed image bit for bit."""
        if self.adapter.keeps_boundary():
            return True
        live, sealed = self._facts(self._id()), manifest.facts
        if (live.iteration, live.iteration_counts, self._measured()) != (
            sealed.iteration,
            sealed.iteration_counts,
            sealed.metric,
        ):
            return False
        with normal_mode():
            return self._active.capture.is_unmoved(manifest, image, self._packed())

    def _save_as_it_was(self, id_: VersionId, end: float) -> None:
        """Store the state of the boundary, after an event said why the live state could not be
        stored. Collective."""
        self._warn(f"{id_} is stored as of its boundary; later changes could not be stored")
        self._demand.commit_as_it_is(id_)
        self.wait(end - time.monotonic())
        self._demand.settle(id_)

    def _no_moment(self) -> str:
        """The reason why the live state is no version, see `shutdown.no_moment`. Collective. An
        interrupt may have stopped some ranks before a boundary or its vote, and others after."""
        progress = (self._steps_made, self._agreement.turns)
        self._agreement.even_out()  # the copier may wait for a vote
        why, same_votes, level = shutdown.no_moment(
            self.group,
            *progress,
            self._agreement.parted is not None,
            self._state.torn,
            self._iterations.stepping,
        )
        if not same_votes:
            self._agreement.void()
            self.wait(WAIT_SECONDS)
            self._agreement.settle()
        if not level and self._agreement.parted is None:
            # From here on, equal version numbers would mean different iterations.
            self._agreement.parted = self._parted = VersionId(0, self.version)
        return why or self.adapter.inconsistent()

    # --- hooks ----------------------------------------------------------------------------------

    def _release(
        self,
        params: Iterable[torch.Tensor],
        reduction: torch.futures.Future[Any] | None,
        launched_seconds: float | None,
    ) -> None:
        """See `Handle.release`."""
        if self._trace is not None:
            params = list(params)
            self._trace.released(params, self.version, reduction, launched_seconds)
        self._released += 1
        if not self._iterations.explicit:
            self._agreement.passed(self._released)
        self._replicas.wake()
        if self._active.snapshot is not None:
            self._active.release(params)
        if self._callbacks:
            self._callbacks.call("on_allreduce_launched", params)

    def _before_step(self, label: str) -> None:
        """Called at the beginning of a registered optimizer's step."""
        if self.adapter.before_step(label):
            self._barrier()
            self._journal.before_step(label, self.adapter.reads_gradients)

    def _barrier(self) -> None:
        """Wait until the copy is complete: the state may change after this call. Also called before
        the step of an unregistered optimizer."""
        self.metric = None
        self._before_change()

    def _before_change(self) -> None:
        """Wait as `_barrier` does, before a change of weights outside optimizer steps."""
        begin = time.perf_counter()
        if self._active.snapshot is not None:
            self._active.finish()
        self._replicas.finish()
        self._journal.settle()
        self._heartbeat.barrier(begin)

    def _keep_apart(self) -> None:
        """Look for untrained parameters that are trained now but not reduced. They counted as equal
        on all ranks, and are each rank's own from now on."""
        trained = self.adapter.newly_unreduced()
        mistaken = self._state.placements.assumed_replicated(trained)
        if not mistaken:
            return
        self._state.placements.keep_apart(mistaken)
        self._active.capture.forget()
        self._replicas.forget()
        names = some([self._state.name_of(param) for param in mistaken])
        self._warn(self.adapter.newly_unreduced_notice.format(names=names))

    def _say(self, text: str, severity: int) -> None:
        """Emit a notice that is the same on all ranks: rank 0 at `severity`, others at DEBUG."""
        self._reports.notice(text, logging.DEBUG if self.group.rank else severity)

    def _warn(self, text: str) -> None:
        self._say(text, logging.WARNING)

    # --- the end --------------------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        """True after or during the end, and in a forked child: the checkpointer belongs to the
        parent process."""
        return self._closed or self._shutdown or os.getpid() != self._process

    def _uses_cuda(self) -> bool:
        return any(p.is_cuda for p in self._state.walk().params)

    def _local_enabled(self) -> bool:
        return self.config.uses("local")

    def _collect(self) -> None:
        """Process the messages of the agent."""
        self._levels.collect()

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
        self._forks.marks.settle(self._agreement.local.safe)
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

    @abc.abstractmethod
    def wait(self, timeout_seconds: float | None = None) -> bool:
        """See `Checkpointer`."""

    @abc.abstractmethod
    def complete(self) -> None:
        """See `Checkpointer`."""

    @abc.abstractmethod
    def close(self) -> None:
        """See `Checkpointer`."""

    @abc.abstractmethod
    def _end_with_process(self) -> None:
        """Called when the process ends and this was not closed."""
