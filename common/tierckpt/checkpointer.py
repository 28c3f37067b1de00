"""The front door: capture at the boundary, release by layer, barrier before the step, seal, commit.

`Checkpointer` is the whole training side. An adapter subclasses it, hands it a Group, and calls
`release` from where its library launches gradient reductions; everything else is here.

All public methods are for the training thread, and all ranks call them alike.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from . import attach, ending
from . import state as state_module
from .agreement import Agreement
from .alike import Roll, agree_on_settings
from .backlog import Backlog
from .ballots import ballots_for
from .berth import Berth
from .best import Best
from .callbacks import CallbackList, Callbacks
from .capture import Capture
from .comeback import Comeback
from .config import Config
from .events import Callback, EventLog
from .group import Group, SingleGroup
from .halting import Halting
from .haltrequest import Reason
from .handover import Handover
from .iterations import MIXED, Iterations, Unattached
from .lives import Lives
from .localstore import LocalStore
from .mending import keep, parities_to_mend, shards_to_mend
from .naming import Lineage, VersionId
from .onward import Onward, flush_order
from .peers import Peers, redundancy_groups
from .pinning import mark_everywhere
from .policy import BROKEN, DONE, LEVELS, VOTE_WIDTH, Decision, Schedule
from .pool import NoSlotError
from .progress import Progress
from .redundancy.groups import RedundancyGroup
from .reports import Reports
from .restore import Attempt, Restored, all_finished
from .snapshot import Copier, Head, Phase, Snapshot, SnapshotError
from .state import TrainingState, label_optimizers, refuse_model
from .stepwatch import Stepwatch
from .strangers import Strangers
from .trace import open_trace
from .tuning import UNKNOWN, Meter

WAIT_SECONDS = 60.0
EARLY_AFTER = 3
"""So many slow barriers in a row make `release="auto"` copy from the forward pass on."""
SLOW_BARRIER_SECONDS = 1e-3


class Checkpointer:
    """Checkpoints a replicated training state, layer by layer, while training goes on.

    Args:
        model: the module that is trained, wrapped (DDP, `torch.compile`) or not.
        optimizer: one optimizer, a sequence, or a dict of names and optimizers.
        group: the job's ranks; None for a single process.
        extra: objects with `state_dict`/`load_state_dict` that are alike on all ranks (scheduler,
            scaler); also torch and numpy generators.
        extra_per_rank: objects whose state is each rank's own (a data loader).
        on_event: called with every `Event`, on the training thread.
        callbacks: see `Callbacks`; `add_callbacks` adds more.
        config_file: TOML file with settings.
        settings: any field of `Config`, by its flat name (`local_every_steps=10`).

    Raises ConfigError for bad settings, UnsupportedStateError for state that cannot be taken.
    Creating one is collective: all ranks do it at the same point.
    """

    releases_by_layer = False
    """Set by adapters that call `release` during the backward pass."""
    reduced: Sequence[torch.Tensor] | None = None
    """Set by adapters that know: the parameters that ranks have alike, as all begin with the same
    and their gradients are reduced (or they have none). All others are every rank's own. None: all
    are alike."""

    version = 0
    """Completed optimizer steps."""
    iteration = 0
    """What `restore()` returned, and calls of `step()` since."""
    _calls: int | None = 0
    """Calls of `step()` behind the version that this life goes on from, if it told."""
    metric: float | None = None
    """What was measured of the state as it is now; see `step`. Rank 0's counts."""
    agreed_vote = 0
    """See `own_vote`; 0 until there was one."""
    restored: Restored
    """What the last `restore()` did."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer
        | Sequence[torch.optim.Optimizer]
        | Mapping[str, torch.optim.Optimizer],
        *,
        group: Group | None = None,
        extra: Mapping[str, Any] | None = None,
        extra_per_rank: Mapping[str, Any] | None = None,
        on_event: Callback | None = None,
        callbacks: Iterable[Callbacks] = (),
        config_file: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        self.group: Group = group or SingleGroup()
        refuse_model(model)
        optimizers = label_optimizers(optimizer)
        self.state = TrainingState(model, optimizers, extra, extra_per_rank, self.reduced)
        attach.check_state(self.state)
        self.config: Config
        self.config, roll = agree_on_settings(settings, config_file, self.group)
        self.state.forward_changes(self.config.forward_changes)
        self._node = roll.node(self.group.rank)
        # While nothing has been started yet.
        groups, unprotected = redundancy_groups(self.config, roll, self.group)
        slots = self.config.slots or (3 if self._uses_cuda() else 2)
        unwell = attach.check_health(self.config, self.state, self.group, self._node, slots)
        self.restored = Restored(0)
        with contextlib.ExitStack() as undo:  # or another try would meet what is left of this one
            undo.callback(self.group.close)
            self._open_books(on_event, callbacks, undo)
            self._berth = Berth(self.config, self.group.rank, slots, self._reports)
            undo.callback(self._berth.let_go)
            self._pool = self._berth.pool
            self._berth.tell_of_room(self.state, self.group, self._node)
            for text in (unwell, unprotected):
                if text and self.group.rank == 0:
                    self._reports.notice(text, logging.ERROR)
            if omitted := attach.left_out(self.state):
                self._say(omitted, logging.INFO)
            self._join_levels(roll, groups, undo)
            self._watch(model, undo)
            self._halting = Halting(self.config, self.group.rank, self._node, self._reports.notice)
            undo.pop_all()

    def _open_books(
        self,
        on_event: Callback | None,
        callbacks: Iterable[Callbacks],
        undo: contextlib.ExitStack,
    ) -> None:
        """What is said of versions, and what ranks agree on."""
        self.log = EventLog(self.group.rank, self.config.events_dir or None, on_event)
        undo.callback(self.log.close)
        self._callbacks = CallbackList(callbacks)
        self._agreement = Agreement(
            self.group,
            ballots_for(self.group, self._node, VOTE_WIDTH),
            self.config,
            lambda *safe: self._onward.local_safe(*safe),
            lambda: self._onward.retire(),
        )
        undo.callback(self._agreement.close)
        self._reports = Reports(
            self.config, self.log, self._callbacks, self._agreement, lambda: self.version
        )

    def _join_levels(
        self, roll: Roll, groups: tuple[RedundancyGroup, ...], undo: contextlib.ExitStack
    ) -> None:
        """What is behind the slots: the lives before this one, the agent, other nodes."""
        config, group, job = self.config, self.group, self._berth.job
        host = roll.hosts[group.rank]
        self._lives = Lives(config, group, job, LocalStore(config.directory), host)
        self._agent = attach.agent_client(config, group, job, self._node)
        undo.callback(self._agent.close)
        self._peers = Peers(config, group, roll, self._agent, groups)
        if self._peers.slow_coding and group.rank == 0:
            self._reports.notice(self._peers.slow_coding, logging.WARNING)
        self._onward = Onward(
            Best(config.local.keep_best, config.best == "lowest"),
            self._agent,
            self._agreement,
            self._peers,
            self._lives,
            flush_order(config, group, self._node, job, host),
            Backlog(config, self._agent, self._agreement, self._reports.passed_over),
        )
        self._handover = Handover(group, self._pool, self._agent, self._agreement, self._reports)
        self._start_agent()

    def _watch(self, model: torch.nn.Module, undo: contextlib.ExitStack) -> None:
        """What is before them: the copies, when to make them, and hooks where training goes on."""
        self._copier = Copier()
        undo.callback(self._copier.close)
        self._capture = Capture(self.state, self.group, self._pool)
        undo.callback(self._capture.close)
        self._schedule = Schedule(self.config)
        automatic = self._schedule.tuner.every_steps
        self._meter = Meter("persistent" in automatic) if automatic else None
        self._snapshot: Snapshot | None = None
        self._ahead = 0
        self._closed = False
        self._slow_barriers = 0
        self._release_early = self.config.release == "forward" or not self.releases_by_layer
        self._iterations = Iterations(
            self.config.boundary,
            boundary=self._boundary,
            before_step=self._before_step,
            made_step=self._made_step,
            left_to_us=self._capture.keep_streams,
            say=self._say,
        )
        undo.callback(self._iterations.unwatch)
        self._iterations.watch(model, self.state.optimizers)
        self._strangers = Strangers(self.state, self._before_stranger, self._warn)
        self._stepwatch = Stepwatch(self._before_any_step)
        undo.callback(self._stepwatch.close)
        self._trace = open_trace(self.config, self.group.rank, self.state.name_of, self.log)
        self._trace_hooks: list[Any] = []
        if self._trace is not None:  # behind the stepwatch: what is waited for there is no update
            undo.callback(self._trace.close)
            self._trace_hooks += self._trace.watch(self.state.optimizers)
            undo.callback(self._remove_trace_hooks)

    # --- the recipe ----------------------------------------------------------------------------

    def step(self, metric: float | None = None) -> None:
        """The boundary: call it once an iteration, after the optimizer's (and scheduler's) step.

        Takes a checkpoint when one is due. An iteration without an optimizer step (gradient
        accumulation, a step skipped by the GradScaler) is counted and otherwise passed over.

        `metric` is what was measured of the state as it is now, for `keep_best`; rank 0's counts.
        It does not make a checkpoint due (`save(now=True)`, called next, does). Where boundaries
        are not called so, set the attribute `metric` instead: the optimizer's next step clears it.
        """
        self.metric = self.metric if metric is None else float(metric)
        mixed = self._iterations.guessed
        self._iterations.called()
        self._capture.drop_streams()
        self.iteration += 1
        if mixed:
            self._warn_of_two_counts()
        if self._iterations.steps:
            self._boundary()

    def _warn_of_two_counts(self) -> None:
        told = int(self.restored)
        since = f", counted on from the {told} that restore() returned" if told else ""
        text = MIXED.format(version=self.version, iteration=self.iteration, since=since)
        self._say(text, logging.WARNING)

    def release(
        self,
        params: Iterable[torch.Tensor],
        reduction: torch.futures.Future[Any] | None = None,
        launched_seconds: float | None = None,
    ) -> None:
        """The reduction of these parameters' gradients was launched: their layer may be copied.

        For the trace, an adapter gives along what it has: the reduction's future, and when exactly
        it was launched (`time.perf_counter()`; default: now).
        """
        if self._trace is not None:
            params = list(params)
            self._trace.released(params, self.version, reduction, launched_seconds)
        if self._snapshot is not None:
            self._snapshot.release(params)
        if self._callbacks:
            self._callbacks.call("on_allreduce_launched", params)

    def save(self, now: bool = False) -> None:
        """Ask for a checkpoint to memory and local, whatever the intervals say.

        From any one rank; it is taken at the boundary after all ranks learned of it. With
        `now=True` all ranks call it, between two steps, and it returns when the version is durable
        on this rank (or an event said why not).
        """
        if not now:
            self._agreement.ask()
            return
        self._save_now()

    def pin(self, version: int) -> tuple[str, ...]:
        """Have retention leave a version alone, on every level that has it; returns these levels.

        Waits until what is under way to the levels is there, as long as that gets on. All ranks
        call it, between steps. Raises PinError, on all ranks, when no level has it, or one hangs.
        """
        where = (self.config, self.group, self._node)
        return mark_everywhere("pin", version, *where, self._agent)

    def unpin(self, version: int) -> tuple[str, ...]:
        """Leave a version to retention again; otherwise as `pin`."""
        return mark_everywhere("unpin", version, self.config, self.group, self._node)

    def should_exit(self) -> bool:
        """Whether the job is to end early: a signal came to some rank, `tierckpt halt` asked for
        it, or the allocation's time is over. A last version is under way then; leave the loop and
        `close()`.

        The same on all ranks, if they ask after the same boundary. A script that never asks is
        ended all the same: all ranks close and raise SystemExit at the boundary.
        """
        return self._halting.should_exit()

    @property
    def exit_reason(self) -> str:
        """Why `should_exit()` is true, in words; empty while it is not."""
        return self._halting.reason.text()

    @property
    def interrupted(self) -> bool:
        """True when `should_exit()` is because processes (a signal) or the allocation end: the job
        is to be started again. False for what somebody asked for with `tierckpt halt`."""
        return self._halting.reason.is_interruption

    def restore(
        self, version: int | None = None, strict: bool = True, progress: bool | None = None
    ) -> Restored:
        """Bring back the newest sound version, in place; returns the iteration to go on from.

        Looks at memory and local on every node, verifies checksums before anything is changed, and
        falls back to the next copy, then to the next older version. 0 when there is nothing.
        All ranks call it; before the first step, or later to go back.

        Args:
            version: only this version; RestoreError when it is not there.
            strict: raise StateMismatchError when the structure differs; else load what fits.
            progress: show a bar on rank 0's standard error; None: if that is a terminal.
        """
        bar = Progress(Progress.wanted(self.group.rank, progress))
        with contextlib.closing(bar):
            self.restored = self._restore(version, strict, bar)
        self._callbacks.call("on_restored", self.restored)
        return self.restored

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Return when all that was taken is sealed and committed, or has failed; between steps.

        Not collective. False when that took longer than `timeout_seconds`.
        """
        self.complete()
        some = ending.NOTICE_SECONDS
        if timeout_seconds is not None and timeout_seconds <= some:
            done = self._agent.wait(timeout_seconds)
        elif not (done := self._agent.wait(some)):
            self._reports.notice(f"waiting for what {self.config.directory} takes", logging.INFO)
            done = self._agent.wait(timeout_seconds and timeout_seconds - some)
        self._collect()
        return done

    def catch_up(self) -> None:
        """Collective: those whose iteration was cut short cast the votes that others wait for."""
        self._agreement.even_out()

    def complete(self) -> None:
        """Return when the version that is being copied is sealed, or has failed; not collective.

        Between two steps; also in the middle of an iteration, as long as no optimizer has begun its
        step.
        """
        if self._snapshot is not None:
            self._snapshot.barrier()
            self._snapshot.wait_done()
        self._finish_snapshot()

    def carry_on(self, version: int, iteration: int, lineage: Lineage) -> None:
        """Go on from the live state instead of a stored one; instead of `restore()`, all ranks.

        For ranks that were regrouped with nobody lost. All say the same.

        Args:
            version: optimizer steps that the live state has behind it, on every rank.
            iteration: calls of `step()` before this one.
            lineage: that of the checkpointer before.
        """
        self._lives.look()
        live = Restored(iteration)
        live.version, live.generation = version, lineage[-1][0] if lineage else 0
        live.calls = iteration
        self._go_on_from(lineage, live)

    @property
    def closed(self) -> bool:
        """True after `close()` or `abandon()`."""
        return self._closed

    @property
    def steps_made(self) -> int:
        """Completed optimizer steps, those since the last boundary included."""
        return self.version + self._iterations.steps

    @property
    def lineage(self) -> Lineage:
        """The lives this state comes from; see `naming.Lineage`."""
        return self._lives.lineage

    def close(self) -> None:
        """Take a final checkpoint, wait until it is durable, and leave nothing behind.

        All ranks call it. When the local level cannot be written, or does not answer (see
        `ending`), the memory level is left in place, and an event says so.
        """
        if self._closed:
            return
        self._halting.be_calm()
        safe = False
        try:
            end = self._begin_ending()
            if self._local_enabled() and not self._nothing_new():
                self._save_now(end.last_call)
            if end.disk_has_all(self.wait):
                self._onward.backlog.flush_last()
                end.await_others()
                self._collect()
            durable = self._nothing_new() or self._agreement.local.safe == self._id()
            # A job that ends early comes back; without a disk, what is in memory is all it has.
            safe = durable or not (self._local_enabled() or self._halting.reason < Reason.NONE)
        except Exception as error:
            self._reports.notice(f"the final checkpoint failed: {error!r}", logging.ERROR)
        try:
            safe = all(self.group.all_gather_object(safe))
        except Exception as error:
            safe = False
            self._reports.notice(f"the other ranks cannot be asked: {error!r}", logging.ERROR)
        if not safe:
            self._reports.notice(
                f"v{self.version} is not durable everywhere; what is in memory stays there "
                f"({self._berth.job.path})",
                logging.ERROR,
            )
        elif not self._lives.lineage and self._pool.holds_anything():
            safe = False  # the life before is in there, and nobody restored it
        self._reports.emit("closed", message=self.exit_reason or "the training's end")
        self._shut_down(remove=safe)

    def _begin_ending(self) -> ending.Ending:
        nbytes = attach.shard_bytes(self.state, self.group.size) * len(self._node.ranks)
        return ending.Ending(self.config, self._agent, self._reports, self._halting, nbytes)

    def abandon(self, commit_newest: bool = False) -> None:
        """End without a final checkpoint, leaving everything for a successor; not collective.

        With `commit_newest` the newest version in memory is written to local first.
        """
        if self._closed:
            return
        if commit_newest:
            self.wait(WAIT_SECONDS)
            memory, local = self._agreement.memory, self._agreement.local
            taken = [*memory.open, *filter(None, [memory.safe])]
            sealed = [i for i in taken if self._pool.find(i) is not None]
            known = [*local.open, local.safe]
            if sealed and self._local_enabled() and max(sealed) not in known:
                slot = self._pool.find(max(sealed))
                assert slot is not None
                self._handover.commit_sealed(max(sealed), slot)
                self.wait(WAIT_SECONDS)
        self._shut_down(remove=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """`copy.deepcopy(model)` and `torch.save(model)` take the hooks along, and not us."""
        return (Unattached, ())

    def __enter__(self) -> Checkpointer:
        """For `with`."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception only let go, so that the restarted job finds everything."""
        if kind is None:
            self.close()
        else:
            self.abandon()

    def pack_adapter(self) -> Any:
        """What an adapter wants to find again after a restart, as JSON has it; per rank."""
        return None

    def load_adapter(self, value: Any) -> None:
        """An adapter's own, after a restore; `value` is what `pack_adapter` returned."""

    def own_vote(self) -> int:
        """What an adapter wants all ranks to know at the next boundary, where `agreed_vote` is the
        smallest of all ranks' votes; asked at every boundary."""
        return 0

    def add_callbacks(self, callbacks: Callbacks) -> None:
        """Have these called from now on."""
        self._callbacks.add(callbacks)

    def register(self, name: str, obj: Any, per_rank: bool = False) -> None:
        """Add an object to `extra` after construction, before the first boundary or restore."""
        state_module.check_extra(name, obj)
        (self.state.extra_per_rank if per_rank else self.state.extra)[name] = obj

    # --- boundary ------------------------------------------------------------------------------

    def _boundary(self, force: bool = False) -> None:
        begin = time.perf_counter()
        self._finish_snapshot()
        self.version += self._iterations.pass_boundary()
        if not self._lives.lineage:
            self._begin_life()
        agreed, broken = self._agreement.read()
        self._onward.backlog.go_on()
        if broken is not None:
            self._reports.lost(
                broken.version, "the snapshot failed on some rank; it is void on all"
            )
        if self._agreement.superseded_earlier(self._lives.generation):
            self._berth.clear(self._node)
        self.agreed_vote = agreed.adapter
        self._collect()
        unattended = self._halting.hear(agreed)
        decision = self._schedule.decide(self.version, agreed)
        if force:
            decision = Decision(tuple(level for level in LEVELS if self.config.uses(level)))
        for change in decision.changes:
            self._reports.interval(change)
        for level, reason in decision.skipped:
            self._reports.skipped(level, reason, level in decision.again)
        if decision.wait:
            self._agent.wait(None)
            self._collect()
        snapshot = self._open_snapshot(decision.take) if decision.take else None
        if self._meter is not None:
            busy, flushing = self._agent.busy() > 0, bool(self._agreement.persistent.open)
            self._meter.boundary(begin, self.version, decision.take, busy, flushing)
        self._agreement.launch(
            self._id(),
            slot_free=self._pool.has_room(self._agreement.needed(), self._agent.pinned()),
            local_free=not self._agent.busy(),
            figures=self._meter.figures() if self._meter is not None else UNKNOWN,
            halt=self._halting.vote(self.version),
            adapter=self.own_vote(),
        )
        self._snapshot = snapshot
        if snapshot is not None:
            self._set_going(snapshot)
            snapshot.clock.boundary = time.perf_counter() - begin
        if self._trace is not None:
            self._trace = self._trace.boundary(self.version, begin)
        self._callbacks.call("on_step_boundary", self.version)
        if unattended and not force:
            self.close()
            raise SystemExit(0)

    def _set_going(self, snapshot: Snapshot) -> None:
        """Have it copied: from now on, or from the first layer that is released."""
        snapshot.trace = self._trace
        snapshot.begin = self._copier.submit
        self._copier.expect(snapshot)
        if snapshot.starts_at_once or not self._pool.complete:
            snapshot.start()
        if self._release_early:
            snapshot.release_all()

    def _finish_snapshot(self) -> None:
        """The barrier, and what the snapshot has to report."""
        if self._snapshot is not None:
            self._snapshot.barrier()
            self._snapshot = None
        while self._handover.finished:
            self._report(self._handover.finished.popleft())
        self._reports.say()

    def _open_snapshot(self, levels: tuple[str, ...]) -> Snapshot | None:
        """Capture what changes first. A failure here breaks the version, not the training."""
        id_ = self._id()
        # In the ledgers first: whatever happens to us, all ranks have the same list of versions.
        self._agreement.open(id_, levels)
        if "persistent" in levels:
            self._onward.flush_when_safe(id_, self._at())
        try:
            return self._capture.take(
                self._head(),
                levels,
                self.pack_adapter(),
                self._handover.chooser(id_, len(self._lives.lineage)),
                self._handover.done,
            )
        except Exception as error:
            self._agreement.tell("memory", id_, BROKEN)
            self._agreement.tell("local", id_, BROKEN)
            self._reports.lost(self.version, f"the state could not be captured: {error}")
            return None

    def _head(self) -> Head:
        return Head(
            job=self._berth.job.job,
            version=self.version,
            generation=self._id().generation,
            life=self._lives.name,
            lineage=self._lives.lineage,
            iteration=self._at(),
            calls=self._at() if self._iterations.explicit else self._calls,
            metric=self._measured(),
            complete=self._agreement.local.safe,
        )

    def _measured(self) -> float | None:
        """Rank 0's metric, if it is a number."""
        metric = None if self.metric is None or self.group.rank else float(self.metric)
        return metric if metric is not None and math.isfinite(metric) else None

    # --- reports -------------------------------------------------------------------------------

    def _report(self, snapshot: Snapshot) -> None:
        if snapshot.phase is Phase.FAILED:
            self._reports.lost(snapshot.head.version, snapshot.error)
            return
        self._reports.sealed(snapshot)
        if self._meter is not None:
            self._meter.stalled(snapshot.clock.boundary + snapshot.clock.barrier)
        if self.config.release == "auto" and not self._release_early:
            slow = snapshot.clock.barrier > SLOW_BARRIER_SECONDS
            self._slow_barriers = self._slow_barriers + 1 if slow else 0
            if self._slow_barriers >= EARLY_AFTER:
                self._release_early = True
                self._reports.notice(
                    "copying does not fit into the backward pass "
                    f"(the last barrier took {1e3 * snapshot.clock.barrier:.1f} ms); from now on "
                    "it starts with the forward pass",
                    logging.INFO,
                )

    def _collect(self) -> None:
        """Hear what the agent said."""
        for message in self._agent.poll():
            self._reports.hear(message)

    # --- lives ---------------------------------------------------------------------------------

    def _id(self) -> VersionId:
        return VersionId(self._lives.generation, self.version)

    def _at(self) -> int:
        """What `restore()` will return: calls of `step()`, or versions if it is never called."""
        return self.iteration + self._ahead if self._iterations.explicit else self.version

    def _begin_life(self) -> None:
        """First boundary without a restore: a fresh start."""
        self._lives.look()
        self._lives.begin_afresh()
        self._meet_peers()
        old = self._lives.newest()
        if old is not None and self.group.rank == 0:
            self._reports.notice(
                f"{self.config.path} holds {old} of an earlier run, and restore() was not "
                "called: this run starts afresh beside it. Its files are kept and will not be "
                "restored any more; delete them, or call restore() before the first step",
                logging.WARNING,
            )

    def _restore(self, version: int | None, strict: bool, bar: Progress) -> Restored:
        begin = time.perf_counter()
        if self._snapshot is not None:
            self._snapshot.fail(SnapshotError("restore() was called"))
        self._agreement.void()  # before waiting for the copier, which may wait for a vote
        self._finish_snapshot()
        self._agent.wait(None)
        self._collect()
        comeback = Comeback(
            self.config, self.group, self.state, self._lives, self._reports, bar, begin
        )
        attempt = comeback.find(version, self.version)
        if attempt is None:
            self._meet_peers()
            return comeback.report(Restored(0))
        with contextlib.closing(attempt):
            lineage, result = comeback.load(attempt, strict, self.load_adapter)
            self._go_on_from(lineage, result)
            all_finished(attempt, self.group)
            self._mend(attempt)
        return comeback.report(result)

    def _mend(self, attempt: Attempt) -> None:
        """After a rebuild: have the version whole and protected again, or a new one taken."""
        id_ = attempt.plan.id
        lacking = shards_to_mend(attempt.plan, self._lives.found)
        if not self._peers.ready or lacking == frozenset():
            return
        if lacking is None:
            self._schedule.requested = frozenset(("memory", "local"))
            return
        parities = parities_to_mend(attempt.plan, self._peers.groups, self._lives.parities)
        self._peers.mend(id_, parities)
        self._agreement.local.open.append(id_)
        if self.group.rank not in lacking:
            self._agreement.tell("local", id_, DONE)
            return
        protected = self._agreement.memory.protected()
        image = attempt.images[self.group.rank]
        try:
            slot = keep(image, self._pool, protected, self._agent.pinned())
        except (OSError, NoSlotError) as error:
            self._agreement.tell("local", id_, BROKEN)
            self._reports.not_committed_later(id_, f"what was rebuilt cannot be kept: {error}")
        else:
            self._handover.commit_sealed(id_, slot)

    def _go_on_from(self, lineage: Lineage, result: Restored) -> None:
        """The live state is that of `result`; everything else follows."""
        self.version, self.iteration, self.metric = result.version, int(result), None
        self._calls = result.calls
        self._iterations.go_on_from(result)
        self._capture.forget()
        self._lives.go_on_from(lineage, result.version)
        self._schedule.start_at(result.version)
        id_ = VersionId(result.generation, result.version)
        # Even when some shards came from elsewhere: those in memory may be the only ones.
        memory = id_ if "memory" in result.levels else self._lives.newest("memory", id_)
        # Until something newer is protected, what was rebuilt may have to be rebuilt again.
        peer = id_ if "peer" in result.levels else self._lives.newest_protected(id_)
        local, broken = self._lives.newest("local", id_), self._lives.incomplete()
        self._agreement.restart(memory, local, peer, broken)
        self._onward.restart()
        self._meet_peers()

    def _meet_peers(self) -> None:
        """A life has begun: the nodes' agents meet under its name."""
        self._peers.meet(self._lives.secret, lambda text: self._reports.notice(text, logging.ERROR))

    def _save_now(self, end: float = math.inf) -> None:
        """Blocking: the present state to memory and local. Collective. Waits for the disk until
        `end` (monotonic); what it has not taken then is broken."""
        self.wait(end - time.monotonic())
        id_ = VersionId(self._id().generation, self.steps_made)
        sealed_here = self._pool.find(id_) is not None and id_ in (
            self._agreement.memory.safe,
            *self._agreement.memory.open,
        )
        self._ahead = int(
            self._iterations.steps > 0
        )  # the loop's own step() for it is still to come
        if all(self.group.all_gather_object(sealed_here)):
            slot = self._pool.find(id_)
            assert slot is not None
            local = self._agreement.local
            if self.config.uses("persistent") and id_ != self._onward.ordered:
                self._onward.flush_when_safe(id_, self._at())
            if self._local_enabled() and id_ != local.safe and id_ not in local.open:
                local.open.append(id_)
                self._handover.commit_sealed(id_, slot)
        else:
            # Where it was sealed all the same, it is void: all ranks' shards are of one moment.
            self._pool.void(id_)
            self._agreement.forget(id_)
            self._boundary(force=True)
        self._ahead = 0
        self.wait(end - time.monotonic())
        self._agreement.settle()
        if self._onward.awaits(id_) and id_ == self._agreement.local.safe:  # and was so before
            slot = self._pool.find(id_)
            manifest = slot.manifest() if slot is not None else None
            mine = (manifest.image_bytes, manifest.metric) if manifest else (0, None)
            told = self.group.all_gather_object(mine)
            self._onward.local_safe(id_, max(nbytes for nbytes, _ in told), told[0][1])

    # --- hooks ---------------------------------------------------------------------------------

    def _before_step(self, label: str) -> None:
        """The barrier: nothing may change before its copy is complete."""
        self.metric = None
        if self._snapshot is not None:
            self._finish_snapshot()

    def _before_any_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._iterations.begins(optimizer, args, kwargs):
            self._strangers.begins(optimizer)

    def _before_stranger(self) -> None:
        """The same before a step of an optimizer that no adapter knows."""
        Checkpointer._before_step(self, "")

    def _say(self, text: str, severity: int) -> None:
        """What all ranks would say, once."""
        self._reports.notice(text, logging.DEBUG if self.group.rank else severity)

    def _warn(self, text: str) -> None:
        self._say(text, logging.WARNING)

    def _made_step(self, label: str) -> bool:
        """False when the step that just ended was none of the training's."""
        return True

    def _nothing_new(self) -> bool:
        """True when no step was made since the start, or since the version restored from disk."""
        begun = self._lives.began_at
        if self._iterations.steps or self.version != begun:
            return False
        durable = self._agreement.local.safe
        return begun == 0 or (durable is not None and durable.version == begun)

    # --- attaching and ending ------------------------------------------------------------------

    def _uses_cuda(self) -> bool:
        return any(p.is_cuda for p in self.state.walk().params)

    def _local_enabled(self) -> bool:
        return self.config.uses("local")

    def _start_agent(self) -> None:
        if not self._local_enabled():
            return
        try:
            self._agent.start(self._node.first == self.group.rank)
        except OSError as error:
            self._reports.notice(f"the agent could not be started: {error}", logging.ERROR)

    def _remove_trace_hooks(self) -> None:
        for hook in self._trace_hooks:
            hook.remove()

    def _shut_down(self, remove: bool) -> None:
        self._closed = True
        self._halting.close()
        self._iterations.unwatch()
        self._stepwatch.close()
        self._remove_trace_hooks()
        if self._snapshot is not None:  # the copier would wait for what is never released
            self._snapshot.fail(SnapshotError("the job ended in the middle of an iteration"))
        self._agreement.close()  # the copier may wait for the vote of a rank that is gone
        self._copier.close()
        self._capture.close()
        self._agent.close()
        self._snapshot = None
        self._berth.leave(remove)
        self.group.close()
        if self._trace is not None:
            self._trace.close()
        self.log.close()
