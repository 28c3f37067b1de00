"""The training loop: capture at the boundary, release by layer, barrier before the step.

`CheckpointerCore` has the code that runs in hooks and at boundaries. Everything that depends on the
gradient library is in the `Adapter`; every feature is a part (`core.parts`), which the loop calls
at its moments and otherwise does not know.

`Rounds`: a boundary reads the result of the last votes, decides, and starts the next. The decision
is to which levels the version of this boundary goes. It depends only on the result of the votes,
so that all ranks decide the same.

`ActiveSnapshot` is the version in progress, from its boundary until the copy is complete and
reported. `snapshot` copies a version; here the copy is started, waited for, and its result
reported. There is one copy at a time: a new version starts only after the copy of the previous one
has ended.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from tierckpt import _milestones
from tierckpt._text import some
from tierckpt.callbacks import CallbackList
from tierckpt.config import Config
from tierckpt.coordination.ballots import ballots_for
from tierckpt.coordination.peers import Groups
from tierckpt.coordination.settings_check import JobTopology
from tierckpt.coordination.versions import Reports, SlotHandoff
from tierckpt.core.decisions import VOID, VOTE_WIDTH, EarlyEnd, Schedule, Vote
from tierckpt.core.levels import INTERVALS, LOCAL, MEMORY, PERSISTENT, UNMEASURED, Level
from tierckpt.core.parts import Boundary, Part, Parts, Stalls, call
from tierckpt.core.version import Version
from tierckpt.events import Callback
from tierckpt.format.ids import VersionId
from tierckpt.format.records import VersionFacts
from tierckpt.group import Group
from tierckpt.hooks.iterations import Accumulation, Hooks, Iterations, Unattached
from tierckpt.restored import Restored
from tierckpt.snapshot import copy_engine
from tierckpt.snapshot.at_boundary import Copied
from tierckpt.snapshot.engine import SnapshotError
from tierckpt.snapshot.snapshot import Copier, Snapshot, Work
from tierckpt.snapshot.staging import Staging, normal_mode
from tierckpt.state.training_state import TrainingState
from tierckpt.storage.slot_pool import SlotPool

from . import shutdown
from .adapter import Adapter, own_method
from .levels import JobBase, Tiers
from .live_state import LiveState, Position
from .save_now import SaveNow
from .shutdown import Finished
from .start import Restart

if TYPE_CHECKING:
    from tierckpt.core.tuning import StepTimer

__all__ = ["ActiveSnapshot", "CheckpointerCore", "Rounds", "TrainingJob"]


APART = (
    "ranks made it in different iterations: some rank skipped an optimizer step that others made, "
    "or calls step() less often"
)
FAILED = "the snapshot failed on some rank; it is void on all"


LOOK_SECONDS = 0.1
"""A boundary looks for news that can wait (of agents, of files, of parts) when so much time has
passed since the last one that did; others repeat the last one, if nothing else differs. A look
costs some 0.3 ms."""
REPEATED = ((), (MEMORY,))
"""The levels of versions at a boundary that may repeat the last one."""


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
        self.usual: tuple[Level, ...] = ()
        """The levels that every version goes to, while a boundary may repeat the last one."""
        self.look_seconds = 0.0
        """From this moment on, by `time.monotonic()`, a boundary looks at everything."""
        self._changes_at = self._adapter = 0
        self.has_lost = False
        """True after votes have broken a version; the reader sets it to False."""

    def read(self) -> Vote:
        """Read the result of the last round of votes, and the agent's messages."""
        self._levels.slot_handoff.take_stock()
        were_apart = self._agreement.apart
        agreed, broken = self._agreement.read()
        newly_apart = self._agreement.apart and not were_apart
        if (agreed.adapter == VOID or newly_apart) and self._last is not None:
            id_, take = self._last
            self._schedule.requested |= frozenset(take)
            void = self._agreement.versions.find(id_) if take else None
            if void is not None:  # else one of the same number, taken at an earlier boundary
                void.is_void = not newly_apart
                if newly_apart:
                    self._break(void)
        self._levels.promotion.backlog.advance()
        if broken is not None:
            self._report_broken(broken)
        self._levels.collect()
        return agreed

    def read_same(self, id_: VersionId) -> Vote | None:
        """As `read` and `decide`, if the boundary of this version repeats the last one: all ranks
        voted the same, no rank had news, and the `usual` levels are due now and at the next
        boundary. Else None, and nothing was read."""
        if id_.version + 1 >= self._changes_at:
            return None
        agreed = self._agreement.read_same()
        if agreed is not None:
            self._schedule.seen = id_.version
            if self.usual:
                self._schedule.repeat(id_.version, self.usual)
        return agreed

    def repeat(self, id_: VersionId, adapter: int, place: int) -> bool:
        """As `read_same` and `vote`, if the boundary of this version repeats the last one, takes no
        version, and none is open. Else False, and nothing was read or cast."""
        if self.usual or adapter != self._adapter or id_.version + 1 >= self._changes_at:
            return False
        if not self._agreement.repeat_alone(id_, place):
            return False
        self._schedule.seen, self._last = id_.version, (id_, ())
        return True

    def _report_broken(self, version: Version) -> None:
        self.has_lost = True
        if not version.is_void:
            self._reports.lose(version, FAILED)

    def _break(self, version: Version) -> None:
        """Void a version that ranks made in different iterations. All ranks know that now, and no
        rank has voted for it as complete."""
        self._agreement.break_open(version.id)
        self._pool.void(version.id)
        self._reports.lose(version, APART)

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
        at: Boundary,
        adapter: int,
        parts: tuple[int, ...],
    ) -> None:
        """Cast this rank's vote. `adapter`: the result of `Adapter.vote`; `parts`: that of
        `Parts.vote`."""
        newest, take = at.id, at.levels
        self._last = newest, take
        if at.again and take == self.usual and adapter == self._adapter:
            # As many versions are in memory as at the last look: only an agent may take the room.
            same = not (at.wanted or at.row or (take and self._agent.pinned()))
            if same and self._agreement.repeat(newest, at.place, parts):
                return
        has_room = self._pool.has_room(self._agreement.versions.needed(), self._agent.pinned())
        writes = self._agent.busy() > 0
        if self._meter is not None:
            flushing = bool(self._agreement.persistent.open)
            self._meter.boundary(at.start_seconds, newest.version, take, writes, flushing)
        self._agreement.launch(
            newest,
            busy={MEMORY: not has_room, LOCAL: writes},
            figures=self._meter.figures() if self._meter is not None else UNMEASURED,
            adapter=adapter,
            place=at.place,
            wanted=at.wanted,
            parts=parts,
            own=at.row,
        )
        self._adapter = adapter
        self.usual, self._changes_at = self._schedule.usual()
        if take != self.usual or take not in REPEATED or self._meter is not None:
            self._changes_at = 0
        self.look_seconds = time.monotonic() + LOOK_SECONDS


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
        parts: Parts,
    ) -> None:
        """Start the copying thread.

        `meter` receives the time for which a version stopped the training. `by_layer`: the adapter
        will release layers one by one."""
        self.snapshot: Snapshot | None = None
        """None while no copy reads tensors that the optimizer may change."""
        self.release_early = config.release == "forward" or not by_layer
        """True: all layers may be copied from the boundary on."""
        engine = copy_engine.find()
        desk = None if engine is None else copy_engine.Desk(engine)
        self.capture = Staging(state, group, pool, desk)
        self._pool, self._handoff, self._reports = pool, slot_handoff, reports
        self._meter, self._parts = meter, parts
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
        version: Version,
        facts: VersionFacts,
        levels: tuple[str, ...],
        metric: Callable[[], float | None] | None,
        values: Callable[[], Any],
        boundary_seconds: float,
        as_usual: bool,
    ) -> Snapshot | None:
        """Copy the state that changes first into staging buffers; call `start` next.

        Returns None after a failure: the version is broken then, and the training continues; and
        for a small version, which is complete then. `metric` returns this rank's metric, `values`
        those of the adapter; both may raise. `boundary_seconds`: as for `start`. `as_usual`: as
        many iterations as usual have passed since the last boundary. If not, others may have made
        their version of this number in another one, so it must not be complete before the votes
        are known.
        """
        try:
            if metric is not None and (measured := metric()) is not None:
                facts = replace(facts, metric=measured)
            done = partial(self._handoff.done, version)
            at_once = self._may_turn_early and as_usual and not self._parts.taken
            with normal_mode():
                found = self.capture.take(facts, levels, values(), self._handoff, done, at_once)
            if isinstance(found, Snapshot):
                return found
            found.clock.boundary = time.perf_counter() - boundary_seconds
            done(found)
        except Exception as error:
            self._handoff.broken(version)
            self._reports.lose(version, f"the state could not be captured: {error}")
        return None

    def start(self, version: Version, snapshot: Snapshot, boundary_seconds: float) -> None:
        """Start the copy: now, or when the first layer is released.

        `boundary_seconds`: start of the version's boundary, by `time.perf_counter()`.
        """
        for taken in self._parts.taken:
            taken(snapshot)
        snapshot.submit = self._copier.submit
        self.snapshot = snapshot  # from here on it is completed, even after an interrupt
        self._handoff.started(version, snapshot)
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
            self._report(*self._handoff.finished.popleft())
        if self._reports.later:
            self._reports.say()

    def complete(self) -> None:
        """Wait as `finish` does, and until the version is sealed or has failed."""
        if self.snapshot is not None:
            self.snapshot.barrier()
            self.snapshot.wait_done()
        self.finish()

    def last_chance(self) -> None:
        """Complete the copy within a few seconds, at the end of a job. No optimizer has started its
        step, perhaps in the middle of an iteration, so the tensors still have the version's
        values."""
        if self.snapshot is not None:
            self.snapshot.release_all()
            if not self.snapshot.wait_done(LAST_CHANCE_SECONDS):
                return
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

    def _report(self, version: Version, snapshot: Snapshot | Copied) -> None:
        if isinstance(snapshot, Snapshot) and not snapshot.sealed:
            self.overwritten = self.overwritten or snapshot.overwritten
            self._reports.lose(version, snapshot.error)
            return
        self._reports.sealed(snapshot)
        for sealed in self._parts.sealed:
            sealed(snapshot)
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
    "a parametrization). A restart starts with the former names, and cannot restore this state "
    "(StateMismatchError). Make the change before the checkpointer, in every run"
)


