"""The version in progress: from its boundary until the copy is complete and reported.

`snapshot` copies a version. This module starts the copy, waits for it, and reports the result.
There is one copy at a time: a new version starts only after the copy of the previous one has ended.
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
from tierckpt.snapshot import copy_engine
from tierckpt.snapshot.copier import Copier, Work
from tierckpt.snapshot.phase import Phase
from tierckpt.snapshot.snapshot import Snapshot, SnapshotError
from tierckpt.snapshot.staging import Staging, normal_mode
from tierckpt.state.training_state import TrainingState
from tierckpt.storage.memory.slot_pool import SlotPool

if TYPE_CHECKING:
    from tierckpt.tracing.recorder import Trace

_log = logging.getLogger("tierckpt")

EARLY_AFTER = 3
"""Number of slow barriers in a row after which `release="auto"` copies from the forward pass on."""
SLOW_BARRIER_SECONDS = 1e-3
LAST_CHANCE_SECONDS = 5.0
"""Time limit of a copy after an exception: the copy may wait for layers that are never released."""


class ActiveSnapshot:
    """The copy in progress. Owns the copying thread and the staging buffers. Training thread."""

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
        """Start the copying thread.

        `meter` receives the time for which a version stopped the training; `unchanged` receives
        each sealed version. `by_layer`: the adapter will release layers one by one."""
        self.snapshot: Snapshot | None = None
        """None while no copy reads tensors that the optimizer may change."""
        self.release_early = config.release == "forward" or not by_layer
        """True: all layers may be copied from the boundary on."""
        engine = copy_engine.find()
        desk = None if engine is None else copy_engine.Desk(engine)
        self.capture = Staging(state, group, pool, desk)
        self._pool, self._handoff, self._reports = pool, slot_handoff, reports
        self._meter, self._unchanged = meter, unchanged
        self._may_turn_early = config.release == "auto"
        self.overwritten = False
        """True after a version was lost because the loop changed tensors that were being copied."""
        self._slow_barriers = 0
        self._copier = Copier(desk)
        _log.debug("%s", copy_engine.describe())

    def submit(self, work: Work) -> None:
        """Give the copying thread this work, before its other work."""
        self._copier.submit(work)

    def take(
        self,
        facts: VersionFacts,
        levels: tuple[str, ...],
        metric: Callable[[], float | None],
        adapter: Callable[[], Any],
    ) -> Snapshot | None:
        """Copy the state that changes first into staging buffers; call `begin` next. The version
        must be in the ledgers.

        Returns None after a failure: the version is broken then, and the training goes on.
        `metric` returns this rank's metric, `adapter` the values of the adapter; both may raise.
        """
        try:
            if (measured := metric()) is not None:
                facts = replace(facts, metric=measured)
            choose_slot = self._handoff.chooser(facts.id, len(facts.lineage))
            with normal_mode():
                return self.capture.take(facts, levels, adapter(), choose_slot, self._handoff.done)
        except Exception as error:
            self._handoff.broken(facts.id)
            self._reports.lost(facts.id.version, f"the state could not be captured: {error}")
            return None

    def begin(self, snapshot: Snapshot, boundary_seconds: float, trace: Trace | None) -> None:
        """Start the copy: now, or when the first layer is released.

        `boundary_seconds`: start of the version's boundary, by `time.perf_counter()`.
        """
        snapshot.trace = trace
        snapshot.begin = self._copier.submit
        self.snapshot = snapshot  # from here on it is completed, even after an interrupt
        self._handoff.begun(snapshot)
        self._copier.expect(snapshot)
        if snapshot.starts_at_once or not self._pool.complete:
            snapshot.start()
        if self.release_early:
            snapshot.release_all()
        snapshot.clock.boundary = time.perf_counter() - boundary_seconds

    def release(self, params: Iterable[torch.Tensor]) -> None:
        """Allow the copy of the layers of these parameters."""
        if self.snapshot is not None:
            self.snapshot.release(params)

    def finish(self) -> None:
        """Wait until the optimizer may change the state (the barrier); then emit the events of this
        version and of earlier ones."""
        if self.snapshot is not None:
            self.snapshot.barrier()
            if self.snapshot.starved:
                self._handoff.starved()
            self.snapshot = None
        while self._handoff.finished:
            self._report(self._handoff.finished.popleft())
        self._reports.say()

    def complete(self) -> None:
        """Wait as `finish` does, and until the version is sealed or has failed."""
        if self.snapshot is not None:
            self.snapshot.barrier()
            self.snapshot.wait_done()
        self.finish()

    def last_chance(self) -> None:
        """Complete the copy within a few seconds, at the end of a job. No optimizer has begun its
        step, perhaps in the middle of an iteration, so the tensors still have the version's
        values."""
        if self.snapshot is not None:
            self.snapshot.release_all()
            if self.snapshot.wait_done(LAST_CHANCE_SECONDS):
                self.finish()

    def give_up(self, why: str) -> None:
        """Fail the copy in progress for this reason; it stops waiting for layers."""
        if self.snapshot is not None:
            self.snapshot.fail(SnapshotError(why))

    def close(self) -> None:
        """End the thread. Waits for a copy in progress, unless `give_up` was called."""
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
        """Copy from the forward pass on, if the backward pass is too short for the copy."""
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
