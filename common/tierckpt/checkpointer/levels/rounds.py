"""Rounds of votes: a boundary reads the result of the last one, decides, and starts the next.

The decision is to which levels the version of this boundary goes. It depends only on the result of
the votes, so that all ranks decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierckpt.config import Config
from tierckpt.core.halt_conditions import HaltVote
from tierckpt.core.levels import INTERVALS, LOCAL, MEMORY, Level
from tierckpt.core.schedule import Schedule
from tierckpt.core.tuning.autotune import UNKNOWN, StepTimer
from tierckpt.core.votes import VOID, Vote
from tierckpt.format.ids import VersionId

from .tiers import Tiers

APART = (
    "ranks made it in different iterations: some rank skipped an optimizer step that others made, "
    "or calls step() less often"
)
FAILED = "the snapshot failed on some rank; it is void on all"


class Rounds:
    """One rank's part. Training thread; waits for the agent only with `when_busy="wait"`."""

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        meter: StepTimer | None,
        levels: Tiers,
    ) -> None:
        """All arguments stay their owners'. `meter`: None if no interval is automatic."""
        self._every = tuple(level for level in INTERVALS if config.uses(level))
        self._schedule, self._meter = schedule, meter
        self._agreement, self._pool = levels.agreement, levels.pool
        self._levels, self._agent, self._reports = levels, levels.agent, levels.reports
        self._last: tuple[VersionId, tuple[Level, ...]] | None = None
        """The version of the previous boundary, and the levels that it was to go to."""
        self._void: set[VersionId] = set()
        """Versions that are void on all ranks, and that no event is to report as lost."""
        self.has_lost = False
        """True after votes have broken a version; the reader sets it to False."""

    def hear(self) -> Vote:
        """Read the result of the last round of votes, and the agent's messages."""
        self._levels.slot_handoff.take_stock()
        were_apart = self._agreement.apart
        agreed, broken = self._agreement.read()
        newly_apart = self._agreement.apart and not were_apart
        if (agreed.adapter == VOID or newly_apart) and self._last is not None:
            void, take = self._last
            self._schedule.requested |= frozenset(take)
            if take and newly_apart:
                self._break(void)
            elif take:
                self._void.add(void)
        self._levels.promotion.backlog.go_on()
        if broken is not None:
            self._report_broken(broken)
        self._levels.collect()
        return agreed

    def _report_broken(self, id_: VersionId) -> None:
        self.has_lost = True
        if id_ in self._void:
            self._void.remove(id_)
        else:
            self._reports.lost(id_.version, FAILED)

    def _break(self, id_: VersionId) -> None:
        """Void a version that ranks made in different iterations. All ranks know that now, and no
        rank has voted for it as complete."""
        self._agreement.break_open(id_)
        self._pool.void(id_)
        self._reports.lost(id_.version, APART)

    def decide(self, version: int, agreed: Vote, force: bool) -> tuple[Level, ...]:
        """The levels that the version goes to; none if it is not taken, all with `force`."""
        decision = self._schedule.decide(version, agreed)
        if force:
            return self._every
        for change in decision.changes:
            self._reports.interval(change)
        for level, reason in decision.skipped:
            self._reports.skipped(level, reason, level in decision.again)
        if decision.wait:
            self._agent.wait(None, on_look=self._levels.tell_of_stalls)
            self._levels.collect()
            if len(self._agreement.memory.open) > 1:  # votes lag, and would not catch up
                self._levels.slot_handoff.wait()
                for broken in self._agreement.vote_again(version):
                    self._report_broken(broken)
        return decision.take

    def vote(
        self,
        newest: VersionId,
        begin_seconds: float,
        take: tuple[Level, ...],
        halt: HaltVote,
        adapter: int,
        check: tuple[int, int, int, int] = (0, 0, 0, -1),
        unchanged: int = 0,
        own: Sequence[int] = (),
    ) -> None:
        """Cast this rank's vote at the boundary of `newest`.

        Args:
            newest: the version of this boundary.
            begin_seconds: start of the boundary, by `time.perf_counter()`.
            take: the result of `decide`.
            halt: the result of `HaltController.vote`.
            adapter: the result of `Adapter.vote`.
            check: the result of `ReplicaMonitor.vote`.
            unchanged: see `Vote`.
            own: the result of `ReplicaMonitor.row`.
        """
        self._last = newest, take
        has_room = self._pool.has_room(self._agreement.needed(), self._agent.pinned())
        writes = self._agent.busy() > 0
        if self._meter is not None:
            flushing = bool(self._agreement.persistent.open)
            self._meter.boundary(begin_seconds, newest.version, take, writes, flushing)
        self._agreement.launch(
            newest,
            busy={MEMORY: not has_room, LOCAL: writes},
            figures=self._meter.figures() if self._meter is not None else UNKNOWN,
            halt=halt,
            adapter=adapter,
            check=check,
            unchanged=unchanged,
            own=own,
        )


__all__ = ["Rounds"]
