"""The training side: capture at the boundary, release by layer, barrier before the step.

`CheckpointerCore` has the code that runs in hooks and at boundaries, and makes the parts that call
it; `CheckpointerParts` has the parts that it uses. Everything that depends on the gradient library
is in the `Adapter`. The parts of the loop: `_iterations`, `_trace`, `_own_hooks`, `_halt`; those of
the live state as a whole: `_live`, `_restart`, `_save_now`.
"""

from __future__ import annotations

import abc
import contextlib
import math
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from tierckpt import _milestones
from tierckpt._text import some
from tierckpt.core.halt_conditions import Reason
from tierckpt.core.levels import LOCAL, Level
from tierckpt.core.votes import VOID
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import VersionId
from tierckpt.halt.controller import HaltController
from tierckpt.hooks.accumulation import Accumulation
from tierckpt.hooks.install import Hooks
from tierckpt.hooks.iterations import Iterations
from tierckpt.snapshot.snapshot import Snapshot
from tierckpt.tracing.recorder import open_trace

from . import shutdown
from .finished import Finished
from .live_state import LiveState
from .parts import CheckpointerParts
from .restart import Restart
from .save_now import SaveNow

HEAVY = (
    "{names} in the state_dict() of optimizers, besides state and options, are copied at every "
    "boundary while the training waits. Store these tensors in optimizer.state, under their "
    "parameters: then they are copied during the allreduce"
)
ORPHANS = (
    "{names}: an optimizer steps this parameter, but the model no longer has it (did the forward "
    "pass replace it?). After a restart the optimizer has the model's parameter instead, and only "
    "restore(strict=False) accepts this state. Change the values in place without gradients, or "
    "make them a buffer, or give the optimizer the new parameter"
)

RENAMED = (
    "{names}: the model has these parameters under other names since a step of this run (pruning, "
    "a parametrization). A restart begins with the former names, and cannot restore this state "
    "(StateMismatchError). Make the change before the checkpointer, in every run"
)


