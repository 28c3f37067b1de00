"""A restore, and the begin of a run from what was restored.

| step | method |
|---|---|
| end what is in progress, look for a version | `_find` |
| load it, and make the steps of the journal after it again | `_load` |
| begin the run from that | `_begin_with` |
| without a version: from one of another job, or from nothing | `_begin_elsewhere` |
| every counter and every level goes on from there | `_go_on_from` |

`restore.session` has the steps from the inventory to the loaded version.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from tierckpt import _garbage
from tierckpt.config import Config
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.rollback_records import keep_record
from tierckpt.core.levels import LOCAL, MEMORY
from tierckpt.core.schedule import Schedule
from tierckpt.errors import RestoreError
from tierckpt.format.ids import Lineage, VersionId
from tierckpt.goodput.heartbeat import Heartbeat
from tierckpt.group import Group
from tierckpt.hooks.accumulation import Accumulation
from tierckpt.journal.journal import Journal
from tierckpt.journal.replay import Replay
from tierckpt.lineage.fork import ForkOrder, Forks
from tierckpt.lineage.selection import PartReport, Selection
from tierckpt.restore.progress import Progress
from tierckpt.restore.session import LoadedVersion, RestoreSession
from tierckpt.restore.verified_version import VerifiedVersion, all_finished
from tierckpt.restored import Restored

from .finished import Finished
from .levels.repair import repair
from .levels.tiers import Tiers
from .live_state import LiveState


class Restart:
    """One rank's part of every restore. Training thread, between two steps; collective."""

    went_back = False
    """The last restore chose an older version than the newest one."""

    def __init__(
        self,
        config: Config,
        group: Group,
        live: LiveState,
        levels: Tiers,
        journal: Journal,
        forks: Forks,
        schedule: Schedule,
        heartbeat: Heartbeat,
        accumulation: Accumulation,
        complete: Callable[[], None],
        finished: Finished,
    ) -> None:
        """All arguments stay their owners'. `complete`: `Checkpointer.complete`."""
        self._config, self._group, self._live, self._levels = config, group, live, levels
        self._journal, self._forks, self._schedule = journal, forks, schedule
        self._heartbeat, self._accumulation, self._complete = heartbeat, accumulation, complete
        self._finished = finished

    # --- a restore ------------------------------------------------------------------------------

    def restore(
        self, version: int | None, strict: bool, bar: Progress, fork: ForkOrder
    ) -> Restored:
        """Restore the newest sound version, or this one, and the journal's steps after it; without
        a version as `fork` orders. Raises the errors of `Checkpointer.restore`."""
        session, attempt = self._find(version, bar)
        most, unrepeated = (None if strict else 0), ""
        if attempt is not None and session.version is None and not session.passed_over:
            self._say_unused(attempt.plan.id, strict)
        while attempt is not None:
            most = most if (session.version is None and not session.passed_over) else 0
            with contextlib.closing(attempt), self._records_after(attempt, most) as replay:
                loaded = self._load(session, attempt, strict, replay)
                if loaded is not None:
                    loaded.result.unrepeated = unrepeated
                    return self._begin_with(session, attempt, loaded)
            # Steps could not be made again exactly: the version anew, and the steps before them.
            assert replay is not None
            most, unrepeated = replay.exact, replay.unrepeated
            session, attempt = self._find(version, bar)
        return self._begin_elsewhere(session, fork, bar)

    def _find(
        self, version: int | None, bar: Progress
    ) -> tuple[RestoreSession, VerifiedVersion | None]:
        """Look for the version, read and verify it; None if there is no version at all."""
        begin = time.perf_counter()
        levels = self._levels
        # The version in progress is valid: no step has changed the state yet.
        levels.agreement.even_out()  # the copier may wait for a vote
        error_barrier = ErrorBarrier(self._group)
        with error_barrier:
            self._complete()
            self._journal.pause()
            levels.agreement.void()
            levels.agent.wait(None, hopeless=lambda: True)
            levels.collect()
            session = RestoreSession(
                self._config,
                error_barrier,
                self._live.state,
                levels.history,
                levels.reports,
                bar,
                begin,
                levels.resources.left_elsewhere,
            )
        found = session.find(version, self._live.position.version)
        if found is not None and session.version is None and not self._finished.asked:
            with contextlib.ExitStack() as on_refusal:
                on_refusal.callback(found.close)
                with error_barrier:
                    self._finished.refuse(found.plan.id)
                on_refusal.pop_all()
        return session, found

    def _load(
        self,
        session: RestoreSession,
        attempt: VerifiedVersion,
        strict: bool,
        replay: Replay | None,
    ) -> LoadedVersion | None:
        """Load the version, and make the journal's steps after it again. None, on all ranks, if
        they could not be made exactly: the live state is torn then."""
        load_adapter = self._live.adapter.load
        with _garbage.paused():
            if replay is None:
                return session.load(attempt, strict, load_adapter)
            loaded = session.load(attempt, strict, _load_later)
            return replay.run(loaded, attempt.trouble, load_adapter)

    @contextlib.contextmanager
    def _records_after(self, attempt: VerifiedVersion, most: int | None) -> Iterator[Replay | None]:
        """The records of the journal that follow a version, at most so many; None if there are
        none."""
        live, replay = self._live, None
        if most != 0:
            base, began = attempt.plan.id, self._levels.history.began_last
            barrier, step_class = ErrorBarrier(self._group), live.adapter.step_class
            replay = self._journal.records_after(base, began, barrier, step_class, most)
        if replay is None:
            yield None
            return
        with contextlib.closing(replay):
            live.iterations.repeating = True
            try:
                yield replay
            finally:
                live.iterations.repeating = False

    def _say_unused(self, base: VersionId, strict: bool) -> None:
        """Warn of a journal that this restart does not use."""
        if self._group.rank:
            return
        if text := self._journal.unused_after(base, self._levels.history.began_last, strict):
            self._levels.reports.notice(text, logging.WARNING)

    def load_from(
        self, source: str, selection: Selection, strict: bool, bar: Progress
    ) -> PartReport:
        """Load parts of another job's version. Raises the errors of `Checkpointer.load_from`."""
        with ErrorBarrier(self._group, _refused):
            self._accumulation.refuse()
        self._complete()
        self._journal.pause()
        report = self._forks.load_from(source, selection, strict, bar)
        self._live.forget()
        self._schedule.requested |= self._journal.begins_with
        return report

    # --- a run begins ---------------------------------------------------------------------------

    def _begin_with(
        self, session: RestoreSession, attempt: VerifiedVersion, loaded: LoadedVersion
    ) -> Restored:
        """Begin a run with a loaded version. Raises StateTornError on all ranks if one of them
        cannot."""
        error_barrier = ErrorBarrier(self._group, attempt.incomplete)
        with error_barrier:
            self._go_on_from(loaded.manifest.facts.lineage, loaded.result, error_barrier)
            all_finished(attempt, error_barrier)
            self.went_back = session.went_back(attempt)
            facts = loaded.manifest.facts
            self._finished.began_with(facts.run_id, facts.id.version)
            session.settle_rollback(attempt)
            self._live.state.drop_gradients()  # left by an interrupted iteration
            mended = not self._config.uses(LOCAL) or repair(attempt, self._group, self._levels)
            if not mended:
                self._schedule.requested = frozenset((MEMORY, LOCAL))
            # The journal leads to no version that was in memory alone, and its records do not give
            # up newer versions of an earlier run, or the journal of another number of ranks.
            self._schedule.requested |= self._journal.begins_with
            self._forks.marks.has_versions()
            return session.report(loaded.result)

    def _begin_elsewhere(
        self, session: RestoreSession, order: ForkOrder, bar: Progress
    ) -> Restored:
        """Begin this job, which has no version of its own, from a version of another job, if one
        was ordered; else from nothing. Raises as `_begin_with`."""
        forked = self._forks.begin(order, bar, self._live.adapter.load)
        if forked is None:
            with ErrorBarrier(self._group) as error_barrier:
                self._levels.meet(error_barrier)
                return session.report(Restored(0))
        self._levels.run_notes.fork = forked.result.forked_from
        error_barrier = ErrorBarrier(self._group, forked.found.incomplete)
        with contextlib.closing(forked.found), error_barrier:
            self._go_on_from((), forked.start, error_barrier)
            all_finished(forked.found, error_barrier)
            self._live.state.drop_gradients()
            if self._config.uses(LOCAL):  # the source's version is held until then
                self._schedule.requested = frozenset((MEMORY, LOCAL))
            return session.report(forked.result)

    def carry_on(self, version: int, iteration: int, lineage: Lineage) -> None:
        """Begin a run with the live state as it is, see `Handle.carry_on`."""
        history = self._levels.history
        history.look()
        result = Restored(iteration)
        result.version, result.generation = version, lineage[-1][0] if lineage else 0
        result.iteration_counts = self._live.iterations.counts
        self._go_on_from(lineage, result)
        # On a new node.
        keep_record(self._config, self._group.rank, history, self._levels.reports)
        history.forget()

    def _go_on_from(
        self, lineage: Lineage, result: Restored, error_barrier: ErrorBarrier | None = None
    ) -> None:
        """Set all counters to those of `result`, which the live state equals now. Inside a block of
        `error_barrier`, if that is given."""
        live = self._live
        live.go_on_from(result)
        self._schedule.start_at(result.version)
        self._levels.go_on_from(lineage, result, error_barrier)
        self._heartbeat.resumed(result.version)
        if lineage:
            id_ = VersionId(result.generation, result.version)
            self._journal.begin_at(id_, self._levels.history.generation)
        live.adapter.resumed(live.position.iteration)


def _refused(ranks: list[int], why: str) -> RestoreError:
    return RestoreError(f"rank {ranks[0]}: {why}")


def _load_later(value: Any) -> None:
    """Load no values of the adapter: those of a later record follow."""


__all__ = ["Restart"]
