"""A version on demand: of the live state, and durable before the training goes on or ends.

A version in memory is used if all ranks have it and it still equals the live state of all;
otherwise a new one is taken. So the result does not depend on the progress of earlier copies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from tierckpt.coordination.error_barrier import by_rank
from tierckpt.format.ids import VersionId
from tierckpt.goodput.heartbeat import Heartbeat
from tierckpt.group import Group
from tierckpt.hooks.epoch_ends import EpochEnds

from .levels.sealed_versions import Sealed, SealedVersions
from .levels.tiers import Tiers
from .live_state import LiveState

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
        epoch_ends: EpochEnds,
        heartbeat: Heartbeat,
        take: Callable[[], None],
        wait: Callable[[float], bool],
    ) -> None:
        """All arguments stay their owners'. `take` makes a boundary of the live state, with a
        version on all levels. `wait` returns when memory and local have all versions, or after that
        many seconds: `Checkpointer.wait`."""
        self._group, self._live, self._levels, self._sealed = group, live, levels, sealed
        self._epoch_ends, self._heartbeat = epoch_ends, heartbeat
        self._take, self._wait = take, wait

    def no_moment(self) -> str:
        """The reason why the live state is no version, on all ranks; empty if it is one. An
        interrupt may have stopped some ranks before a boundary or its vote, and others after: they
        have cast the same number of votes afterwards."""
        live, agreement = self._live, self._levels.agreement
        progress = (live.steps_made, agreement.turns)
        agreement.even_out()  # the copier may wait for a vote
        parted, torn = agreement.parted is not None, live.state.torn
        why, same_votes, level = no_moment(
            self._group, *progress, parted, torn, live.iterations.stepping
        )
        if not same_votes:
            agreement.void()
            self._wait(WAIT_SECONDS)
            agreement.settle()
        if not level and agreement.parted is None:
            # From here on, equal version numbers would mean different iterations.
            agreement.parted = VersionId(0, live.position.version)
            agreement.parted_is_reported = True
        return why or live.adapter.inconsistent()

    def save(self, end: float = math.inf) -> None:
        """Store the live state in memory and on local; waits for the disk until `end` (monotonic
        clock). A version that is not on disk then is broken."""
        with self._heartbeat.saving():
            self._save(end)

    def _save(self, end: float) -> None:
        live, history = self._live, self._levels.history
        self._wait(end - time.monotonic())
        boundary = VersionId(history.generation, live.steps_made)
        trained = live.iterations.steps > 0
        if trained:
            live.position.ahead = 1
        self.saving = True
        try:
            with live.adapter.saving_now(), self._epoch_ends.between(trained):
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
    group: Group, steps_made: int, turns: int, parted: bool, torn: bool, stepping: Iterable[str]
) -> tuple[str, bool, bool]:
    """Check that the live state is one version: of the same step on all ranks. Collective.

    Returns the reason why it is not (empty if it is), whether all ranks have cast the same number
    of votes (`turns`), and whether all have made the same number of steps. Equal on all ranks.

    `parted`: this rank found earlier that ranks make their steps in different iterations.
    `stepping`: names of optimizers with an interrupted step.
    """
    reason = ""
    if torn:
        reason = "a restore was interrupted, so the live state is torn"
    elif names := ", ".join(sorted(stepping)):
        reason = f"the step of {names} was interrupted"
    gathered = group.all_gather_object((steps_made, turns, parted, reason))
    same_votes = len({turns for _, turns, _, _ in gathered}) == 1
    reasons = by_rank([reason for *_, reason in gathered])
    counts = [steps for steps, *_ in gathered]
    if not reasons and min(counts) < max(counts):
        most, least = counts.index(max(counts)), counts.index(min(counts))
        reasons.append(
            f"rank {most} has made {counts[most]} steps, and rank {least} {counts[least]}"
        )
    if not reasons and any(parted for _, _, parted, _ in gathered):
        reasons.append(
            "ranks made the same number of steps, but in different iterations (some rank skipped "
            "a step that others made)"
        )
    return next(iter(reasons), ""), same_votes, min(counts) == max(counts)


__all__ = ["SaveNow"]