class CheckpointerCore(CheckpointerParts, abc.ABC):
    """The part of a `Checkpointer` that hooks call. Training thread, but for `_release`."""

    _closed = _shutdown = False
    """True after the end, and during it."""

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
            keep_streams=self._stepped_before_boundary,
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
        parts = self._state.model, *self._state.given.values()
        self._finished = Finished(
            self.config, self.group.rank, self._resources.job, parts, self._reports
        )
        self._restart = Restart(*about, *going_on, accumulation, self.complete, self._finished)
        take = partial(self._boundary, force=True)
        around = self._sealed, self._epoch_ends, self._heartbeat
        self._save_now = SaveNow(self.group, self._live, self._levels, *around, take, self.wait)
        self._halt = HaltController(self.config, self.group.rank, self._node, self._reports.notice)
        undo.callback(self._halt.close)

    def _stepped_before_boundary(self) -> None:
        """Keep what the loop will have changed by the forward pass that is the boundary."""
        self._epoch_ends.stepped()
        self._active.capture.keep_streams()

    # --- the boundary ---------------------------------------------------------------------------

    def _boundary(self, force: bool = False) -> None:
        """Read the votes about the last boundary; decide, as all ranks do, whether the version of
        this one is taken; capture what the next forward pass changes, and vote. The rest is copied
        while the next iteration computes."""
        self.adapter.boundary_begins(force)
        self._own_hooks.unsaved.boundary(speaks=self.group.rank == 0)
        begin = time.perf_counter()
        self._active.finish()
        position = self._position
        position.version += self._iterations.pass_boundary()
        if not self._iterations.explicit:
            self._epoch_ends.in_forward()
        place = position.iteration if self._iterations.explicit else position.released
        if not self._history.lineage:
            self._levels.begin_afresh()
        id_ = VersionId(self._history.generation, position.version)
        # The votes about the last boundary.
        agreed = self._rounds.hear()
        if self._rounds.has_lost:
            self._rounds.has_lost = False
            self._active.capture.look_at_all()
        if self._agreement.parted is not None:
            self._part()
        self._replicas.compare(agreed, self._agreement.rows, place)
        self._unchanged.compare(agreed.unchanged)
        if self._agreement.superseded_earlier(id_.generation):
            self._resources.clear(self._node)
        unattended = self._halt.receive(agreed)
        if self._halt.reason is not Reason.NONE:
            _milestones.reached(_milestones.HALTING)
        # The version of this boundary.
        take, vote = self._rounds.decide(id_.version, agreed, force), self.adapter.vote()
        stopped = self._replicas.refusing or self._agreement.parted is not None
        if stopped:
            self._pass_over(take, force)
            take = ()
        sound, local = not stopped and vote != VOID, LOCAL in take
        whole = self._agreement.local.safe, self._agreement.peer.safe
        self._journal.boundary(id_, self._facts, self._live.packed, sound, local, *whole)
        snapshot = self._open_snapshot(id_, take, vote == VOID) if take else None
        # The votes about this boundary.
        halt, check = self._halt.vote(id_.version), self._replicas.vote(place)
        row, unchanged = self._replicas.row(), self._unchanged.count
        self._rounds.vote(id_, begin, take, halt, vote, check, unchanged, row)
        # The next iteration begins.
        self._replicas.begin(id_.version, self._active.release_early)
        if snapshot is not None:
            self._active.begin(snapshot, begin, self._trace)
        if self._trace is not None:
            self._trace = self._trace.boundary(id_.version, begin)
        self._heartbeat.boundary(id_.version, begin, self._history.name)
        self.adapter.boundary_passed(agreed.adapter)
        if self._forks.marks.needs is not None:
            self._forks.marks.settle(self._agreement.local.safe, self._agreement.memory.safe)
        _milestones.reached(_milestones.BOUNDARY)
        self._callbacks.call("on_step_boundary", id_.version)
        if self._replicas.error is not None:
            self._levels.drift.wait()
            self._replicas.raise_error()
        if (unattended or agreed.no_close == 0) and not force:
            self._end_here(unattended)

    def _part(self) -> None:
        """Report once that ranks make different numbers of optimizer steps."""
        self._halt.end_alone()
        parted, together = self._agreement.parted, self._agreement.together
        if parted is None or self._agreement.parted_is_reported:
            return
        self._agreement.parted_is_reported = True
        self._pool.void(parted)
        place = f"in iteration {self.iteration}" if self._iterations.explicit else "at a boundary"
        at = f"rank {self.group.rank} is at v{self.version} {place}"
        number = together.version if together is not None else None
        self._replicas.part(parted.version, number, at, self._agreement.missing)

    def _pass_over(self, take: tuple[Level, ...], force: bool) -> None:
        """Take no version, because replicas differ or ranks are at different iterations."""
        if self._replicas.asking:  # the result may be that nothing differs
            self._schedule.requested |= frozenset(take)
        if force:
            details = self._replicas.suspicion or "the details are known in a few steps"
            self._reports.lost(self.version, f"replicas differ: {details}")

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
        taken = self._active.take(facts, levels, self._live.measured, self._live.packed)
        if orphans := self._state.new_orphans():
            self._reports.notice_of_all(ORPHANS.format(names=some(orphans)))
        if renamed := self._state.new_renamed():
            self._reports.notice_of_all(RENAMED.format(names=some(renamed)))
        if heavy := self._state.optimizer_tree.new_heavy():
            self._reports.notice_of_all(HEAVY.format(names=heavy))
        return taken

    def _facts(self, id_: VersionId) -> VersionFacts:
        """The facts of a version of the current state, without the metric; equal on all ranks."""
        return VersionFacts(
            job=self._resources.job.job,
            run_id=self._history.name,
            id=id_,
            shards=self.group.size,
            lineage=self._history.lineage,
            iteration=self._live.resume_iteration(),
            iteration_counts=self._iterations.counts,
            complete=self._agreement.local.safe,
            suspect=self._replicas.suspicion,
        )

    def _id(self) -> VersionId:
        """The version of the last boundary."""
        return VersionId(self._history.generation, self.version)

    @abc.abstractmethod
    def _end_here(self, unattended: bool) -> None:
        """End the job, as all ranks do at this boundary. With `unattended` nobody asks
        `should_exit()`, so that the loop would go on: raise SystemExit then."""

    # --- the hooks between two boundaries -------------------------------------------------------

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
        self._position.released += 1
        if not self._iterations.explicit:
            self._agreement.passed(self._position.released)
        self._replicas.wake()
        if self._active.snapshot is not None:
            self._active.release(params)
        if self._callbacks:
            self._callbacks.call("on_allreduce_launched", params)

    def _before_step(self, label: str) -> None:
        """Called at the beginning of a registered optimizer's step. Raises RestoreError before the
        first one after a restore, if that has other data."""
        if self._data_witness.due:
            self._data_witness.settle()
        if self.adapter.before_step(label):
            self._barrier()
            self._journal.before_step(label, self.adapter.reads_gradients)

    def _barrier(self) -> None:
        """Wait until the copy is complete: the state may change after this call. Also called before
        the step of an unregistered optimizer."""
        self._position.metric = None
        self._before_change()

    def _before_change(self) -> None:
        """Wait as `_barrier` does, before a change of weights outside optimizer steps."""
        begin = time.perf_counter()
        if self._active.snapshot is not None:
            self._active.finish()
        self._replicas.finish()
        self._journal.settle()
        self._heartbeat.barrier(begin)

    def complete(self) -> None:
        """Wait until the version in progress is sealed or has failed, and nothing reads the live
        state. Not collective.

        Call it between two steps, or in the middle of an iteration before an optimizer has begun
        its step.
        """
        self._active.complete()
        self._replicas.finish()
        self._journal.settle()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until every version is sealed and committed, or has failed, and every record of the
        journal is on disk. Call it between steps.

        Not collective. False if that takes longer than `timeout_seconds`, if the checkpointer is
        closed and some result is unknown, or if the disk hangs and a signal's time is over.
        """
        if self._closed:
            return not self._agent.committing()
        begin = time.monotonic()
        self.complete()
        some = shutdown.NOTICE_SECONDS
        rank = self.group.rank
        shown = self.config, self._agent, self._reports, rank, self._node.first == rank
        with contextlib.closing(shutdown.WaitProgress(*shown)) as progress:
            over = self._halt.has_to_end

            def wait(seconds: float | None) -> bool:
                return self._agent.wait(seconds, on_look=progress.look, hopeless=over)

            if timeout_seconds is not None and timeout_seconds <= some:
                done = wait(timeout_seconds)
            elif not (done := wait(some)) and not (self._agent.stalled and over()):
                progress.say(f"waiting for writes to {self.config.directory}")
                done = wait(timeout_seconds and timeout_seconds - some)
        end = math.inf if timeout_seconds is None else begin + timeout_seconds
        done = self._journal.drain(end - time.monotonic()) and done
        self._levels.collect()
        return done


__all__ = ["CheckpointerCore"]
