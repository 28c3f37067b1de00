"""Versions on demand: of the live state, durable before the training continues or ends.

A version in memory is used if all ranks have it and it still equals the live state of all;
otherwise a new one is taken. So the result does not depend on the progress of earlier copies.

The final version of a job is taken in `close()` if the state is new, and waited for. Each rank
decides from its own facts what a restart needs; all ranks then know whether every one of them has
it on disk.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

from tierckpt._text import error_text
from tierckpt.config import Config
from tierckpt.coordination.error_barrier import by_rank
from tierckpt.core.decisions import EarlyEnd, Reason
from tierckpt.core.levels import LOCAL, MEMORY, PERSISTENT
from tierckpt.core.parts import Parts
from tierckpt.events import JobEnd
from tierckpt.format.ids import VersionId, on_lineage
from tierckpt.group import Group, Node

from . import start
from .levels import Sealed, SealedVersions, Tiers
from .live_state import LiveState
from .shutdown import Shutdown, WaitProgress

__all__ = ["FinalVersion", "SaveNow"]


WAIT_SECONDS = 60.0
"""Time limit for versions under way, if ranks came to the call from different iterations."""


class SaveNow:
    """One rank's part of `save(now=True)` and of the last version. Training thread; collective."""

    saving = False
    """True while a version is taken: the boundary calls callbacks."""

    def __init__(
        self,
        group: Group,
        live: LiveState,
        levels: Tiers,
        sealed: SealedVersions,
        parts: Parts,
        take: Callable[[], None],
        wait: Callable[[float], bool],
    ) -> None:
        """All arguments stay their owners'. `take` makes a boundary of the live state, with a
        version on all levels. `wait` returns when memory and local have all versions, or after that
        many seconds: `Checkpointer.wait`."""
        self._group, self._live, self._levels, self._sealed = group, live, levels, sealed
        self._parts = parts
        self._take, self._wait = take, wait

    def no_moment(self) -> str:
        """The reason why the live state is no version, on all ranks; empty if it is one. An
        interrupt may have stopped some ranks before a boundary or its vote, and others after: they
        have cast the same number of votes afterwards."""
        live, agreement = self._live, self._levels.agreement
        progress = (live.steps_made, agreement.turns)
        agreement.even_out()  # the copier may wait for a vote
        diverged, torn = agreement.diverged is not None, live.state.torn
        why, same_votes, level = no_moment(
            self._group, *progress, diverged, torn, live.iterations.stepping
        )
        if not same_votes:
            agreement.void()
            self._wait(WAIT_SECONDS)
            agreement.settle()
        if not level and agreement.diverged is None:
            # From here on, equal version numbers would mean different iterations.
            agreement.diverged = VersionId(0, live.position.version)
            agreement.divergence_is_reported = True
        return why or live.adapter.inconsistent()

    def save(self, end: float = math.inf) -> None:
        """Store the live state in memory and on local; waits for the disk until `end` (monotonic
        clock). A version not on disk then is broken."""
        trained = self._live.iterations.steps > 0
        with contextlib.ExitStack() as saving:
            for part_saves in self._parts.saving:
                saving.enter_context(part_saves(trained))
            self._save(end, trained)

    def _save(self, end: float, trained: bool) -> None:
        live, history = self._live, self._levels.history
        self._wait(end - time.monotonic())
        boundary = VersionId(history.generation, live.steps_made)
        if trained:
            live.position.ahead = 1
        self.saving = True
        try:
            with live.adapter.saving_now():
                found = self._sealed.commit(boundary, live.equals)
                if found is Sealed.MOVED_ON:
                    history.take_again(live.position.version)
                if found is not Sealed.LIVE:
                    self._take()
        finally:
            self.saving = False
        self._wait(end - time.monotonic())
        taken = VersionId(history.generation, live.position.version)
        self._sealed.settle(taken)
        if found is Sealed.MOVED_ON and self._levels.agreement.memory.safe != taken:
            self._save_as_it_was(boundary, end)

    def commit_newest(self) -> None:
        """Write the newest version in memory to local, if it is not there. Not collective."""
        self._wait(WAIT_SECONDS)
        if self._sealed.commit_newest():
            self._wait(WAIT_SECONDS)

    def _save_as_it_was(self, id_: VersionId, end: float) -> None:
        """Store the state of the boundary, after an event said why the live state could not be
        stored."""
        text = f"{id_} is stored as of its boundary; later changes could not be stored"
        self._levels.reports.notice_of_all(text)
        self._sealed.commit_as_it_is(id_)
        self._wait(end - time.monotonic())
        self._sealed.settle(id_)


