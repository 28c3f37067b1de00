"""The search for the version to restore: plan -> read -> verify, judgements in between, and
notices for the user besides the restored version. No torch.

`VersionSearch` decides whether the job may start without a version, or from an older one than it
once had. What it finds can be loaded in any way: into the live state (`session`), or as files.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tierckpt import _process
from tierckpt._process import host_name
from tierckpt._text import size_text, some
from tierckpt.config import Config
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.job_history import JobHistory, keep_rollback_record
from tierckpt.coordination.versions import Reports
from tierckpt.core.branches import ROLLBACK_SETTING, Rollback, RollbackRequest, nearest_version
from tierckpt.core.levels import MEMORY, MIRROR
from tierckpt.core.restore_plan import Location, distinct
from tierckpt.errors import RestoreError
from tierckpt.format.ids import VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.restored import Restored
from tierckpt.stages import mirrors
from tierckpt.storage import answers, job_directory
from tierckpt.storage.claims import MAX_FOLDERS, siblings_of, user_name, words_for
from tierckpt.storage.inventory import open_persistent
from tierckpt.storage.job_directory import JobDirectory

from .progress import Progress
from .shards import FarStore
from .verification import (
    Candidates,
    RankFailures,
    RestoreContext,
    SpillPolicy,
    VerifiedVersion,
    find,
)

if TYPE_CHECKING:
    from .loader import TensorPreallocator

__all__ = ["RestoreNotices", "VersionSearch", "undo", "wish"]


FEW_FOLDERS = 16
"""Limit of other nodes that are looked into if rank 0 looks into several."""
MAX_SAID = 8
"""Limit of events for rejected copies: a job of thousands of ranks has as many shards."""


class RestoreNotices:
    """Notices of one rank; changes nothing. Rank 0 reports what all ranks know. Training thread."""

    def __init__(
        self,
        config: Config,
        rank: int,
        history: JobHistory,
        reports: Reports,
        elsewhere: Collection[Path],
    ) -> None:
        """`elsewhere`: see `NodeResources.left_elsewhere`."""
        self._config, self._rank, self._history = config, rank, history
        self._reports, self._elsewhere = reports, elsewhere
        self._rejected = 0

    def of_all(self, text: str, severity: int) -> None:
        """Report something that all ranks know: rank 0 uses the given severity."""
        self._reports.notice_of_all(text, severity)

    def rejected(self, text: str) -> None:
        """Report a copy that exists and cannot be used; only the first few get an event each."""
        self._rejected += 1
        if self._rejected <= MAX_SAID:
            self._say_rejected(text)

    def end_of_rejected(self) -> None:
        """Report the number of rejected copies that got no event."""
        if (more := self._rejected - MAX_SAID) > 0:
            self._say_rejected(f"and {more} more")

    def _say_rejected(self, text: str) -> None:
        severity = logging.ERROR if self._rank == 0 else logging.DEBUG
        self._reports.emit("rejected", message=text, severity=severity)

    def before_loading(self, found: VersionId | None) -> None:
        """Report places that have newer versions than `found`, the newest that this run can see."""
        self._newer_elsewhere(found)
        self._newer_on_other_nodes(found)

    def suspicion(self, id_: VersionId, difference: str, asked: bool) -> None:
        """Report a suspect version: its state may never have existed on any rank."""
        clean = self._history.newest_clean(id_)
        if clean is None:
            other = "there is no older one that is not suspect"
        elif not asked:
            other = (
                f"{clean} is the newest that is not. To take that: restore(version={clean.version})"
                f", `{rollback_command(self._config.directory, clean.version)}` before the next "
                'start, or replicas="stop" (TIERCKPT_REPLICAS=stop)'
            )
        else:
            other = f"it was asked for; {clean} is the newest that is not"
        self.of_all(
            f"{id_} was restored and is suspect: parts of it come from ranks that differed "
            f"({difference}); {other}",
            logging.WARNING,
        )

    def rolled_back(
        self, record: Rollback, request: RollbackRequest, newer: Sequence[VersionId]
    ) -> None:
        """Report that this run went back, and the versions that it gave up."""
        wanted, numbers = record.version, dict.fromkeys(f"v{id_.version}" for id_ in newer)
        them = f"{some([*numbers], MAX_SAID)} of earlier runs" if newer else "a newer version"
        kept = (
            ". They can be read and exported until retention removes them, when newer versions of "
            "this run are complete; `tierckpt pin` keeps one"
        )
        self.of_all(
            f"the job went back to v{wanted}, as {wish(request, wanted)} asks. No restart takes "
            f"{them} any more{kept if newer else ''}",
            logging.WARNING,
        )

    def rolled_back_before(self, found: VersionId) -> None:
        """Report a setting that an earlier run has honoured."""
        wanted = self._config.rollback_to
        self.of_all(
            f"rollback_to is {wanted}: an earlier run has gone back to v{wanted}, and the newest "
            f"version since then is {found}. To go back again: "
            f"{rollback_command(self._config.directory, wanted)}",
            logging.INFO,
        )

    def directory_emptied(self, id_: VersionId, level: str) -> None:
        """Report that the disk has nothing any more: the directory may have been removed for a
        fresh start. `level`: memory, or a mirror."""
        if self._rank:
            return
        directory, job = self._config.directory, job_directory.job_directory(self._config)
        others = [job.path, *mirrors(self._config.stages_here, job.job)]
        where = others[0] if level == MEMORY else " and ".join(map(str, others[1:]))
        every = " ".join(shlex.quote(str(each)) for each in (directory, *others))
        what = "all of them" if others[1:] else "both"
        self._reports.notice(
            f"{id_} was restored from {level} ({where}); {directory} is empty now. If it was "
            f"emptied for a fresh start: end this job and remove {what} on every node: rm -r "
            f"{every}",
            logging.WARNING,
        )

    def other_job(self, id_: VersionId, job: str) -> None:
        """Report a version of a job with another name. Either this job moved and has another name
        now, or the persistent path belongs to another job; only the user can tell."""
        if self._rank:
            return
        where, own_job = self._config.persistent.path, self._history.job
        owner = self._owner()
        others = owner and not owner.startswith(f"{own_job} on ")
        self._reports.notice(
            f"{id_} in {where} was written by job {job!r}; this job is called {own_job!r} and "
            "continues from it. If both are the same job: give it one job_id wherever it runs. "
            "If not: give this job another persistent_path, as each job needs its own"
            + (f". The path is in use by {owner}" if others else ""),
            logging.WARNING,
        )

    def other_path(self, id_: VersionId, job: str) -> None:
        """Report newer versions in memory of a job with another name. Slots in memory are found by
        the job's name, which is derived from the path, so a moved or copied directory comes without
        them. Rank 0 looks on its node; the other nodes have the same."""
        if self._rank:
            return
        theirs = JobDirectory.at(self._config.shm_dir, job, self._config.node)
        if theirs.path in self._elsewhere:
            return  # already reported
        newest = _newest_in(theirs)
        if newest is not None and newest > id_:
            self._reports.notice(
                f"{id_} was written by job {job!r}, which has {newest} in memory here; this job is "
                f"called {self._history.job!r} and continues from {id_}. If both are the same job: "
                f"restart it with job_id={job!r}, or with its former path, before it writes here",
                logging.WARNING,
            )

    def _newer_elsewhere(self, found: VersionId | None) -> None:
        """Report slots of a killed run under another name or in another folder: `shm_dir`, `node`
        or `job_id` has changed since, perhaps by mistake. `found` is the version this run found."""
        own = job_directory.job_directory(self._config)
        for folder in sorted(self._elsewhere):
            job, _, node = folder.name.partition("@")
            theirs = JobDirectory(folder.parent, job, node)
            try:
                # A folder with a running trainer belongs to another node of this job.
                newest = None if theirs.trains() else _newest_in(theirs)
            except PermissionError:
                self._of_another_user(folder, found)
                continue
            if newest is None or (found is not None and newest <= found):
                continue
            before = {"shm_dir": str(theirs.root.parent), "job_id": theirs.job, "node": theirs.node}
            now = {"shm_dir": str(own.root.parent), "job_id": own.job, "node": own.node}
            changed = (f"{k}={v!r}" for k, v in before.items() if now[k] != v)
            self._reports.notice(
                f"{newest} is in memory in {folder}, where a killed run of this job had its "
                f"slots. This run uses {own.path}, does not see it, and "
                f"{f'continues from {found}' if found else 'found nothing'}. To continue from "
                f"{newest}: end this job and restart it with {', '.join(changed)}",
                logging.WARNING,
            )

    def _of_another_user(self, folder: Path, found: VersionId | None) -> None:
        user = "another user"
        with contextlib.suppress(OSError):
            user = f"user {user_name(folder.parent.stat().st_uid)}"
        self._reports.notice(
            f"a killed run of this job had its slots in {folder}, which belongs to {user} and "
            f"which this user cannot read. This run "
            f"{f'continues from {found}' if found else 'found nothing'}. If there is "
            f"a newer version, a start by {user} continues from it",
            logging.WARNING,
        )

    def _newer_on_other_nodes(self, found: VersionId | None) -> None:
        """Report that `{node}` stands for another name than in the run before. Nodes of this run
        have reported their versions; rank 0, and every node without a version, looks for those of
        other nodes."""
        rank, hosts = self._rank, self._history.nodes
        empty = not any(each.place.level == "local" for each in self._history.found[rank])
        if rank and not (empty and hosts.index(hosts[rank]) == rank):
            return
        config = self._config
        most = MAX_FOLDERS if rank == 0 else FEW_FOLDERS
        there = siblings_of(config.path, self._history.job, set(map(host_name, hosts)), most)
        newer = [each for each in there if found is None or each.newest > found]
        if not newer:
            return
        self._reports.notice(words_for(newer, config.here, found), logging.WARNING)

    def _owner(self) -> str:
        """Holder of the persistent lease; empty if there is none or it cannot be read."""
        persistent = self._config.persistent
        with (
            contextlib.suppress(Exception),
            contextlib.closing(open_persistent(persistent, tries=1)) as store,
        ):
            return store.owner()
        return ""

    def restored(self, result: Restored, refused: int = 0) -> None:
        """Report the end of the restore. `refused`: number of versions that the program could not
        use."""
        level = " and ".join(result.levels)
        self._reports.emit(
            "restored",
            level=level,
            nbytes=result.nbytes,
            seconds=result.seconds,
            message=self._summary(result, level, refused),
            severity=logging.INFO if self._rank == 0 else logging.DEBUG,
        )

    def _summary(self, result: Restored, level: str, refused: int) -> str:
        if result.partial is not None:
            return f"a fresh start with parts ({result.partial.of_parts}) of {result.forked_from}"
        if not level and refused:
            return (
                f"the program refused all versions in {self._config.directory} ({refused}): a "
                "fresh start. They are offered again until this run has a version of its own"
            )
        if not level:
            return f"nothing to restore in {self._config.directory}: a fresh start"
        nbytes, seconds = size_text(result.nbytes), result.seconds["total"]
        if result.base is not None:
            replay_seconds = result.seconds.get("replay", 0.0)
            return (
                f"restored v{result.version} (iteration {int(result)}): v{result.base.version} from"
                f" {level}, and the steps of {result.replayed} iteration(s) after it from the "
                f"journal: {nbytes} in {seconds:.2f} s, of which the steps took "
                f"{replay_seconds:.2f} s"
            )
        return (
            f"restored {result.forked_from or f'v{result.version}'} (iteration {int(result)}) from "
            f"{level}: {nbytes} in {seconds:.2f} s"
        )


def wish(request: RollbackRequest, version: int) -> str:
    """The origin of a request to go back, for messages."""
    if request.where == ROLLBACK_SETTING:
        return f"the setting {ROLLBACK_SETTING} (TIERCKPT_{ROLLBACK_SETTING.upper()}={version})"
    return f"`{rollback_command(request.where, version)}`"


def rollback_command(where: str, version: int) -> str:
    """The command that asks to go back."""
    return f"tierckpt rollback {shlex.quote(where)} {version}"


def undo(request: RollbackRequest) -> str:
    """The way to take a request back."""
    if request.where == ROLLBACK_SETTING:
        variable = f"TIERCKPT_{ROLLBACK_SETTING.upper()}"
        return f"unset {variable}, or remove {ROLLBACK_SETTING} from the settings"
    return f"tierckpt rollback {shlex.quote(request.where)} --cancel"


def _newest_in(job: JobDirectory) -> VersionId | None:
    """The newest readable version in that folder."""
    with contextlib.suppress(OSError):
        return max((manifest.id for _, manifest in job.sealed()), default=None)
    return None


MAX_TRIED = 32
"""Limit of versions that are planned for an error message."""


class VersionSearch:
    """One search: constructor, `find`, and `report` after the version was loaded.

    Training thread; all ranks make the same calls. The caller keeps everything it passes in:
    `history` changes when an inventory is taken or a run starts from nothing.
    """

    def __init__(
        self,
        config: Config,
        error_barrier: ErrorBarrier,
        history: JobHistory,
        reports: Reports,
        bar: Progress,
        start_seconds: float,
        elsewhere: Collection[Path] = (),
        new: TensorPreallocator | None = None,
        live_bytes: int = 0,
    ) -> None:
        """Take the inventory of all levels: collective, in a block of `error_barrier`.
        `start_seconds` is when `restore()` was called, by `time.perf_counter()`. `elsewhere`: see
        `NodeResources.left_elsewhere`. `new` and `live_bytes`, of the live state that the version
        is for: see `RestoreContext.new` and `SpillPolicy`."""
        self._config, self._history, self._reports = config, history, reports
        self.error_barrier = error_barrier
        """The steps after `find` run in it, too."""
        self._start_seconds = start_seconds
        self.new = new
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
        self._inventory_seconds = time.perf_counter() - start_seconds
        self._candidates = Candidates(
            history.found,
            history.parities,
            history.nodes,
            self._notices.rejected,
            history.rollback_run,
        )
        spill = SpillPolicy(Path(config.directory), live_bytes)
        self._context = RestoreContext(error_barrier, bar, self._open_store, new, spill)

    def _open_store(self, place: Location) -> FarStore:
        agent = self._history.open_agent(place)
        if agent is not None:
            return agent
        answers.ensure(place.where, answers.START_SECONDS)
        return open_persistent(replace(self._config.persistent, path=place.where))

    def find(self, version: int | None, live_version: int) -> VerifiedVersion | None:
        """Plan, read and verify the newest sound version, or `version`; the caller closes it.
        Collective.

        Returns None if there is nothing to restore and the run starts from nothing. Raises
        RestoreError on all ranks if such a start could lose a version: a version was asked for,
        some location could not be read, or the live state, at `live_version`, is not fresh; if
        there is data of a newer format and `version` does not ask for an older one; and if one rank
        fails by itself.
        """
        with contextlib.ExitStack() as on_failure:
            with self.error_barrier, _process.collector_paused():
                if version is None and (requests := self._history.rollback_requests()):
                    self._requests, version = requests, requests[0].version
                self.version = version
                found = self._find(on_failure)
                id_ = found.plan.id if found else None
                if version is None:
                    self._notices.before_loading(id_)
                if found is None and self._excluded:
                    self._history.start_afresh(max(self._excluded))
                elif found is None:
                    self._nothing_found(live_version)
                else:
                    if version is None:
                        self._judge_suspects(found.plan.id)
                        self._look_for_loss(found.plan.id)
                    self._history.reject(self._candidates.bad)
                    near = {*found.plan.levels} <= {MEMORY, MIRROR}
                    if near and self._history.gone_from_disk():
                        level = MIRROR if MIRROR in found.plan.levels else MEMORY
                        self._notices.directory_emptied(found.plan.id, level)
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
            if self.version is None and self._config.stops_on_drift and self._history.suspects:
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

    def name_of(self, found: VerifiedVersion) -> str:
        """The version's name in errors."""
        return f"Version {found.plan.id} of the job in {self._config.directory}"

    def report_loaded(self, manifest: Manifest, result: Restored, notices: Sequence[str]) -> None:
        """Report the differences and the origin of a loaded version; `manifest` is this rank's."""
        history, id_ = self._history, manifest.id
        for text in notices:
            self._reports.notice(text, logging.WARNING)
        result.suspect = history.suspects.get(id_, result.suspect)
        asked = self.version is not None
        if result.suspect:
            self._notices.suspicion(id_, result.suspect, asked)
        if manifest.facts.job not in (history.job, ""):  # imported to a persistent_path: any job's
            if "persistent" in result.levels:
                self._notices.other_job(id_, manifest.facts.job)
            elif not asked:
                self._notices.other_path(id_, manifest.facts.job)

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
        total_seconds = time.perf_counter() - self._start_seconds
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
        """Store that the started run carried out the requests to go back, and report it;
        store the record of an earlier run where it is missing. Not collective: the run has no
        version before all ranks have come here."""
        places = self._config, self.error_barrier.rank, self._history, self._reports
        if self._requests:
            record = self._history.went_back(self._requests)
            keep_rollback_record(*places)
            self._notices.rolled_back(record, self._requests[0], self._newer_than(found.plan.id))
            return
        keep_rollback_record(*places)
        if self.version is None and self._config.rollback_to:
            self._notices.rolled_back_before(found.plan.id)

    def _newer_than(self, id_: VersionId) -> list[VersionId]:
        seen = {each.key.id for held in distinct(self._history.found) for each in held}
        return sorted(each for each in seen if each > id_)

    def _is_past_rollback(self, found: VerifiedVersion) -> bool:
        """True if a run went back and was killed before it had a version."""
        return self._history.rollback_run[0] > found.plan.id.generation

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
        self._history.look(self.error_barrier)
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
        """Report suspect versions that are skipped (`replicas="stop"`). If the run before already
        restarted from the same version, and its replicas differed again before any newer version, a
        launcher could retry forever: RestoreError on all ranks."""
        if not self.passed_over:
            return
        newest = self.passed_over[0]
        names = some([f"v{id_.version}" for id_ in self.passed_over], MAX_SAID)
        why = (
            f"{names} {'is' if len(self.passed_over) == 1 else 'are'} suspect, as replicas "
            f"differed: {self._history.suspects[newest]}"
        )
        last = self._history.lineage_of(newest)[-1]
        if last == (newest.generation, found.version) and newest.generation > found.generation:
            raise RestoreError(
                f"the previous run of this job was started from {found}, and replicas differed "
                f"again before a newer version was known to be the same on all ranks ({why}). This "
                "run would start from the same version, so it stops: a launcher could otherwise "
                "retry forever. Nothing was changed",
                f"Find the cause first. Then restore(version={found.version}) tries {found} once "
                'more; replicas="warn" (TIERCKPT_REPLICAS=warn) continues from the newest version, '
                "suspect or not",
            )
        self._notices.of_all(
            f"{found} is restored, the newest version that is not suspect, as replicas says "
            f'"stop". {why}. To restore a suspect version: restore(version='
            f'{newest.version}), or replicas="warn"',
            logging.WARNING,
        )

    def _look_for_loss(self, found: VersionId) -> None:
        """Look whether a newer version than the one found was complete once. `report` warns of it,
        unless the steps of a journal lead to it again."""
        lost = self._history.once_complete()
        generation, version = self._history.rollback_run
        if generation > found.generation and found.version == version:
            return  # it went back on purpose
        if lost is not None and lost > found and lost not in {*self.passed_over, *self._excluded}:
            self._loss = lost, self._remaining_shards()

    def _nothing_found(self, live_version: int) -> None:
        """Start from nothing, unless a version was expected, or may exist where a rank could
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
        self._history.start_afresh()

    def _versions(self, wanted: int) -> str:
        """The nearest versions that a restore could take."""
        found = {f.key.id.version for each in distinct(self._history.found) for f in each}
        found |= {p.key.id.version for each in distinct(self._history.parities) for p in each}
        near = nearest_version(wanted, found, MAX_TRIED)
        complete = [version for version in near if self._candidates.plan(version) is not None]
        names = ", ".join(f"v{version}" for version in nearest_version(wanted, complete))
        there = f"The nearest complete ones are {names}" if names else "No version is complete"
        return f"{there}; tierckpt list {self._config.directory} shows all"

    def _remaining_shards(self) -> str:
        shards = "; ".join(self._history.remains(self._candidates.left_out)) or "none"
        rejected = some(self._candidates.rejected, between="; ")
        return f"found: {shards}" + (f"; {rejected}" if rejected else "")
