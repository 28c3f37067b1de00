"""The training side: capture at the boundary, release by layer, barrier before the step.

`CheckpointerCore` has the code that runs in hooks and at boundaries, with the parts that
`CheckpointerParts` made; `Checkpointer` has the methods for scripts. Everything that depends on the
gradient library is in the `Adapter`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from tierckpt import _milestones
from tierckpt._text import some
from tierckpt.core.halt_conditions import Reason
from tierckpt.core.levels import LOCAL, Level
from tierckpt.core.votes import VOID
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import VersionId
from tierckpt.snapshot.snapshot import Snapshot

from .parts import CheckpointerParts

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


class CheckpointerCore(CheckpointerParts):
    """The part of a `Checkpointer` that hooks call. Training thread, but for `_release`."""

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

    def _end_here(self, unattended: bool) -> None:
        """End the job, as all ranks do at this boundary. With `unattended` nobody asks
        `should_exit()`, so that the loop would go on."""
        self.close()
        if unattended:
            interrupted = self._halt.reason.is_interruption
            raise SystemExit(self.config.halt_exit_status if interrupted else 0)

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
        """Called at the beginning of a registered optimizer's step."""
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


__all__ = ["CheckpointerCore"]
