"""Recorder: one rank's journal during the training.

Every record follows a version or another record. After a record that could not be made the journal
stops, and it starts again at the next version on local.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tierckpt._text import error_text, size_text
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.core.levels import LOCAL, MEMORY, Level
from tierckpt.core.parts import Boundary
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.records import VersionFacts
from tierckpt.snapshot.copy_plan import CopyPlan
from tierckpt.snapshot.snapshot import guard_memory_moves
from tierckpt.snapshot.staging import normal_mode
from tierckpt.snapshot.tensor_memory import requires_grad
from tierckpt.state import tree_codec

from .copies import JournalCopies, Keeper
from .journal import CLOSE_SECONDS, Journal
from .replay import Replay
from .segments import (
    ITSELF,
    NOT_STRICT,
    SegmentName,
    rebuildable,
)
from .steps import (
    INLINE_BYTES,
    DigestPlan,
    DigestWork,
    GradientImages,
    Image,
    SmallStateImages,
    StepClass,
    UnjournaledError,
    gradients_of,
)
from .writer import Draft, JournalWriter

if TYPE_CHECKING:
    from tierckpt.checkpointer.loop import TrainingJob
    from tierckpt.restored import Restored

__all__ = ["JournalRecorder"]


STOPPED = (
    "the journal ends at v{last}: {why}. Later steps are not on disk until the next version is; "
    "then the journal starts again"
)
BEHIND = (
    "{folder} does not keep up with {size} a step and rank. Use a faster disk, leave out "
    'local_journal_steps, or set when_busy="wait", and the training waits for the disk'
)
MAX_STEPS = 64
"""Limit of optimizer steps in one iteration, with all gradients in memory."""
MAX_BYTES, MAX_COPIES = 2 * 1024**3, 4
"""The larger one limits their memory: so many bytes, or the rank's stripe of all parameters so many
times."""
ENDLESS = (
    "{steps} optimizer steps were made without a boundary between them, and their gradients take "
    "{size} of memory. Call step() of the checkpointer more often, or leave out local_journal_steps"
)
MAX_INTERVALS = 3
"""Limit of the steps since the newest complete or protected version, in `local_journal_steps`."""
STUCK = "no version became complete on all local disks since v{safe}"
UNSOUND = "this boundary is no version"
THAWED = "requires_grad of parameters was changed"


class JournalRecorder(Journal):
    """Training thread; a thread of its own writes. The methods without a description are those of
    `Part`."""

    starts_with: frozenset[Level] = frozenset((MEMORY, LOCAL))
    unused = NOT_STRICT

    def __init__(self, job: TrainingJob) -> None:
        """All of the job stays its owner's."""
        config, group, peers, reports = job.config, job.group, job.levels.peers, job.reports
        super().__init__(config, group, job.node, job.agreement)
        self._job, self._state = job, job.state
        self._capture, self._reports = job.active.capture, reports
        self._submit = job.active.submit
        self._copies = JournalCopies(config, group.rank, group.size, peers, self.folder, reports)
        alone = not self._copies.on
        self._writer = JournalWriter(self.folder, self._failed, reuses_small=alone)
        self._first: VersionId | None = None
        """Where the journal started first since the last `pause`, alike on all ranks; None if it
        did not yet."""
        self._place: VersionId | None = None
        """The version or record that the next record follows; None while the journal is stopped."""
        self._segment: SegmentName | None = None
        self._trained: list[bool] = []
        """Whether each parameter required a gradient at `_place`, which no record changes."""
        self._seen: tuple[CopyPlan, bytes] | None = None
        """The plan, and its `trained`, for which that holds."""
        self._steps: list[Image] = []
        """Gradients of the steps since the last boundary."""
        self._gradients: dict[str, GradientImages] = {}
        self._small = SmallStateImages()
        self._digest: DigestPlan | None = None
        self._work: DigestWork | None = None
        """The digest that may be in progress."""

    # --- the run --------------------------------------------------------------------------------

    def pause(self) -> None:
        self.drain(CLOSE_SECONDS)
        self._first = None
        self._stop("other state is loaded")

    def _stop(self, why: str) -> None:
        self._place, self._steps = None, []
        self._copies.stop(why)

    def continues_from(self, result: Restored, base: VersionId | None, generation: int) -> None:
        if base is not None:
            self._steps = []
            self._follow(base, generation)

    def _follow(self, id_: VersionId, writer: int) -> None:
        new_run = self._segment is None or self._segment.writer != writer
        self._place, self._first = id_, self._first or id_
        self._trained, self._seen = self._trained_now(), None
        key = ShardKey(id_, self._group.rank, self._group.size)
        self._segment = SegmentName(key, writer)
        if new_run:
            # A run of that number has left its journal, and no version: it counts no more.
            wrote = self._owner.wrote
            self._writer.remove(lambda n: wrote(n) and n.keeper == ITSELF and n.writer >= writer)
        self._copies.start_file(self._segment, new_run)

    def _trained_now(self) -> list[bool]:
        return [*map(requires_grad, self._state.walk().params)]

    def drain(self, timeout_seconds: float) -> bool:
        self.settle()
        start = time.monotonic()
        done = self._writer.drain(timeout_seconds)
        return self._copies.drain(start + timeout_seconds - time.monotonic()) and done

    def end(self, remove: bool) -> None:
        self._copies.close(remove)
        if remove:
            self._writer.remove(self._owner.tidies)
        self._writer.close()

    def records_after(
        self,
        base: VersionId,
        rollback: tuple[int, int],
        barrier: ErrorBarrier,
        step_class: StepClass,
        most: int | None,
    ) -> Replay | None:
        """Arguments as for `Replay`."""
        where = self._config.directory, self._owner.node, self._state, barrier, self._reports
        replay = Replay(*where, base, rollback, step_class, most)
        if len(replay):
            return replay
        replay.close()
        return None

    def unused_after(self, base: VersionId, rollback: tuple[int, int], strict: bool) -> str:
        return "" if strict else super().unused_after(base, rollback, strict)

    # --- a step and a boundary ------------------------------------------------------------------

    def gradients_ready(self, label: str) -> None:
        if not self._job.adapter.reads_gradients(label) or self._place is None:
            return
        try:
            may_wait = self._keep_up()
            named, tree = gradients_of(self._state, label)
            if label not in self._gradients:
                self._gradients[label] = GradientImages(self._group.rank, self._group.size)
            image = self._gradients[label].make(named, tree, self._writer.room)
            self._steps.append(image)
            self._copies.add(label, named, image.tree, may_wait)
        except Exception as error:
            self._give_up(error)

    def decided(self, at: Boundary) -> None:
        id_, sound, adapter = at.id, at.sound, self._job.live.packed
        safe, protected = self._agreement.local.safe, self._agreement.peer.safe
        facts = self._job.facts(id_)
        self.settle()
        if self._writer.failed == self._segment:  # already reported
            self._stop("its disk does not take it")
        problem = self._problem(id_, safe) if sound else UNSOUND
        if self._place is not None:
            try:
                if problem:
                    raise UnjournaledError(problem)
                with normal_mode():
                    self._record(facts, adapter())
            except Exception as error:
                self._give_up(error)
        elif self._first is not None and not problem:
            self._keep_in_step(adapter)
        self._steps = []
        if LOCAL in at.levels and sound:
            self._follow(id_, id_.generation)
            if self._copies.on:
                safe = rebuildable(safe, protected or self._first, self._most_steps)
            self._writer.retire(self._owner.tidies, safe, self._config.local.retention.keep_last)

    def _keep_in_step(self, adapter: Callable[[], Any]) -> None:
        """The journal has stopped here, maybe not on other ranks: ask the state's objects for their
        values as these do, because a `state_dict()` may communicate."""
        with contextlib.suppress(Exception), normal_mode():  # a version reports it
            self._capture.stage(adapter())

    def _record(self, facts: VersionFacts, adapter: Any) -> None:
        assert self._place is not None
        assert self._segment is not None
        plan, node, arena = self._capture.stage(adapter)
        if self._seen != (plan, plan.trained):  # another plan looks at other parameters
            if self._trained_now() != self._trained:
                raise UnjournaledError(THAWED)
            self._seen = plan, plan.trained
        tree = tree_codec.EncodedTree(node, arena)
        small = self._small.make(plan, tree, self._writer.room)
        if self._digest is None or self._digest.plan is not plan:
            self._digest = DigestPlan(plan)
        draft = Draft(self._segment, self._place, facts, 0, tuple(self._steps), small)
        keeper = self._copies.record(draft)
        self._place = facts.id
        if self._digest.nbytes < INLINE_BYTES:
            self._submit_draft(draft, keeper, self._digest.compute())
            return
        self._work = DigestWork(self._digest, partial(self._submit_draft, draft, keeper))
        guard_memory_moves(self._work)
        self._submit(self._work)

    def _submit_draft(self, draft: Draft, keeper: Keeper | None, digest: int) -> None:
        """Training thread, or the copier."""
        whole = replace(draft, digest=digest)
        if keeper is not None:
            self._copies.send(keeper, whole)
        self._writer.submit(whole)

    def settle(self) -> None:
        if self._work is None:
            return
        work, self._work = self._work, None
        work.barrier()
        if work.error is not None:
            self._give_up(work.error)

    def _keep_up(self) -> bool:
        """Raise UnjournaledError if the disk does not keep up, or no boundary comes. Returns
        whether the training waits for a disk."""
        held_bytes = sum(image.data.nbytes for image in self._steps)
        many = held_bytes > MAX_BYTES and held_bytes > MAX_COPIES * self._stripe_bytes()
        if many or len(self._steps) >= MAX_STEPS:
            words = {"steps": len(self._steps), "size": size_text(held_bytes)}
            raise UnjournaledError(ENDLESS.format(**words))
        may_wait = self._config.when_busy == "wait"
        if self._steps or self._writer.keeps_up(may_wait):
            return may_wait
        size = size_text(self._stripe_bytes())
        raise UnjournaledError(BEHIND.format(folder=self.folder, size=size))

    def _problem(self, id_: VersionId, safe: VersionId | None) -> str:
        """Why there is no record, alike on all ranks: versions do not become complete, so that no
        file is removed. Empty if there is one."""
        last = safe or self._first
        if last is None or id_.version - last.version <= self._most_steps:
            return ""
        return STUCK.format(safe=last.version)

    @property
    def _most_steps(self) -> int:
        return MAX_INTERVALS * self._config.local.journal_steps

    def _stripe_bytes(self) -> int:
        """This rank's part of the parameters."""
        return sum(p.nbytes for p in self._state.walk().params) // self._group.size

    def _give_up(self, error: BaseException) -> None:
        """Stop until the next version on local. Any error: the journal never ends a training."""
        last, why = self._place, error_text(error, UnjournaledError)
        self._stop(why)
        if last is not None:
            text = STOPPED.format(last=last.version, why=why)
            self._reports.notice(text, logging.WARNING)

    def _failed(self, last: VersionId, error: Exception) -> None:
        """The record after `last` could not be written; the writer's thread."""
        text = STOPPED.format(last=last.version, why=f"{self.folder}: {error}")
        self._reports.notice_later(text, logging.ERROR)
