"""The front door: capture at the boundary, release by layer, barrier before the step, seal, commit.

`Checkpointer` is the whole training side. An adapter subclasses it, hands it a Group, and calls
`release` from where its library launches gradient reductions; everything else is here.

All public methods are for the training thread, and all ranks call them alike.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import torch

from tierckpt._text import some
from tierckpt.callbacks import CallbackList, Callbacks
from tierckpt.config import Config
from tierckpt.coordination.agreement import Agreement
from tierckpt.coordination.peer_setup import Groups, redundancy_groups
from tierckpt.coordination.pinning import mark_everywhere
from tierckpt.coordination.reports import Reports
from tierckpt.coordination.settings_check import JobTopology, agree_on_settings, refused
from tierckpt.coordination.vote_exchange import ballots_for
from tierckpt.core.halt_conditions import Reason
from tierckpt.core.levels import LOCAL, MEMORY, Level
from tierckpt.core.replica_check import Finding
from tierckpt.core.schedule import Schedule
from tierckpt.core.tuning.autotune import StepTimer
from tierckpt.core.votes import VOID, VOTE_WIDTH
from tierckpt.errors import PinError, RestoreError, TierckptError
from tierckpt.events import Callback, EventLog, check_receiver
from tierckpt.format.ids import Lineage, VersionId, on_lineage
from tierckpt.format.manifest import Manifest
from tierckpt.group import Group, SingleGroup
from tierckpt.halt.controller import HaltController
from tierckpt.hooks.install import Hooks
from tierckpt.hooks.iterations import NO_CALLS, Iterations, Unattached
from tierckpt.proof.recorder import record_if_ordered
from tierckpt.replicas.monitor import ReplicaMonitor
from tierckpt.replicas.unchanged import Unchanged
from tierckpt.restore.progress import Progress
from tierckpt.restore.restorer import all_finished
from tierckpt.restore.session import RestoreSession
from tierckpt.restored import Restored
from tierckpt.resumable_loader import ResumableLoader
from tierckpt.snapshot.snapshot import Head, Snapshot
from tierckpt.state.extras import check_extra
from tierckpt.state.training_state import TrainingState, label_optimizers
from tierckpt.state.validate import refuse_model
from tierckpt.tracing.recorder import open_trace

from . import attach, shutdown
from .active_snapshot import ActiveSnapshot
from .boundary import Boundary
from .epoch_ends import EpochEnds
from .node_resources import NodeResources
from .repair import repair
from .save_now import SaveNow, Sealed
from .tiers import Tiers

HEAVY = (
    "{what} that the state_dict() of optimizers has beside state and options are copied at every "
    "boundary, while the training waits. Have its tensors in optimizer.state, under the parameters "
    "that they are of: they are copied under the allreduce then"
)
NOTHING_LATER = "No further version is taken until restore()"
WAIT_SECONDS = 60.0
MEET_SECONDS = 30.0
"""At the end of a process: how long to wait for the other ranks before ending alone."""
ORPHANS = (
    "{names}: an optimizer steps this parameter, and the model has it no more (did the forward "
    "pass put another one in its place?). A job that is started again, whose optimizer has the "
    "model's, will refuse this state but for restore(strict=False). Change values in place, "
    "without gradients, or make them a buffer; or give the optimizer the new parameter"
)


def _as_number(metric: Any) -> float:
    """Raises TypeError for what is none."""
    try:
        return float(metric.detach() if isinstance(metric, torch.Tensor) else metric)
    except (TypeError, ValueError, RuntimeError):
        text = f"metric must be one number, or a tensor of one; it is a {type(metric).__name__}"
        raise TypeError(text) from None


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

    Raises ConfigError for bad settings, UnsupportedStateError for state that cannot be taken,
    TypeError for callbacks that cannot be called.
    Creating one is collective: all ranks do it at the same point.
    """

    releases_by_layer = False
    """Set by adapters that call `release` during the backward pass."""
    reduced: Sequence[torch.Tensor] | None = None
    """Set by adapters that know: the parameters that ranks have alike, as all begin with the same
    and their gradients are reduced (or they have none). All others are every rank's own. None: all
    are alike."""

    given_as = "extra={{{name!r}: {it}}}"
    """How a script gives what has a state beside model and optimizer; adapters may have another
    way."""

    version = 0
    """Completed optimizer steps."""
    iteration = 0
    """What `restore()` returned, and with `boundary="explicit"` calls of `step()` since."""
    metric: float | None = None
    """What was measured of the state as it is now; see `step`. Rank 0's counts."""
    agreed_vote = 0
    """See `own_vote`; 0 until there was one."""
    restored: Restored
    """What the last `restore()` did."""
    _released = 0
    """Calls of `release`: where forward passes are boundaries, they say at which iteration ranks
    are."""
    _no_calls = NO_CALLS
    """The error where the loop makes steps and never calls the boundary."""
    _parted: VersionId | None = None
    """See `Agreement.parted`: the last one that an event told of."""
    _went_back = False
    """It was asked for an older version than there is."""

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
        self._process = os.getpid()
        self.group: Group = group or SingleGroup()
        check_receiver(on_event)  # with those that follow while no rank waits for another
        self._callbacks = CallbackList(callbacks)
        self.config: Config
        try:
            refuse_model(model)
            optimizers = label_optimizers(optimizer)
            self.state = TrainingState(model, optimizers, extra, extra_per_rank, self.reduced)
            attach.check_state(self.state)
        except TierckptError as error:
            raise refused(error, self.group) from error.__cause__
        self.config, topology = agree_on_settings(settings, config_file, self.group)
        self.state.forward_changes(self.config.forward_changes)
        self._node = topology.node(self.group.rank)
        # While nothing has been started yet.
        groups, unprotected = redundancy_groups(self.config, topology, self.group)
        slots = self.config.slots or (3 if self._uses_cuda() else 2)
        unwell = attach.check_health(self.config, self.state, self.group, self._node, slots)
        self.restored = Restored(0)
        with contextlib.ExitStack() as undo:  # or another try would meet what is left of this one
            undo.callback(self.group.close)
            self._open_books(on_event, undo)
            self._resources = NodeResources(self.config, self.group, topology, slots, self._reports)
            undo.callback(self._resources.let_go)
            self._pool = self._resources.pool
            self._resources.tell_of_room(self.state, self.group, self._node)
            for text in (unwell, unprotected):
                if text and self.group.rank == 0:
                    self._reports.notice(text, logging.ERROR)
            if idle := self.config.idle:
                self._warn(f"no persistent_path is given, hence nothing is done with {some(idle)}")
            if omitted := attach.left_out(self.state):
                self._say(omitted, logging.INFO)
            for text in attach.own_ways(self.state):
                self._warn(text)
            self._join(topology, groups, undo)
            self._watch(model, undo)
            self._halt = HaltController(
                self.config, self.group.rank, self._node, self._reports.notice
            )
            record_if_ordered(self)
            shutdown.at_exit(self)
            undo.pop_all()

    def _open_books(self, on_event: Callback | None, undo: contextlib.ExitStack) -> None:
        """What is said of versions, and what ranks agree on."""
        self.log = EventLog(self.group.rank, self.config.events_dir or None, on_event)
        undo.callback(self.log.close)
        self._agreement = Agreement(
            self.group,
            ballots_for(self.group, self._node, VOTE_WIDTH),
            self.config,
            lambda *safe: self._levels.promotion.local_safe(*safe),
            lambda: self._levels.promotion.retire(),
        )
        undo.callback(self._agreement.close)
        self._reports = Reports(
            self.config, self.log, self._callbacks, self._agreement, lambda: self.version
        )

    def _join(self, topology: JobTopology, groups: Groups, undo: contextlib.ExitStack) -> None:
        """What is behind the slots, and what copies into them."""
        config, group, agreement, reports = self.config, self.group, self._agreement, self._reports
        self._levels = Tiers(config, group, topology, groups, self._resources, agreement, reports)
        self._history, self._agent = self._levels.history, self._levels.agent
        undo.callback(self._agent.close, abandoned=True)
        self._levels.open()
        self._schedule = Schedule(config)
        automatic = self._schedule.tuner.every_steps
        self._meter = StepTimer("persistent" in automatic) if automatic else None
        self._rounds = Boundary(
            config, self._schedule, self._meter, agreement, self._pool, self._levels, reports
        )
        self._demand = SaveNow(config, group, self._pool, agreement, self._levels)
        self._unchanged = Unchanged(self.state, self._say)
        self._epoch_ends = EpochEnds(self.state)
        self._active = ActiveSnapshot(
            config,
            self.state,
            group,
            self._pool,
            self._levels.slot_handoff,
            reports,
            self._meter,
            self.releases_by_layer,
            self._unchanged,
        )
        undo.callback(self._active.close)
        self._replicas = ReplicaMonitor(
            config,
            group,
            self.state,
            reports,
            self._active.submit,
            self._find_apart,
            self._levels.drift.alike,
            self._levels.drift.found,
        )

    def _watch(self, model: torch.nn.Module, undo: contextlib.ExitStack) -> None:
        """What is before them: where iterations and their steps begin and end."""
        self._ahead = 0
        self._closed = self._shutdown = self._saving = False
        self._iterations = Iterations(
            self.config.boundary,
            boundary=self._boundary,
            before_step=self._before_step,
            made_step=self._made_step,
            keep_streams=self._active.capture.keep_streams,
            say=self._say,
            step_of=self._step_of,
            no_calls=self._no_calls,
        )
        self._trace = open_trace(self.config, self.group.rank, self.state.name_of, self.log)
        if self._trace is not None:
            undo.callback(self._trace.close)
        self._own_hooks = Hooks(
            model,
            self.state,
            self._iterations,
            self._before_stranger,
            self._before_change,
            self._say,
            self._trace,
            self.given_as,
        )
        undo.callback(self._own_hooks.close)

    # --- the recipe ----------------------------------------------------------------------------

    def step(self, metric: float | None = None) -> None:
        """The boundary: call it once an iteration, after the optimizer's (and scheduler's) step.

        Takes a checkpoint when one is due. An iteration without an optimizer step (gradient
        accumulation, a step skipped by the GradScaler) is counted and otherwise passed over.

        `metric` is what was measured of the state as it is now, for `keep_best`; rank 0's counts.
        It does not make a checkpoint due (`save(now=True)`, called next, does). Where boundaries
        are not called so, set the attribute `metric` instead: the optimizer's next step clears it.

        With `boundary="forward"` the call takes `metric` and does nothing else; an event says so.
        """
        self.metric = self.metric if metric is None else _as_number(metric)
        if not self._iterations.called():
            return
        self._own_hooks.called()
        self._active.capture.drop_streams()
        self._epoch_ends.passed()
        self.iteration += 1
        if not (self._history.lineage or self._over):
            self._levels.begin_afresh()  # all ranks are here, also those that skipped the step
        if self._iterations.steps and not self._over:
            self._boundary()
        self._agreement.passed(self.iteration)

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
        self._released += 1
        if not self._iterations.explicit:
            self._agreement.passed(self._released)
        self._replicas.wake()
        self._active.release(params)
        if self._callbacks:
            self._callbacks.call("on_allreduce_launched", params)

    def save(self, now: bool = False) -> None:
        """Ask for a checkpoint to memory and local, whatever the intervals say.

        From any one rank; it is taken at the boundary after all ranks learned of it. With
        `now=True` all ranks call it, between two steps, and it returns when the version is durable
        on this rank (or an event said why not).
        """
        if not isinstance(now, bool):
            raise TypeError(f"save(now=...) is True or False, not {now!r}; `path` says where to")
        self._refuse_closed("save()", TierckptError)
        if not now:
            self._agreement.ask()
            return
        if self._saving:  # a callback, at the boundary of another one
            return
        self._refuse_amid("save(now=True)", TierckptError)
        if why := self._no_moment():
            later = "" if self._agreement.parted is None else f". {NOTHING_LATER}"
            self._reports.notice(f"save(now=True) takes nothing: {why}{later}", logging.ERROR)
        else:
            self._save_now()

    def pin(self, version: int) -> tuple[str, ...]:
        """Have retention leave a version alone, on all levels; returns those that have it now.

        Waits until what is under way to the levels is there, as long as that gets on. A version
        that goes on to the persistent level only at a later boundary is pinned there when it is
        complete. All ranks call it, between steps. Raises PinError, on all ranks, when no level
        has it, or one hangs.
        """
        self._refuse_closed("pin()", PinError)
        self._refuse_amid("pin()", PinError)
        self._no_moment()  # ranks may have cast different numbers of votes
        where = (self.config, self.group, self._node)
        return mark_everywhere("pin", version, *where, self._agent)

    def unpin(self, version: int) -> tuple[str, ...]:
        """Leave a version to retention again; otherwise as `pin`."""
        self._refuse_closed("unpin()", PinError)
        self._refuse_amid("unpin()", PinError)
        self._no_moment()
        return mark_everywhere("unpin", version, self.config, self.group, self._node)

    def should_exit(self) -> bool:
        """Whether the job is to end early: a signal came to some rank, `tierckpt halt` asked for
        it, or the allocation's time is over. A last version is under way then; leave the loop and
        `close()`.

        The same on all ranks, if they ask after the same boundary. A script that never asks is
        ended all the same: all ranks close and raise SystemExit at the boundary.
        """
        return self._halt.should_exit()

    @property
    def exit_reason(self) -> str:
        """Why `should_exit()` is true, in words; empty while it is not."""
        return self._halt.reason.text()

    @property
    def interrupted(self) -> bool:
        """True when `should_exit()` is because processes (a signal) or the allocation end: the job
        is to be started again. False for what somebody asked for with `tierckpt halt`, but for
        `--seconds-left`: then it is the allocation that ends."""
        return self._halt.reason.is_interruption

    def restore(
        self,
        version: SupportsIndex | None = None,
        strict: bool = True,
        progress: bool | None = None,
    ) -> Restored:
        """Bring back the newest sound version, in place; returns the iteration to go on from.

        Looks at memory, local and parity on every node, also on those that the job is on no more,
        and at the persistent level; verifies checksums before anything is changed, and falls back
        to the next copy, then to the next older version. 0 when there is nothing.
        All ranks call it; before the first step, or later to go back.

        Args:
            version: only this version; RestoreError when it is not there.
            strict: raise StateMismatchError when the structure differs; else load what fits.
            progress: show a bar on rank 0's standard error; None: if that is a terminal.
        """
        if isinstance(version, bool) or not isinstance(version, SupportsIndex | None):
            raise TypeError(
                f"restore(version=...) takes a version's number, not {version!r}; `path`, given to "
                "the Checkpointer, says where to look"
            )
        version = None if version is None else operator.index(version)
        self._refuse_closed("restore()", RestoreError)
        self._refuse_amid("restore()", RestoreError)
        bar = Progress(Progress.wanted(self.group.rank, progress))
        with contextlib.closing(bar), torch.inference_mode(False):
            try:
                self.restored = self._restore(version, strict, bar)
            except RestoreError:  # on all ranks
                # The training may go on, and what is open was voted on for the last time.
                self._agreement.settle()
                raise
        for obj in (*self.state.extra.values(), *self.state.extra_per_rank.values()):
            if isinstance(obj, ResumableLoader):
                obj.restored()
        self._callbacks.call("on_restored", self.restored)
        return self.restored

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Return when all that was taken is sealed and committed, or has failed; between steps.

        Not collective. False when that took longer than `timeout_seconds`, or nothing more can be
        heard of it behind the end.
        """
        if self._closed:
            return not self._agent.committing()
        self.complete()
        some = shutdown.NOTICE_SECONDS
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
        """Return when the version that is being copied is sealed, or has failed, and nothing reads
        the live state any more; not collective.

        Between two steps; also in the middle of an iteration, as long as no optimizer has begun its
        step.
        """
        self._active.complete()
        self._replicas.finish()

    def carry_on(self, version: int, iteration: int, lineage: Lineage) -> None:
        """Go on from the live state instead of a stored one; instead of `restore()`, all ranks.

        For ranks that were regrouped with nobody lost. All say the same.

        Args:
            version: optimizer steps that the live state has behind it, on every rank.
            iteration: calls of `step()` before this one.
            lineage: that of the checkpointer before.
        """
        self._history.look()
        live = Restored(iteration)
        live.version, live.generation = version, lineage[-1][0] if lineage else 0
        live.iteration_counts = self._iterations.counts
        self._go_on_from(lineage, live)

    @property
    def drift(self) -> Finding | None:
        """For adapters: in what ranks differ, from when it is known until they are alike again."""
        return self._replicas.finding

    @property
    def closed(self) -> bool:
        """True after `close()` or `abandon()`."""
        return self._closed

    def _refuse_closed(self, what: str, error: type[TierckptError]) -> None:
        if self._closed:
            raise error(f"{what} after close() or abandon(): make another Checkpointer")
        if self._shutdown:
            raise error(f"{what} while close() or abandon() is at work")
        if self._over:
            raise error(f"{what} in a forked child: the Checkpointer is its parent's")

    @property
    def _over(self) -> bool:
        """Nothing is to be done any more: it ended, or is just ending, or this is a forked child,
        and what there is of checkpoints is its parent's."""
        return self._closed or self._shutdown or os.getpid() != self._process

    @property
    def _amid(self) -> bool:
        """A callback asks that is called amid something: a step, a boundary, another method."""
        return self._saving or self.log.telling + self._callbacks.telling > 0

    def _refuse_amid(self, what: str, error: type[TierckptError]) -> None:
        """Of what takes all ranks, which hear of events at different moments."""
        if self._amid:
            raise error(
                f"{what} in the callback of an event: it takes all ranks, and they hear of events "
                "at different moments, amid a step perhaps. Call it in the loop, between two "
                "steps, or in on_step_boundary of tierckpt.Callbacks"
            )

    @property
    def steps_made(self) -> int:
        """Completed optimizer steps, those since the last boundary included."""
        return self.version + self._iterations.steps

    @property
    def lineage(self) -> Lineage:
        """The runs this state comes from; see `ids.Lineage`."""
        return self._history.lineage

    def close(self) -> None:
        """Take a final checkpoint, wait until it is durable, and leave nothing behind.

        All ranks call it. When the local level cannot be written, or does not answer (see
        `shutdown`), the memory level is left in place, and an event says so. No checkpoint is taken
        of what is none: where an optimizer's step or a restore did not come to its end, or ranks
        are not at the same step. Nor where `restore(version=...)` went back and no step was made:
        what is newer stays.

        With `on_drift="stop"`, ReplicaError is raised on all ranks where replicas are found to
        differ only now, after all that.

        In the callback of an event it asks for that, from any one rank: all close at the end of a
        boundary, the next but one at the latest; or when the process ends, if all asked.
        """
        if self._over:
            return
        if self._amid:
            self._agreement.close_asked = True
            return
        with self._end():
            self._halt.be_calm()
            remove = self._finish()
            drifted = self._replicas.error
            self._reports.emit("closed", message=self.exit_reason or "the training's end")
            self._shut_down(remove)
        if drifted is not None:
            raise drifted

    @contextlib.contextmanager
    def _end(self) -> Iterator[None]:
        """While it lasts, callbacks are still told of events, and can begin nothing."""
        self._shutdown = True
        try:
            yield
        finally:
            self._shutdown = False

    def _finish(self) -> bool:
        """All that the end waits for. True when nothing has to stay in memory. Collective."""
        end, safe = None, False
        try:
            if why := self._no_moment():
                self._reports.notice(f"no final checkpoint is taken: {why}", logging.ERROR)
                self._commit_newest()
                return False
            if self._went_back and self.steps_made == self._history.began_at:
                text = f"no step was made behind v{self.version}: what is newer stays as it is"
                self._say(text, logging.INFO)
                return False
            end = self._begin_ending()
            safe = self._make_durable(end)
        except Exception as error:
            self._reports.notice(f"the final checkpoint failed: {error!r}", logging.ERROR)
        # The run before, if nobody restored it, may be all there is of it.
        before = not self._history.lineage and any(self._resources.job.sealed())
        error_barrier, answers = True, end is not None and end.disk_answers
        digest = self._replicas.last_digest(self.version)
        try:
            told = self.group.all_gather_object((safe, before, answers, digest))
            everyone = [each[:3] for each in told]
            self._replicas.compare_last([digest for *_, digest in told])
        except Exception as error:
            everyone, error_barrier = [(False, before, answers)], False
            self._reports.notice(f"the other ranks cannot be asked: {error!r}", logging.ERROR)
        if not (safe := all(safe for safe, _, _ in everyone)):
            left = "nothing of it is left in memory on this node"
            if any(self._resources.job.sealed()):
                left = (
                    f"what is in memory here stays there for a restart ({self._resources.job.path})"
                )
            severity = logging.ERROR if self._node.first == self.group.rank else logging.DEBUG
            text = f"v{self.version} is not durable everywhere (on some rank it is not on disk)"
            self._reports.notice(f"{text}; {left}", severity)
        whole = safe and all(answers for _, _, answers in everyone)
        self._await_others(end, error_barrier, whole)
        return safe and not any(before for _, before, _ in everyone)

    def _make_durable(self, end: shutdown.Shutdown) -> bool:
        """The final checkpoint, where there is something new. False when it did not get there."""
        if self._local_enabled() and not self._nothing_new():
            if self._made_none and self._demand.commit_as_it_is(self._begun_from_memory()):
                self.wait(end.last_call - time.monotonic())
                self._agreement.settle()
            else:
                self._save_now(end.last_call)
        if end.disk_has_all(self.wait):
            self._levels.promotion.backlog.flush_last()
        durable = self._nothing_new() or self._agreement.local.safe == self._id()
        # A job that ends early comes back; without a disk, what is in memory is all it has.
        return durable or not (self._local_enabled() or self._halt.reason < Reason.NONE)

    def _await_others(
        self, end: shutdown.Shutdown | None, error_barrier: bool, whole: bool
    ) -> None:
        """Other nodes and stores. Ranks leave `error_barrier`, where none takes longer than its
        group waits: all know by now what is durable. Where that is the `whole` of what they have,
        versions go that were kept until something newer is with other nodes."""
        try:
            if end is not None and end.disk_answers:
                end.await_others(self._collect)
                self._collect()
            if error_barrier:
                self.group.barrier()
            if whole and self._history.lineage:
                self._agreement.settle()
                self._levels.promotion.retire()
        except Exception as error:
            self._reports.notice(f"not all ranks end together: {error!r}", logging.INFO)

    def _begin_ending(self) -> shutdown.Shutdown:
        nbytes = attach.shard_bytes(self.state, self.group.size) * len(self._node.ranks)
        return shutdown.Shutdown(self.config, self._agent, self._reports, self._halt, nbytes)

    def abandon(self, commit_newest: bool = False) -> None:
        """End without a final checkpoint, leaving everything for a successor; not collective.

        In the middle of an iteration, too: the version that is being copied is completed first,
        where that takes a few seconds at most and no optimizer has begun its step. With
        `commit_newest` the newest version in memory is written to local.
        """
        if self._over:
            return
        self._refuse_amid("abandon()", TierckptError)
        with self._end():
            try:
                self._active.last_chance()
            except Exception as error:
                self._reports.notice(f"the newest version was given up: {error!r}", logging.WARNING)
            if commit_newest:
                self._commit_newest()
            self._shut_down(remove=False, abandoned=True)

    def close_or_abandon(self) -> None:
        """At the end of a process: `close()` if all ranks get here within MEET_SECONDS, else every
        rank by itself makes durable what it has. A rank may have ended with an error that cannot be
        seen from here, so this never enters a collective that could hang."""
        if self._over:
            return
        if self.group.meet(MEET_SECONDS):
            self.close()
            return
        text = (
            "no final checkpoint is taken: not all ranks have come to this end, or they cannot be "
            "asked any more, as the communication was shut down before (call close() first). What "
            f"there is up to v{self.version} stays, also in memory ({self._resources.job.path})"
        )
        self._reports.notice(text, logging.WARNING)
        self.abandon(commit_newest=True)

    def end_with_process(self) -> None:
        """When the process ends and nobody has closed it: `abandon()`, unless a callback asked for
        the end and no boundary came behind that."""
        if self._agreement.close_asked and not shutdown.script_failed():
            self.close_or_abandon()
        else:
            self.abandon()

    def abandon_after_error(self) -> None:
        """When an exception ended the training: `abandon()`.

        Where a signal came that was to bring the end, the error may be its work (it ended a worker
        of a DataLoader), and the node may be gone soon: the newest version in memory gets to disk.
        """
        came = self._halt.signal_name
        if came and self._local_enabled() and not self._over:
            text = (
                f"{came} came to this rank, and the training ended with an error: no further "
                "checkpoint is taken, and the newest version in memory is written to disk"
            )
            self._reports.notice(text, logging.WARNING)
        self.abandon(commit_newest=bool(came))

    def _commit_newest(self) -> None:
        self.wait(WAIT_SECONDS)
        if self._demand.commit_newest():
            self.wait(WAIT_SECONDS)

    def __reduce__(self) -> tuple[Any, ...]:
        """`copy.deepcopy(model)` and `torch.save(model)` take the hooks along, and not us."""
        return (Unattached, ())

    def __enter__(self) -> Checkpointer:
        """For `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Close; after an exception only let go, so that the restarted job finds everything.
        `sys.exit(0)` is none, but for ranks that may not all come to it."""
        if kind is None:
            self.close()
        elif shutdown.is_orderly(error):
            self.close_or_abandon()
        else:
            self.abandon_after_error()

    def pack_adapter(self) -> Any:
        """What an adapter wants to find again after a restart, as JSON has it; per rank."""
        return None

    def load_adapter(self, value: Any) -> None:
        """An adapter's own, after a restore; `value` is what `pack_adapter` returned."""

    def own_vote(self) -> int:
        """What an adapter wants all ranks to know at the next boundary, where `agreed_vote` is the
        smallest of all ranks' votes; asked at every boundary. `votes.VOID` says that the
        state here is no version, on this rank and hence on none."""
        return 0

    def add_callbacks(self, callbacks: Callbacks) -> None:
        """Have these called from now on."""
        self._callbacks.add(callbacks)

    def register(self, name: str, obj: Any, per_rank: bool = False) -> None:
        """Add an object to `extra` after construction, before the first boundary or restore."""
        check_extra("extra_per_rank" if per_rank else "extra", name, obj)
        (self.state.extra_per_rank if per_rank else self.state.extra)[name] = obj

    # --- boundary ------------------------------------------------------------------------------

    def _boundary(self, force: bool = False) -> None:
        self._own_hooks.unsaved.boundary(speaks=self.group.rank == 0)
        begin = time.perf_counter()
        self._active.finish()
        self.version += self._iterations.pass_boundary()
        if not self._history.lineage:
            self._levels.begin_afresh()
        agreed = self._rounds.hear()
        if self._agreement.parted is not None:
            self._part()
        self.agreed_vote = agreed.adapter
        place = self.iteration if self._iterations.explicit else self._released
        self._replicas.compare(agreed, self._agreement.rows, place)
        self._unchanged.compare(agreed.unchanged)
        if self._agreement.superseded_earlier(self._history.generation):
            self._resources.clear(self._node)
        unattended = self._halt.hear(agreed)
        take, vote = self._rounds.decide(self.version, agreed, force), self.own_vote()
        if self._replicas.refusing or self._agreement.parted is not None:
            if self._replicas.asking:  # it may turn out that nothing differs
                self._schedule.requested |= frozenset(take)
            take = ()
            if force:
                what = self._replicas.suspicion or "in what is known in a few steps"
                self._reports.lost(self.version, f"replicas differ: {what}")
        snapshot = self._open_snapshot(take, vote == VOID) if take else None
        halt, check = self._halt.vote(self.version), self._replicas.vote(place)
        row, unchanged = self._replicas.row(), self._unchanged.count
        self._rounds.vote(self._id(), begin, take, halt, vote, check, unchanged, row)
        self._replicas.voted()
        self._replicas.begin(self.version)
        if self._active.release_early:
            self._replicas.wake()
        if snapshot is not None:
            self._active.begin(snapshot, begin, self._trace)
        if self._trace is not None:
            self._trace = self._trace.boundary(self.version, begin)
        self._callbacks.call("on_step_boundary", self.version)
        if self._replicas.error is not None:
            self._levels.drift.wait()
            self._replicas.raise_error()
        if force or not (unattended or agreed.no_close == 0):
            return
        self.close()
        if unattended:
            raise SystemExit(0)

    def _part(self) -> None:
        """At each boundary since this rank found that others make other numbers of steps."""
        self._halt.end_alone()
        parted = self._agreement.parted
        if parted is None or parted == self._parted:
            return
        self._parted, together = parted, self._agreement.together
        self._pool.void(parted)
        what = f"in iteration {self.iteration}" if self._iterations.explicit else "at a boundary"
        at = f"rank {self.group.rank} is at v{self.version} {what}"
        number = together.version if together is not None else None
        self._replicas.part(parted.version, number, at, self._agreement.missing)

    def _open_snapshot(self, levels: tuple[Level, ...], void: bool) -> Snapshot | None:
        """Capture what changes first. A failure here breaks the version, not the training; so does
        an adapter that says it is `void`."""
        id_ = self._id()
        # In the ledgers first: whatever happens to us, all ranks have the same list of versions.
        self._agreement.open(id_, levels)
        self._levels.promotion.taken(id_, levels, self._at())
        if void:
            self._levels.slot_handoff.broken(id_)
            return None
        with torch.inference_mode(False):  # an evaluation's; what is made here is used again
            taken = self._active.take(id_, levels, lambda: (self._head(), self.pack_adapter()))
        if orphans := self.state.new_orphans():
            self._warn(ORPHANS.format(names=some(orphans)))
        if heavy := self.state.new_heavy():
            self._warn(HEAVY.format(what=heavy))
        return taken

    def _head(self) -> Head:
        return Head(
            job=self._resources.job.job,
            version=self.version,
            generation=self._id().generation,
            run_id=self._history.name,
            lineage=self._history.lineage,
            iteration=self._at(),
            iteration_counts=self._iterations.counts,
            metric=self._measured(),
            complete=self._agreement.local.safe,
            suspect=self._replicas.suspicion,
        )

    def _measured(self) -> float | None:
        """Rank 0's metric, if it is a number."""
        metric = None if self.metric is None or self.group.rank else _as_number(self.metric)
        return metric if metric is not None and math.isfinite(metric) else None

    # --- lives ---------------------------------------------------------------------------------

    def _id(self) -> VersionId:
        return VersionId(self._history.generation, self.version)

    def _at(self) -> int:
        """The number that `restore()` will return: calls of `step()`, or optimizer steps."""
        return self.iteration + self._ahead if self._iterations.explicit else self.version

    def _restore(self, version: int | None, strict: bool, bar: Progress) -> Restored:
        begin = time.perf_counter()
        # What is being copied is good: no step has changed anything yet.
        self.catch_up()  # the copier may wait for a vote
        self.complete()
        self._agreement.void()
        self._agent.wait(None)
        self._collect()
        restore_session = RestoreSession(
            self.config,
            self.group,
            self.state,
            self._history,
            self._reports,
            bar,
            begin,
            self._resources.left_elsewhere,
        )
        attempt = restore_session.find(version, self.version)
        if attempt is None:
            self._levels.meet()
            return restore_session.report(Restored(0))
        with contextlib.closing(attempt):
            lineage, result = restore_session.load(attempt, strict, self.load_adapter)
            self._go_on_from(lineage, result)
            all_finished(attempt, self.group)
            chosen = version is not None or bool(restore_session.passed_over)
            self._went_back = chosen and restore_session.has_newer(attempt)
            self.state.drop_gradients()  # of an iteration that was cut short, or of none
            books = (self._agreement, self._pool, self._reports)
            if self._local_enabled() and not repair(attempt, self.group, self._levels, *books):
                self._schedule.requested = frozenset((MEMORY, LOCAL))
        return restore_session.report(result)

    def _go_on_from(self, lineage: Lineage, result: Restored) -> None:
        """The live state is that of `result`; everything else follows."""
        self.version, self.iteration, self.metric = result.version, int(result), None
        self._released = 0
        self._iterations.go_on_from(result)
        self._active.capture.forget()
        self._replicas.restart()
        self._unchanged.forget()
        self._schedule.start_at(result.version)
        self._levels.go_on_from(lineage, result)

    def _save_now(self, end: float = math.inf) -> None:
        """Blocking: the present state to memory and local. Collective. Waits for the disk until
        `end` (monotonic); what it has not taken then is broken."""
        self.wait(end - time.monotonic())
        before = VersionId(self._id().generation, self.steps_made)
        # The loop's own step() for it is still to come.
        self._ahead, self._saving = int(self._iterations.steps > 0), True
        try:
            with self._epoch_ends.between(self._iterations.steps > 0):
                found = self._demand.commit(before, self._at(), self._is_live)
                if found is Sealed.MOVED_ON:
                    self._history.take_again(self.version)
                if found is not Sealed.LIVE:
                    self._boundary(force=True)
        finally:
            self._ahead, self._saving = 0, False
        self.wait(end - time.monotonic())
        self._demand.settle(self._id())
        if found is Sealed.MOVED_ON and self._agreement.memory.safe != self._id():
            self._save_as_it_was(before, end)

    def _is_live(self, manifest: Manifest, image: memoryview) -> bool:
        """Whether the live state is, bit for bit, what was sealed so."""
        if self._keeps_boundary():
            return True
        head = self._head()
        if (head.iteration, head.iteration_counts, head.metric) != (
            manifest.iteration,
            manifest.iteration_counts,
            manifest.metric,
        ):
            return False
        with torch.inference_mode(False):
            return self._active.capture.is_unmoved(manifest, image, self.pack_adapter())

    def _keeps_boundary(self) -> bool:
        """For adapters: whether the state at the last boundary is worth more than the live one."""
        return False

    def _save_as_it_was(self, id_: VersionId, end: float) -> None:
        """What is live could not be taken, and an event said so: better the state at the boundary
        than none of that step. Collective."""
        self._warn(f"{id_} is stored as it was at its boundary, as what came after could not be")
        self._demand.commit_as_it_is(id_)
        self.wait(end - time.monotonic())
        self._demand.settle(id_)

    # --- hooks ---------------------------------------------------------------------------------

    def _before_step(self, label: str) -> None:
        """The barrier: nothing may change before its copy is complete."""
        self.metric = None
        self._before_change()

    def _step_of(self, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        """The function that changes its parameters."""
        return type(optimizer).step

    def _before_stranger(self) -> None:
        """The same before a step of an optimizer that no adapter knows."""
        Checkpointer._before_step(self, "")

    def _before_change(self) -> None:
        """The same before weights are changed by what is no step."""
        if self._active.snapshot is not None:
            self._active.finish()
        self._replicas.finish()

    def _say(self, text: str, severity: int) -> None:
        """What all ranks would say, once."""
        self._reports.notice(text, logging.DEBUG if self.group.rank else severity)

    def _find_apart(self) -> None:
        """For adapters: see whether something is to be kept apart now."""

    def _keep_apart(self, trained: Iterable[torch.Tensor], why: str) -> None:
        """For adapters, from `pack_adapter`: of what counts as alike as nobody trains it, these are
        trained now and not reduced, hence every rank's own from here on. `why` has `{names}`."""
        mistaken = [param for param in trained if id(param) in self.state.assumed_alike]
        if not mistaken:
            return
        self.state.keep_apart(mistaken)
        self._active.capture.forget()
        self._replicas.forget()
        names = [self.state.name_of(param) for param in mistaken]
        self._say(why.format(names=some(names)), logging.WARNING)

    def _warn(self, text: str) -> None:
        self._say(text, logging.WARNING)

    def _no_moment(self) -> str:
        """See `shutdown.no_moment`. Ranks may have been interrupted on both sides of a boundary, or
        of its vote."""
        mine = (self.steps_made, self._agreement.turns)
        self.catch_up()  # the copier may wait for a vote
        why, error_barrier, level = shutdown.no_moment(
            self.group,
            *mine,
            self._agreement.parted is not None,
            self.state.torn,
            self._iterations.stepping,
        )
        if not error_barrier:
            self._agreement.void()
            self.wait(WAIT_SECONDS)
            self._agreement.settle()
        if not level and self._agreement.parted is None:
            # Versions of one number would be of different iterations from here on.
            self._agreement.parted = self._parted = VersionId(0, self.version)
        return why

    def _made_step(self, label: str) -> bool:
        """False when the step that just ended was none of the training's."""
        return True

    def _nothing_new(self) -> bool:
        """True when no step was made since the start, or since the version restored from disk."""
        if not self._made_none:
            return False
        begun = self._history.began_at
        durable, past = self._agreement.local.safe, self._history.lineage
        if durable is None or durable.version != begun:
            return begun == 0
        return on_lineage(durable, past)

    @property
    def _made_none(self) -> bool:
        """No step was made, nor a version taken, since the start or the version restored."""
        memory = self._agreement.memory
        known = [*memory.open, *filter(None, [memory.safe])]
        taken = any(self._history.is_own(id_.generation) for id_ in known)
        return self.steps_made == self._history.began_at and not taken

    def _begun_from_memory(self) -> VersionId | None:
        """The version that this run began with, if it is in memory, of an earlier one."""
        safe, begun = self._agreement.memory.safe, self._history.began_at
        known = safe is not None and safe.version == begun and on_lineage(safe, self.lineage)
        return safe if known else None

    # --- attaching and ending ------------------------------------------------------------------

    def _uses_cuda(self) -> bool:
        return any(p.is_cuda for p in self.state.walk().params)

    def _local_enabled(self) -> bool:
        return self.config.uses("local")

    def _collect(self) -> None:
        """Hear what the agent said."""
        self._levels.collect()

    def _shut_down(self, remove: bool, abandoned: bool = False) -> None:
        self._closed = True
        self._halt.close()
        self._own_hooks.close()
        # The copier would wait for what is never released.
        self._active.give_up("the job ended in the middle of an iteration")
        self._agreement.close()  # the copier may wait for the vote of a rank that is gone
        self._active.close()
        self._replicas.restart()  # and with it what is held of the state
        self._levels.drift.wait()
        self._agent.close(abandoned=abandoned)
        self._resources.leave(remove)
        self.group.close()
        if self._trace is not None:
            self._trace.close()
        self.log.close()
