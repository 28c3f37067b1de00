"""Underway: the version that is being copied, from its boundary to the word of what became of it.

`snapshot` says how a version is copied. Here is when that begins, who waits for it, and who hears
of it afterwards. There is one at a time: nothing is taken before the one before is over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tierckpt.config import Config
from tierckpt.coordination.reports import Reports
from tierckpt.coordination.slot_handoff import SlotHandoff
from tierckpt.core.tuning.autotune import StepTimer
from tierckpt.format.facts import VersionFacts
from tierckpt.group import Group
from tierckpt.replicas.unchanged import Unchanged
from tierckpt.snapshot.snapshot import Copier, Phase, Snapshot, SnapshotError, Work
from tierckpt.snapshot.staging import Staging
from tierckpt.state.training_state import TrainingState
from tierckpt.storage.memory.slot_pool import SlotPool

if TYPE_CHECKING:
    from tierckpt.tracing.recorder import Trace

EARLY_AFTER = 3
"""So many slow barriers in a row make `release="auto"` copy from the forward pass on."""
SLOW_BARRIER_SECONDS = 1e-3
LAST_CHANCE_SECONDS = 5.0
"""After an exception a copy that needs longer is given up: what it waits for may never come."""


class ActiveSnapshot:
    """Owns the thread that copies, and what it copies from. Training thread."""

    def __init__(
        self,
        config: Config,
        state: TrainingState,
        group: Group,
        pool: SlotPool,
        slot_handoff: SlotHandoff,
        reports: Reports,
        meter: StepTimer | None,
        by_layer: bool,
        unchanged: Unchanged,
    ) -> None:
        """`meter` hears how long versions kept the training, `unchanged` of each that is sealed.
        `by_layer`: somebody will say when a layer may be copied."""
        self.snapshot: Snapshot | None = None
        """None while nothing is being copied that the optimizer could tear."""
        self.release_early = config.release == "forward" or not by_layer
        """Everything may be copied from the boundary on."""
        self.capture = Staging(state, group, pool)
        self._pool, self._handoff, self._reports = pool, slot_handoff, reports
        self._meter, self._unchanged = meter, unchanged
        self._may_turn_early = config.release == "auto"
        self.overwritten = False
        """A version was lost as the loop changed what was being copied."""
        self._slow_barriers = 0
        self._copier = Copier()

    def submit(self, work: Work) -> None:
        """Have the thread that copies do this first."""
        self._copier.submit(work)

    def take(
        self,
        facts: VersionFacts,
        levels: tuple[str, ...],
        metric: Callable[[], float | None],
        adapter: Callable[[], Any],
    ) -> Snapshot | None:
        """Copy aside what changes first, of a version that is in the ledgers; then `begin`.

        None when that failed, which breaks the version, not the training. `metric` returns this
        rank's, `adapter` the adapter's own; both may raise.
        """
        try:
            facts = replace(facts, metric=metric())
            choose_slot = self._handoff.chooser(facts.id, len(facts.lineage))
            return self.capture.take(facts, levels, adapter(), choose_slot, self._handoff.done)
        except Exception as error:
            self._handoff.broken(facts.id)
            self._reports.lost(facts.id.version, f"the state could not be captured: {error}")
            return None

    def begin(self, snapshot: Snapshot, boundary_seconds: float, trace: Trace | None) -> None:
        """Have it copied: from now on, or from the first layer that is released.

        `boundary_seconds`: when its boundary began, by `time.perf_counter()`.
        """
        snapshot.trace = trace
        snapshot.begin = self._copier.submit
        self.snapshot = snapshot  # from here on it is completed, whatever interrupts this
        self._handoff.begun(snapshot)
        self._copier.expect(snapshot)
        if snapshot.starts_at_once or not self._pool.complete:
            snapshot.start()
        if self.release_early:
            snapshot.release_all()
        snapshot.clock.boundary = time.perf_counter() - boundary_seconds

    def release(self, params: Iterable[torch.Tensor]) -> None:
        """The layers of these parameters may be copied."""
        if self.snapshot is not None:
            self.snapshot.release(params)

    def finish(self) -> None:
        """The barrier: return when the optimizer may change the state. Says what is to be said of
        this version and of earlier ones."""
        if self.snapshot is not None:
            self.snapshot.barrier()
            if self.snapshot.starved:
                self._handoff.starved()
            self.snapshot = None
        while self._handoff.finished:
            self._report(self._handoff.finished.popleft())
        self._reports.say()

    def complete(self) -> None:
        """The same, and return when it is sealed or has failed."""
        if self.snapshot is not None:
            self.snapshot.barrier()
            self.snapshot.wait_done()
        self.finish()

    def last_chance(self) -> None:
        """The job ends here, in the middle of an iteration perhaps. No optimizer has begun its
        step, so what is being copied is as it was: let it be completed, if that takes not long."""
        if self.snapshot is not None:
            self.snapshot.release_all()
            if self.snapshot.wait_done(LAST_CHANCE_SECONDS):
                self.finish()

    def give_up(self, why: str) -> None:
        """It fails, and what it waits for need not come."""
        if self.snapshot is not None:
            self.snapshot.fail(SnapshotError(why))

    def close(self) -> None:
        """End the thread; what is being copied was given up, or it is waited for."""
        self._copier.close()
        self.capture.close()
        self.snapshot = None

    def _report(self, snapshot: Snapshot) -> None:
        if snapshot.phase is Phase.FAILED:
            self.overwritten = self.overwritten or snapshot.overwritten
            self._reports.lost(snapshot.facts.id.version, snapshot.error)
            return
        self._reports.sealed(snapshot)
        assert snapshot.manifest is not None
        self._unchanged.sealed(snapshot.plan, snapshot.manifest)
        if self._meter is not None:
            self._meter.stalled(snapshot.clock.boundary + snapshot.clock.barrier)
        if self._may_turn_early and not self.release_early:
            self._judge_window(snapshot.clock.barrier)

    def _judge_window(self, barrier_seconds: float) -> None:
        """Copy from the forward pass on, if the backward pass is evidently too short for it."""
        slow = barrier_seconds > SLOW_BARRIER_SECONDS
        self._slow_barriers = self._slow_barriers + 1 if slow else 0
        if self._slow_barriers >= EARLY_AFTER:
            self.release_early = True
            self._reports.notice(
                "copying does not fit into the backward pass "
                f"(the last barrier took {1e3 * barrier_seconds:.1f} ms); from now on "
                "it starts with the forward pass",
                logging.INFO,
            )


__all__ = ["ActiveSnapshot"]
