"""The search for the version to restore: plan -> read -> verify, and judgements in between.

`VersionSearch` decides whether the job may start without a version, or from an older one than it
once had. What it finds can be loaded in any way: into the live state (`session`), or as files.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt import _garbage
from tierckpt._text import some
from tierckpt.config import Config
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.job_history import JobHistory
from tierckpt.coordination.reports import Reports
from tierckpt.coordination.rollback_records import keep_record
from tierckpt.core.copies import Location, distinct
from tierckpt.core.rollback import RollbackRequest, nearest
from tierckpt.errors import RestoreError
from tierckpt.format.ids import VersionId
from tierckpt.restored import Restored
from tierckpt.storage.files import answers
from tierckpt.storage.persistent import PersistentStore

from .candidates import Candidates, RankFailures
from .notices import MOST_SAID, RestoreNotices, undo, wish
from .progress import Progress
from .shard_image import FarStore
from .verification import RestoreContext, SpillPolicy, find
from .verified_version import VerifiedVersion

if TYPE_CHECKING:
    from .tensor_fill import TensorPreallocator

MOST_TRIED = 32
"""Limit of versions that are planned for an error message."""


class VersionSearch:
    """One search: constructor, `find`, and `report` after the version was loaded.

    Training thread; all ranks make the same calls. The caller keeps everything it passes in:
    `history` changes when an inventory is taken or a run starts from the beginning.
    """

    def __init__(
        self,
        config: Config,
        error_barrier: ErrorBarrier,
        history: JobHistory,
        reports: Reports,
        bar: Progress,
        begin_seconds: float,
        elsewhere: Collection[Path] = (),
    ) -> None:
        """Take the inventory of all levels: collective, in a block of `error_barrier`.
        `begin_seconds` is when `restore()` was called, by `time.perf_counter()`. `elsewhere`: see
        `NodeResources.left_elsewhere`."""
        self._config, self._history, self._reports = config, history, reports
        self._error_barrier = error_barrier
        self._begin_seconds = begin_seconds
        self.version: int | None = None
        """The version that was asked for."""
        self._requests: tuple[RollbackRequest, ...] = ()
        """Requests to go back, which this restore carries out."""
        self.passed_over: list[VersionId] = []
        """Suspect versions newer than the restored one, newest first."""
        self._excluded: set[VersionId] = set()
        """Versions that the caller could not use."""
        self._loss: tuple[VersionId, str] | None = None
        """A newer version that was complete once, and what is left of it; see `_look_for_loss`."""
        self._reported: set[str] = set()
        """Problems and unreachable nodes that were already reported."""
        self._notices = RestoreNotices(config, error_barrier.rank, history, reports, elsewhere)
        history.look(error_barrier)
        self._inventory_seconds = time.perf_counter() - begin_seconds
        self._candidates = Candidates(
            history.found,
            history.parities,
            history.nodes,
            self._notices.rejected,
            history.began_last,
        )
        new, live_bytes = self._target()
        spill = SpillPolicy(Path(config.directory), live_bytes)
        self._context = RestoreContext(error_barrier, bar, self._open_store, new, spill)

    def _target(self) -> tuple[TensorPreallocator | None, int]:
        """The live state that the version is for, if there is one: see `RestoreContext.new`, and
        `SpillPolicy.live_bytes`."""
        return None, 0

    def _open_store(self, place: Location) -> FarStore:
        agent = self._history.open_agent(place)
        if agent is not None:
            return agent
        answers.ensure(place.where, self._config.health_seconds)
        return PersistentStore(place.where, **self._config.persistent.options())

    def find(self, version: int | None, live_version: int) -> VerifiedVersion | None:
        """Plan, read and verify the newest sound version, or `version`; the caller closes it.
        Collective.

        Returns None if there is nothing to restore and the run starts from the beginning. Raises
        RestoreError on all ranks if a start from the beginning could lose a version: a version was
        asked for, some location could not be read, or the live state, at `live_version`, is not
        fresh; if there is data of a newer format and `version` does not ask for an older one; and
        if one rank fails by itself.
        """
        with contextlib.ExitStack() as on_failure:
            with self._error_barrier, _garbage.paused():
                if version is None and (requests := self._history.rollback_requests()):
                    self._requests, version = requests, requests[0].version
                self.version = version
                found = self._find(on_failure)
                id_ = found.plan.id if found else None
                if version is None:
                    self._notices.before_loading(id_)
                if found is None and self._excluded:
                    self._history.begin_afresh(max(self._excluded))
                elif found is None:
                    self._nothing_found(live_version)
                else:
                    if version is None:
                        self._judge_suspects(found.plan.id)
                        self._look_for_loss(found.plan.id)
                    self._history.reject(self._candidates.bad)
                    if set(found.plan.levels) == {"memory"} and self._history.gone_from_disk():
                        self._notices.directory_emptied(found.plan.id)
            on_failure.pop_all()
        return found

    def exclude(self, id_: VersionId) -> None:
        """Take this version out of the search, because the caller could not use it. If no other is
        left, `find` returns None. The same on all ranks."""
        self._excluded.add(id_)

    def _find(self, on_failure: contextlib.ExitStack) -> VerifiedVersion | None:
        """The version to restore; `on_failure` closes it."""
        try:
            self._judge_inventory()
            if self.version is None and self._config.on_drift == "stop" and self._history.suspects:
                found = self._find_sound(on_failure, self._history.suspects.keys())
                if found is not None:
                    self.passed_over = self._history.newer_suspects(found.plan.id)
                    return found
            return self._find_sound(on_failure)
        finally:
            self._notices.end_of_rejected()

    def _find_sound(
        self, on_failure: contextlib.ExitStack, avoid: Collection[VersionId] = ()
    ) -> VerifiedVersion | None:
        steps = self._context, self._candidates, self.version
        avoid = {*self._excluded, *avoid}
        found = find(*steps, avoid, self._still_found)
        if found is not None:
            on_failure.callback(found.close)
        return found

    def report(self, result: Restored) -> Restored:
        """Add the times and rejected copies to the result, and report it. The end of the restore:
        the inventory is dropped."""
        self._context.report(result)
        reached = VersionId(result.generation, result.version)
        if self._loss is not None and self._loss[0].version > reached.version:
            lost, remains = self._loss
            text = f"going back to {reached}, although {lost} was complete once: {remains}"
            self._notices.of_all(text, logging.WARNING)
        result.rejected = tuple(self._candidates.rejected)
        total_seconds = time.perf_counter() - self._begin_seconds
        result.seconds.update(inventory=self._inventory_seconds, total=total_seconds)
        self._notices.restored(result, len(self._excluded))
        self._history.forget()
        return result

    def went_back(self, found: VerifiedVersion) -> bool:
        """True if an older version than the newest one was chosen: asked for, or because newer ones
        are suspect, or were given up by a rollback. The same on all ranks."""
        chosen = self.version is not None or self.passed_over or self._is_past_rollback(found)
        return bool(chosen) and bool(self._newer_than(found.plan.id))

    def settle_rollback(self, found: VerifiedVersion) -> None:
        """Store that the run, which has begun, carried out the requests to go back, and report it;
        store the record of an earlier run where it is missing. Not collective: the run has no
        version before all ranks have come here."""
        places = self._config, self._error_barrier.rank, self._history, self._reports
        if self._requests:
            record = self._history.went_back(self._requests)
            keep_record(*places)
            self._notices.rolled_back(record, self._requests[0], self._newer_than(found.plan.id))
            return
        keep_record(*places)
        if self.version is None and self._config.rollback_to:
            self._notices.rolled_back_before(found.plan.id)

    def _newer_than(self, id_: VersionId) -> list[VersionId]:
        seen = {each.key.id for held in distinct(self._history.found) for each in held}
        return sorted(each for each in seen if each > id_)

    def _is_past_rollback(self, found: VerifiedVersion) -> bool:
        """True if a run went back and was killed before it had a version."""
        return self._history.began_last[0] > found.plan.id.generation

    # --- judgements, between the steps ---------------------------------------------------------

    def _still_found(self, failures: RankFailures) -> RankFailures:
        """The failures without those of copies that have disappeared by a new inventory: an agent
        of the run before retired them for a newer version, which the next plan must see.
        Collective.

        This terminates: a copy missing from the new inventory was deleted, and a copy still in it
        is rejected.
        """
        places = {f"{f.key.id} in {f.place.where}": None for _, f in failures if f.gone}
        if not places:
            return failures
        self._notices.of_all(
            f"{'; '.join([*places][:4])}: no longer there, or never seen by the rank that was to "
            "read it. Taking the inventory again",
            logging.INFO,
        )
        self._history.look(self._error_barrier)
        self._judge_inventory()
        self._candidates.look(self._history.found, self._history.parities)
        return self._candidates.still_there(failures)

    def _judge_inventory(self) -> None:
        for text in self._history.silent:
            if text not in self._reported:
                self._reported.add(text)
                self._notices.of_all(text, logging.INFO)
        if self._history.newer and self.version is None:
            newer = some(self._history.newer, between="; ")
            raise RestoreError(
                f"a newer tierckpt wrote here: {newer}. Nothing was changed, and no older "
                "version was taken instead",
                "To continue without it: restore(version=...) goes back to an older version; "
                "moving the data away, or another path, starts from the beginning",
            )
        for problem in (*self._history.problems, *self._history.unseen):
            if problem not in self._reported:
                self._reported.add(problem)
                self._candidates.note(problem)

    def _judge_suspects(self, found: VersionId) -> None:
        """Report suspect versions that are skipped (`on_drift="stop"`). If the run before already
        restarted from the same version, and its replicas differed again before any newer version, a
        launcher could retry forever: RestoreError on all ranks."""
        if not self.passed_over:
            return
        newest = self.passed_over[0]
        names = some([f"v{id_.version}" for id_ in self.passed_over], MOST_SAID)
        why = (
            f"{names} {'is' if len(self.passed_over) == 1 else 'are'} suspect, as replicas "
            f"differed: {self._history.suspects[newest]}"
        )
        began = self._history.lineage_of(newest)[-1]
        if began == (newest.generation, found.version) and newest.generation > found.generation:
            raise RestoreError(
                f"the previous run of this job was started from {found}, and replicas differed "
                f"again before a newer version was known to be the same on all ranks ({why}). This "
                "run would start from the same version, so it stops: a launcher could otherwise "
                "retry forever. Nothing was changed",
                f"Find the cause first. Then restore(version={found.version}) tries {found} once "
                'more; on_drift="warn" (TIERCKPT_ON_DRIFT=warn) goes on from the newest version, '
                "suspect or not",
            )
        self._notices.of_all(
            f"{found} is restored, the newest version that is not suspect, as on_drift is "
            f'"stop". {why}. To restore a suspect version: restore(version='
            f'{newest.version}), or on_drift="warn"',
            logging.WARNING,
        )

    def _look_for_loss(self, found: VersionId) -> None:
        """Look whether a newer version than the one found was complete once. `report` warns of it,
        unless the steps of a journal lead to it again."""
        lost = self._history.once_complete()
        generation, version = self._history.began_last
        if generation > found.generation and found.version == version:
            return  # it went back on purpose
        if lost is not None and lost > found and lost not in {*self.passed_over, *self._excluded}:
            self._loss = lost, self._remaining_shards()

    def _nothing_found(self, live_version: int) -> None:
        """Start from the beginning, unless a version was expected, or may exist where a rank could
        not look."""
        unseen = some([*self._history.unseen, *self._history.nameless], between="; ")
        if (version := self.version) is not None:
            hidden = f"; some locations could not be read: {unseen}" if unseen else ""
            text = f"no complete, sound v{version} was found on any level{hidden}"
            if self._requests:
                by = wish(self._requests[0], version)
                raise RestoreError(
                    f"{text}, and {by} asks to go back to it. Nothing was changed",
                    f"{self._versions(version)}. Ask for one of these, or take the request back: "
                    f"{undo(self._requests[0])}",
                )
            raise RestoreError(text, self._versions(version))
        if live_version > 0:
            raise RestoreError(
                f"nothing sound was found on any level; the live state stays at v{live_version}"
            )
        if unseen:
            raise RestoreError(
                f"nothing to restore was found, and some locations could not be read: {unseen}",
                "There may be checkpoints, so this job does not start from the beginning. Repair "
                "access and restart. If there are none: remove the location from the settings, "
                "move the named files away, or leave out restore()",
            )
        if (lost := self._history.once_complete()) is not None:
            raise RestoreError(
                f"this job had complete checkpoints ({lost} was one) and has none now: "
                f"{self._remaining_shards()}",
                "Restart with the nodes, or the disks, that have the rest: tierckpt list "
                f"{self._config.directory} lists the versions on each node. To give them up: "
                "another path, or moving the remaining files away, starts from the beginning",
            )
        if self._candidates.rejected or self._history.remains():
            self._reports.notice(
                "starting from the beginning: no complete, sound version was found, nor is one "
                f"known to have ever been on all ranks' disks; {self._remaining_shards()}",
                logging.ERROR if self._candidates.rejected else logging.WARNING,
            )
        self._history.begin_afresh()

    def _versions(self, wanted: int) -> str:
        """The nearest versions that a restore could take."""
        found = {f.key.id.version for each in distinct(self._history.found) for f in each}
        found |= {p.key.id.version for each in distinct(self._history.parities) for p in each}
        near = nearest(wanted, found, MOST_TRIED)
        complete = [version for version in near if self._candidates.plan(version) is not None]
        names = ", ".join(f"v{version}" for version in nearest(wanted, complete))
        there = f"The nearest complete ones are {names}" if names else "No version is complete"
        return f"{there}; tierckpt list {self._config.directory} shows all"

    def _remaining_shards(self) -> str:
        shards = "; ".join(self._history.remains(self._candidates.left_out)) or "none"
        rejected = some(self._candidates.rejected, between="; ")
        return f"found: {shards}" + (f"; {rejected}" if rejected else "")


__all__ = ["VersionSearch"]