class TrainingJob(JobBase):
    """What a part may use of its checkpointer, which owns it all. See `JobBase` for the rest."""

    start_seconds: float
    """Start of the attach, by `time.monotonic()`."""
    stalls: Stalls
    state: TrainingState
    adapter: Adapter
    active: ActiveSnapshot
    hooks: Hooks
    live: LiveState
    facts: Callable[[VersionId], VersionFacts]
    """The facts of a version of the current state."""


class CheckpointerCore(abc.ABC):
    """The part of a `Checkpointer` that hooks call. Training thread, but for `_release`.

    Each method of its making gives to `undo` what it made, as soon as that holds something.
    """

    _closed = _shutdown = False
    """True after the end, and during it."""
    _live: LiveState
    """Made with the loop's hooks."""

    def __init__(
        self,
        group: Group,
        adapter: Adapter,
        state: TrainingState,
        config: Config,
        topology: JobTopology,
        table: Sequence[type[Part]],
    ) -> None:
        """Start nothing. `table`: see `Parts`; the three before it: the result of `start.agree`."""
        self.group, self.adapter, self.config = group, adapter, config
        self._state, self._node = state, topology.node(group.rank)
        self._parts = Parts(table)
        self._number = 0
        """Votes of this checkpointer, see `Boundary.number`."""
        self._place = self._gap = 0
        """This rank's place at the last boundary, and how far it was from the one before."""
        self._adapter_begins = own_method(adapter, "boundary_begins")
        self._adapter_votes = own_method(adapter, "vote")
        self._adapter_passed = own_method(adapter, "boundary_passed")
        self._adapter_before_step = own_method(adapter, "before_step")
        """Methods of the adapter at each step, if it has its own."""
        self.restored = Restored(0)
        """The result of the last `restore()`."""

    def _join(
        self,
        topology: JobTopology,
        callbacks: CallbackList,
        on_event: Callback | None,
        start_seconds: float,
        slots: int,
        undo: contextlib.ExitStack,
    ) -> None:
        """Open the event log, start to vote, and take this rank's place on its node. Collective.
        The attach started at `start_seconds`, by `time.monotonic()`."""
        config, group = self.config, self.group
        self._job = job = TrainingJob(config, group, topology, callbacks, on_event, undo)
        job.start_seconds, job.state, job.adapter = start_seconds, self._state, self.adapter
        self._stalls = job.stalls = Stalls()
        self._callbacks, self._log = callbacks, job.log
        undo.callback(lambda: call(self._parts.left, False))
        self._parts.make(job, early=True)
        self._position = Position()
        width = VOTE_WIDTH + len(self._parts.silent)
        ballots = ballots_for(group, self._node, width, config.peer.device)
        job.enter(ballots, slots, lambda: self.version, self._parts.silent)
        self._agreement, self._reports = job.agreement, job.reports
        self._resources, self._pool = job.resources, job.pool

    def _connect_levels(self, groups: Groups) -> None:
        """Connect the levels, and make what decides about them."""
        job = self._job
        job.connect(groups)
        self._levels, self._history, self._agent = job.levels, job.history, job.agent
        self._sealed, self._handoff = job.sealed, job.levels.slot_handoff
        self._schedule = Schedule(self.config)
        self._meter: StepTimer | None = None
        if (tuner := self._schedule.tuner) is not None:
            from tierckpt.core.tuning import StepTimer

            self._meter = StepTimer("persistent" in tuner.every_steps)
        self._rounds = Rounds(self.config, self._schedule, self._meter, self._levels)

    def _prepare_copies(self, undo: contextlib.ExitStack) -> None:
        """Make what reads the state between a boundary and the next change."""
        self._active = self._job.active = ActiveSnapshot(
            self.config,
            self._state,
            self.group,
            self._pool,
            self._levels.slot_handoff,
            self._reports,
            self._meter,
            self.adapter.releases_by_layer,
            self._parts,
        )
        undo.callback(self._active.close)

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep out of `copy.deepcopy(model)` and `torch.save(model)`, which include the hooks."""
        return (Unattached, ())

    # --- the position of the loop ---------------------------------------------------------------

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

    def _watch_loop(self, model: torch.nn.Module, undo: contextlib.ExitStack) -> None:
        """Install the hooks that show the start and end of iterations and optimizer steps; make
        what needs to know what the loop has done, and the parts."""
        job, say = self._job, self._reports.notice_of_all
        accumulation = Accumulation(self._state)
        self._iterations = Iterations(
            self.config.boundary,
            boundary=self._boundary,
            before_step=self._before_step,
            made_step=own_method(self.adapter, "step_completed"),
            stepped=accumulation.stepped,
            keep_streams=self._stepped_before_boundary,
            say=say,
            step_class=self.adapter.step_class,
            no_calls=self.adapter.no_calls_notice,
        )
        self._own_hooks = job.hooks = Hooks(
            model,
            self._state,
            self._iterations,
            self._barrier,
            self._before_change,
            say,
            self._parts,
        )
        undo.callback(self._own_hooks.close)
        place = self.group, self.adapter, self._state, self._position, self._iterations
        capture = self._active.capture
        self._live = job.live = LiveState(*place, capture, self._parts, self._reports)
        job.facts = self._facts
        undo.callback(self._end_parts)
        self._parts.make(job, early=False)
        about = self.config, self.group, self._live, self._levels
        models = self._state.model, *self._state.given.values()
        self._finished = Finished(
            self.config, self.group.rank, self._resources.job, models, self._reports
        )
        self._halt = self._parts.find(EarlyEnd) or EarlyEnd()
        about_loop = self._parts, self._schedule, accumulation
        self._restart = Restart(*about, *about_loop, self.complete, self._finished)
        take = partial(self._boundary, force=True)
        saved = self._levels, self._sealed, self._parts
        self._save_now = SaveNow(self.group, self._live, *saved, take, self.wait)

    def _end_parts(self, remove: bool = False) -> None:
        call(reversed(self._parts.end), remove)

    def _stepped_before_boundary(self) -> None:
        """Keep what the loop will have changed by the forward pass of the boundary."""
        call(self._parts.stepped)
        self._active.capture.keep_streams()

    # --- the boundary ---------------------------------------------------------------------------

    def _boundary(self, force: bool = False) -> None:
        """Read the votes about the last boundary; decide, as all ranks do, whether the version of
        this one is taken; capture what the next forward pass changes, and vote. The rest is copied
        while the next iteration computes."""
        parts, position, explicit = self._parts, self._position, self._iterations.explicit
        if self._adapter_begins is not None:
            self._adapter_begins(force)
        vote = 0 if self._adapter_votes is None else self._adapter_votes()
        looks = force or time.monotonic() >= self._rounds.look_seconds
        if parts.looks:  # in this order: another thread may set it at any time
            parts.looks, looks = False, True
        number = self._number + 1
        parts.resting = not looks and number < parts.rest_until
        place = position.iteration if explicit else position.released
        if parts.resting and self._repeats(number, vote, place):
            return
        if not parts.resting:
            for starts in parts.boundary_begins if looks else parts.boundary_begins_again:
                starts(not explicit)
        start = time.perf_counter()
        self._active.finish()
        position.version += self._iterations.pass_boundary()
        if not self._history.lineage:
            self._levels.start_afresh()
        id_ = VersionId(self._history.generation, position.version)
        # The votes about the last boundary.
        same = None if looks else self._rounds.read_same(id_)
        agreed = self._read() if same is None else same
        run, rows = self._history.name, self._agreement.rows
        at = Boundary(id_, run, start, force, place, agreed, rows, number, same is not None)
        parts.resting = parts.resting and at.again
        if not parts.resting and (parts.readers_again or not at.again):
            parts.read(at)
        # The version of this boundary.
        rounds = self._rounds
        take = rounds.usual if at.again else rounds.decide(id_.version, agreed, force)
        if at.sound and self._agreement.diverged is None:
            at.levels = take
        else:
            self._pass_over(at, take)
        at.sound &= self._agreement.diverged is None and vote != VOID
        for decided in () if parts.resting else parts.decided:
            decided(at)
        taken = None
        gap, usual_gap = place - self._place, self._gap
        self._place, self._gap = place, gap
        if at.levels:
            taken = self._open_snapshot(id_, at.levels, vote == VOID, start, gap == usual_gap)
        # The votes about this boundary.
        self._number = number
        votes_anew = not parts.resting and (parts.voters_again or not at.again)
        rounds.vote(at, vote, parts.vote(at) if votes_anew else parts.numbers)
        # The next iteration starts.
        at.early = self._active.release_early
        for voted in () if parts.resting else parts.voted:
            voted(at)
        if taken is not None:
            self._active.start(*taken, start)
        if self._adapter_passed is not None:
            self._adapter_passed(agreed.adapter)
        self._ends(start, id_.version)
        if not parts.resting:
            for ends in parts.boundary_ends_again if at.again else parts.boundary_ends:
                ends(at)
            parts.rest()
        if (at.ends or agreed.no_close == 0) and not force:
            self._end_here(at.ends)

    def _repeats(self, number: int, vote: int, place: int) -> bool:
        """Pass a boundary at which nothing happens: no rank has news, no version is taken or open,
        and no part has work. What is left of `_boundary` then. False at others, and no more was
        done than to count the steps."""
        start, position, history = time.perf_counter(), self._position, self._history
        busy = self._active.snapshot is not None or self._handoff.finished or self._reports.later
        if busy or not history.lineage:
            return False
        position.version += self._iterations.pass_boundary()
        if not self._rounds.repeat(VersionId(history.generation, position.version), vote, place):
            return False
        self._number, self._gap, self._place = number, place - self._place, place
        if self._adapter_passed is not None:
            self._adapter_passed(vote)
        self._ends(start, position.version)
        return True

    def _ends(self, start_seconds: float, version: int) -> None:
        """A boundary that started then has passed."""
        if _milestones.listeners:
            _milestones.reached(_milestones.BOUNDARY)
        stalls, now = self._stalls, time.perf_counter()
        stalls.boundary_seconds += now - start_seconds
        stalls.passed_seconds, stalls.version = now, version

    def _read(self) -> Vote:
        """Read the votes, and do what they and the agent's messages ask for."""
        agreed = self._rounds.read()
        if self._rounds.has_lost:
            self._rounds.has_lost = False
            self._active.capture.look_at_all()
        if self._agreement.diverged is not None:
            self._report_divergence()
        if self._agreement.superseded_earlier(self._history.generation):
            self._resources.clear(self._node)
        return agreed

    def _report_divergence(self) -> None:
        """Report once that ranks make different numbers of optimizer steps."""
        call(self._parts.apart)
        diverged, together = self._agreement.diverged, self._agreement.together
        if diverged is None or self._agreement.divergence_is_reported:
            return
        self._agreement.divergence_is_reported = True
        self._pool.void(diverged)
        place = f"in iteration {self.iteration}" if self._iterations.explicit else "at a boundary"
        at = f"rank {self.group.rank} is at v{self.version} {place}"
        number = together.version if together is not None else None
        call(self._parts.diverged, diverged.version, number, at, self._agreement.missing)

    def _pass_over(self, at: Boundary, due: tuple[Level, ...]) -> None:
        """Take no version: a part refuses it, or ranks are at different iterations."""
        if at.postponed:
            self._schedule.requested |= frozenset(due)
        if at.forced:
            self._reports.lost(self.version, at.why or APART)

    def _open_snapshot(
        self,
        id_: VersionId,
        levels: tuple[Level, ...],
        void: bool,
        start_seconds: float,
        as_usual: bool,
    ) -> tuple[Version, Snapshot] | None:
        """Start a version: capture the state that changes first. A failure breaks the version and
        not the training. With `void` the adapter rejects the version."""
        # First in the ledgers: even after a failure all ranks have the same list of versions.
        version = self._agreement.open(id_, levels)
        facts = self._facts(id_)
        if PERSISTENT in levels:
            version.flush = facts
        if void:
            self._levels.slot_handoff.broken(version)
            return None
        live = self._live
        metric = None if self._position.metric is None else live.measured
        about = version, facts, levels, metric, live.packed
        snapshot = self._active.take(*about, start_seconds, as_usual)
        if orphans := self._state.new_orphans():
            self._reports.notice_of_all(ORPHANS.format(names=some(orphans)))
        if renamed := self._state.new_renamed():
            self._reports.notice_of_all(RENAMED.format(names=some(renamed)))
        if heavy := self._state.optimizer_tree.new_heavy():
            self._reports.notice_of_all(HEAVY.format(names=heavy))
        return None if snapshot is None else (version, snapshot)

    def _facts(self, id_: VersionId) -> VersionFacts:
        """The facts of a version of the current state, without the metric; equal on all ranks."""
        suspect = ""
        for suspicion in self._parts.suspicion:
            suspect = suspect or suspicion()
        return VersionFacts(
            job=self._resources.job.job,
            run_id=self._history.name,
            id=id_,
            shards=self.group.size,
            lineage=self._history.lineage,
            iteration=self._live.resume_iteration(),
            iteration_counts=self._iterations.counts,
            complete=self._agreement.local.safe,
            suspect=suspect,
        )

    def _id(self) -> VersionId:
        """The version of the last boundary."""
        return VersionId(self._history.generation, self.version)

    @abc.abstractmethod
    def _end_here(self, unattended: bool) -> None:
        """End the job, as all ranks do at this boundary. With `unattended` nobody asks
        `should_exit()`, so the loop would continue: raise SystemExit then."""

    # --- the hooks between two boundaries -------------------------------------------------------

    def _release(
        self,
        params: Iterable[torch.Tensor],
        reduction: torch.futures.Future[Any] | None,
        launched_seconds: float | None,
    ) -> None:
        """See `Handle.release`."""
        params = params if isinstance(params, (list, tuple)) else list(params)
        self._position.released += 1
        if not self._iterations.explicit:
            self._agreement.passed(self._position.released)
        for released in () if self._parts.resting else self._parts.released:
            released(params, self.version, reduction, launched_seconds)
        if self._active.snapshot is not None:
            self._active.release(params)

    def _before_step(self, label: str) -> None:
        """Called at the start of a registered optimizer's step. Raises RestoreError before the
        first one after a restore, if that has other data."""
        parts = self._parts
        for starts in () if parts.resting else parts.step_starts:
            starts()
        if self._adapter_before_step is None or self._adapter_before_step(label):
            if self._active.snapshot is None and parts.resting and not self._handoff.finished:
                self._position.metric = None  # all that `_barrier` would do
            else:
                self._barrier()
            for ready in () if parts.resting else parts.gradients_ready:
                ready(label)

    def _barrier(self) -> None:
        """Wait until the copy is complete: the state may change after this call. Also called before
        the step of an unregistered optimizer."""
        self._position.metric = None
        self._before_change()

    def _before_change(self) -> None:
        """Wait as `_barrier` does, before a change of weights outside optimizer steps."""
        start = time.perf_counter()
        if self._active.snapshot is not None or self._handoff.finished:
            self._active.finish()
        for settle in () if self._parts.resting else self._parts.settle:
            settle()
        self._stalls.barrier_seconds += time.perf_counter() - start

    def complete(self) -> None:
        """Wait until the version in progress is sealed or has failed, and nothing reads the live
        state. Not collective.

        Call it between two steps, or in the middle of an iteration before an optimizer has started
        its step.
        """
        self._active.complete()
        call(self._parts.settle)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until every version is sealed and committed, or has failed, and every record of the
        journal is on disk. Call it between steps.

        Not collective. False if that takes longer than `timeout_seconds`, if the checkpointer is
        closed and some result is unknown, or if the disk hangs and a signal's time is over.
        """
        if self._closed:
            return not self._agent.committing()
        start = time.monotonic()
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
        end = math.inf if timeout_seconds is None else start + timeout_seconds
        for drain in self._parts.drain:
            done = drain(end - time.monotonic()) and done
        self._levels.collect()
        return done