def no_moment(
    group: Group, steps_made: int, turns: int, diverged: bool, torn: bool, stepping: Iterable[str]
) -> tuple[str, bool, bool]:
    """Check that the live state is one version: of the same step on all ranks. Collective.

    Returns the reason why it is not (empty if it is), whether all ranks have cast the same number
    of votes (`turns`), and whether all have made the same number of steps. Equal on all ranks.

    `diverged`: this rank found earlier that ranks make their steps in different iterations.
    `stepping`: names of optimizers with an interrupted step.
    """
    reason = ""
    if torn:
        reason = "a restore was interrupted, so the live state is torn"
    elif names := ", ".join(sorted(stepping)):
        reason = f"the step of {names} was interrupted"
    gathered = group.all_gather_object((steps_made, turns, diverged, reason))
    same_votes = len({turns for _, turns, _, _ in gathered}) == 1
    reasons = by_rank([reason for *_, reason in gathered])
    counts = [steps for steps, *_ in gathered]
    if not reasons and min(counts) < max(counts):
        most, least = counts.index(max(counts)), counts.index(min(counts))
        reasons.append(
            f"rank {most} has made {counts[most]} steps, and rank {least} {counts[least]}"
        )
    if not reasons and any(diverged for _, _, diverged, _ in gathered):
        reasons.append(
            "ranks made the same number of steps, but in different iterations (some rank skipped "
            "a step that others made)"
        )
    return next(iter(reasons), ""), same_votes, min(counts) == max(counts)


