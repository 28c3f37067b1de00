"""Notices of a restore: events for the user besides the restored version."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from tierckpt._host import host_name
from tierckpt._text import size_text, some
from tierckpt.config import Config
from tierckpt.coordination.job_history import JobHistory
from tierckpt.coordination.reports import Reports
from tierckpt.core.rollback import SETTING, Rollback, RollbackRequest
from tierckpt.format.ids import VersionId
from tierckpt.restored import Restored
from tierckpt.storage.local.claim_file import user_name
from tierckpt.storage.local.sibling_nodes import MOST_FOLDERS, siblings_of, words_for
from tierckpt.storage.memory import job_directory
from tierckpt.storage.memory.job_directory import JobDirectory
from tierckpt.storage.persistent import PersistentStore, RetryPolicy

FEW_FOLDERS = 16
"""Limit of other nodes that are looked into if rank 0 looks into several."""
MOST_SAID = 8
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
        if self._rejected <= MOST_SAID:
            self._say_rejected(text)

    def end_of_rejected(self) -> None:
        """Report the number of rejected copies that got no event."""
        if (more := self._rejected - MOST_SAID) > 0:
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
                'start, or on_drift="stop" (TIERCKPT_ON_DRIFT=stop)'
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
        them = f"{some([*numbers], MOST_SAID)} of earlier runs" if newer else "a newer version"
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

    def directory_emptied(self, id_: VersionId) -> None:
        """Report that the disk has nothing any more: the directory may have been removed for a
        fresh start."""
        if self._rank:
            return
        directory, memory = self._config.directory, job_directory.job_directory(self._config).path
        both = f"{shlex.quote(directory)} {shlex.quote(str(memory))}"
        self._reports.notice(
            f"{id_} was restored from memory ({memory}); {directory} is empty now. If it was "
            f"emptied for a fresh start: end this job and remove both on every node: rm -r {both}",
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
        most = MOST_FOLDERS if rank == 0 else FEW_FOLDERS
        there = siblings_of(config.path, self._history.job, set(map(host_name, hosts)), most)
        newer = [each for each in there if found is None or each.newest > found]
        if not newer:
            return
        self._reports.notice(words_for(newer, config.here, found), logging.WARNING)

    def _owner(self) -> str:
        """Holder of the persistent lease; empty if there is none or it cannot be read."""
        persistent = self._config.persistent
        with contextlib.suppress(Exception):
            once = RetryPolicy(tries=1)
            made = PersistentStore(persistent.path, retry=once, **persistent.options())
            with contextlib.closing(made) as store:
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
            message=self._in_words(result, level, refused),
            severity=logging.INFO if self._rank == 0 else logging.DEBUG,
        )

    def _in_words(self, result: Restored, level: str, refused: int) -> str:
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
    if request.where == SETTING:
        return f"the setting {SETTING} (TIERCKPT_{SETTING.upper()}={version})"
    return f"`{rollback_command(request.where, version)}`"


def rollback_command(where: str, version: int) -> str:
    """The command that asks to go back."""
    return f"tierckpt rollback {shlex.quote(where)} {version}"


def undo(request: RollbackRequest) -> str:
    """The way to take a request back."""
    if request.where == SETTING:
        return f"unset TIERCKPT_{SETTING.upper()}, or remove {SETTING} from the settings"
    return f"tierckpt rollback {shlex.quote(request.where)} --cancel"


def _newest_in(job: JobDirectory) -> VersionId | None:
    """The newest readable version in that folder."""
    with contextlib.suppress(OSError):
        return max((manifest.id for _, manifest in job.sealed()), default=None)
    return None


__all__ = ["RestoreNotices", "undo", "wish"]