class FinalVersion:
    """One rank's part of it. Training thread; collective."""

    _persistent: Sequence[int | None] = ()
    """The newest version on the persistent level, as far as each rank knows."""

    def __init__(
        self,
        config: Config,
        group: Group,
        node: Node,
        live: LiveState,
        levels: Tiers,
        sealed: SealedVersions,
        save_now: SaveNow,
        halting: EarlyEnd,
        parts: Parts,
        wait: Callable[[float], bool],
    ) -> None:
        """All arguments stay their owners'. `wait`: `Checkpointer.wait`."""
        self._config, self._group, self._node = config, group, node
        self._live, self._levels, self._sealed = live, levels, sealed
        self._save_now, self._halt, self._parts, self._wait = save_now, halting, parts, wait
        self._history, self._agreement = levels.history, levels.agreement
        self._reports, self._job = levels.reports, levels.resources.job

    def make(self, went_back: bool) -> tuple[bool, JobEnd]:
        """Take the version and wait until it is durable. Returns True if memory may be freed, and
        what is stored. If the last restore `went_back`, newer versions stay, unless a step was made
        since."""
        remove = self._make(went_back)
        if not self._history.lineage:
            return remove, JobEnd()
        version = self._live.steps_made
        left = self._reports.newest_by_level()
        if PERSISTENT in left:
            left[PERSISTENT] = max(filter(None, self._persistent), default=left[PERSISTENT])
        alone = [*left] == [MEMORY]
        if remove:
            left.pop(MEMORY, None)
        # Where there are other levels, memory is no place for an end.
        due = [level for level in left if level != MEMORY or alone]
        if went_back and version == self._history.start_version:
            due = []  # older than what is there
        missing = tuple(level for level in due if (left[level] or 0) < version)
        end = JobEnd(version, left, missing)
        self._reports.ended(end, halted=self._halt.reason < Reason.NONE)
        return remove, end

    def _make(self, went_back: bool) -> bool:
        end, safe = None, False
        try:
            if why := self._save_now.no_moment():
                self._reports.notice(f"no final checkpoint is taken: {why}", logging.ERROR)
                self._save_now.commit_newest()
                return False
            if went_back and self._live.steps_made == self._history.start_version:
                version = self._live.position.version
                text = f"no step was made after v{version}: newer versions stay"
                self._reports.notice_of_all(text, logging.INFO)
                return False
            end = self._new_shutdown()
            safe = self._make_durable(end)
        except Exception as error:
            self._reports.notice(f"the final checkpoint failed: {error_text(error)}", logging.ERROR)
        return self._end_together(end, safe)

    def _new_shutdown(self) -> Shutdown:
        nbytes = start.shard_bytes(self._live.state, self._group.size) * len(self._node.ranks)
        return Shutdown(self._config, self._levels.agent, self._reports, self._halt, nbytes)

    def _make_durable(self, end: Shutdown) -> bool:
        """Take the version, if the state is new. False if it is not durable."""
        if self._config.uses(LOCAL) and not (self.nothing_new() and self._is_far()):
            if self._made_none and self._sealed.commit_as_it_is(self._start_in_memory()):
                self._wait(end.last_call - time.monotonic())
                self._agreement.settle()
            else:
                self._save_now.save(end.last_call)
        if end.disk_has_all(self._wait):
            self._levels.promotion.backlog.flush_last()
        newest = VersionId(self._history.generation, self._live.position.version)
        durable = self.nothing_new() or self._agreement.local.safe == newest
        # A job that ends early is restarted; without a disk it has only its memory.
        return durable or not (self._config.uses(LOCAL) or self._halt.reason < Reason.NONE)

    def _end_together(self, end: Shutdown | None, safe: bool) -> bool:
        """Wait for all ranks, nodes and stores. Returns True if memory may be freed: all ranks are
        `safe`, and memory has nothing of an earlier run that this one did not restore."""
        # Slots of the previous run, if it was not restored, may be its only copy.
        before = not self._history.lineage and any(self._job.sealed())
        ranks_answer, answers = True, end is not None and end.disk_answers
        version = self._live.position.version
        digests = [last_digest(version) for last_digest in self._parts.last_digest]
        try:
            gathered = self._group.all_gather_object((safe, before, answers, digests))
            outcomes = [each[:3] for each in gathered]
            for number, compare_last in enumerate(self._parts.compare_last):
                compare_last([each[number] for *_, each in gathered])
        except Exception as error:
            outcomes, ranks_answer = [(False, before, answers)], False
            self._reports.notice(f"other ranks do not answer: {error_text(error)}", logging.ERROR)
        if not (safe := all(safe for safe, _, _ in outcomes)):
            left = "the memory of this node has no version either"
            if any(self._job.sealed()):
                left = f"the versions in memory stay for a restart ({self._job.path})"
            severity = logging.ERROR if self._node.first == self._group.rank else logging.DEBUG
            text = f"v{version} is not durable: on some rank it is not on disk"
            self._reports.notice(f"{text}; {left}", severity)
        whole = safe and all(answers for _, _, answers in outcomes)
        self._await_others(end, ranks_answer, whole)
        return safe and not any(before for _, before, _ in outcomes)

    def _await_others(self, end: Shutdown | None, ranks_answer: bool, whole: bool) -> None:
        """Wait for other nodes and stores, then for all ranks if `ranks_answer`: all know by now
        which versions are durable, and none takes longer than the group's timeout. If `whole`, all
        of the state is durable, and older versions that were kept for its sake are retired."""
        levels, rank = self._levels, self._group.rank
        shown = self._config, levels.agent, self._reports, rank, self._node.first == rank
        try:
            with contextlib.closing(WaitProgress(*shown)) as progress:
                if end is not None and end.disk_answers:
                    end.await_others(levels.collect, progress)
                    levels.collect()
                    progress.look()
                if ranks_answer:  # also a barrier
                    newest = self._reports.newest(PERSISTENT)
                    self._persistent = self._group.all_gather_object(newest)
            if whole and self._history.lineage:
                self._agreement.settle()
                levels.promotion.retire()
        except Exception as error:
            self._reports.notice(f"not all ranks end together: {error_text(error)}", logging.INFO)

    def nothing_new(self) -> bool:
        """True if no step was made since the start, or since a restore from disk."""
        if not self._made_none:
            return False
        start_version = self._history.start_version
        durable, past = self._agreement.local.safe, self._history.lineage
        if durable is None or durable.version != start_version:
            return start_version == 0
        return on_lineage(durable, past)

    def _is_far(self) -> bool:
        """True if the persistent level, where there is one, had what this run started with: where
        an earlier run could not bring it there, this one does. The same on all ranks."""
        newest = self._reports.newest(PERSISTENT) or 0
        return newest >= self._history.start_version or not self._config.uses(PERSISTENT)

    @property
    def _made_none(self) -> bool:
        """True if no step was made and no version taken since the start or the restore."""
        memory = self._agreement.memory
        known = [*memory.open, *filter(None, [memory.safe])]
        taken = any(self._history.is_own(id_.generation) for id_ in known)
        return self._live.steps_made == self._history.start_version and not taken

    def _start_in_memory(self) -> VersionId | None:
        """The version of an earlier run that this run started with, if memory still has it."""
        safe, first = self._agreement.memory.safe, self._history.start_version
        known = (
            safe is not None and safe.version == first and on_lineage(safe, self._history.lineage)
        )
        return safe if known else None
