"""Notices of a restore: what its user should know, beside the version that it takes."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Collection
from pathlib import Path

from tierckpt._host import host_name
from tierckpt._text import size_text
from tierckpt.config import Config
from tierckpt.coordination.job_history import JobHistory
from tierckpt.coordination.reports import Reports
from tierckpt.format.ids import VersionId
from tierckpt.group import Group
from tierckpt.restored import Restored
from tierckpt.storage.local.claim_file import user_name
from tierckpt.storage.local.sibling_nodes import MOST_FOLDERS, siblings_of, words_for
from tierckpt.storage.memory import job_directory
from tierckpt.storage.memory.job_directory import JobDirectory
from tierckpt.storage.persistent import PersistentStore, RetryPolicy

FEW_FOLDERS = 16
"""Of other nodes, are looked into where rank 0 looks into more."""
MOST_SAID = 8
"""Events of copies that were rejected: a job of thousands has as many shards."""


class RestoreNotices:
    """One rank's; changes nothing. What all ranks know, rank 0 says. Training thread."""

    def __init__(
        self,
        config: Config,
        group: Group,
        history: JobHistory,
        reports: Reports,
        elsewhere: Collection[Path],
    ) -> None:
        """`elsewhere`: see `NodeResources.left_elsewhere`."""
        self._config, self._group, self._history = config, group, history
        self._reports, self._elsewhere = reports, elsewhere
        self._rejected = 0

    def of_all(self, text: str, severity: int) -> None:
        """Of what all ranks know: rank 0's is of that severity."""
        self._reports.notice(text, logging.DEBUG if self._group.rank else severity)

    def rejected(self, text: str) -> None:
        """A copy was there and cannot be used; the first few are said one by one."""
        self._rejected += 1
        if self._rejected <= MOST_SAID:
            self._say_rejected(text)

    def end_of_rejected(self) -> None:
        """Those that were not said one by one."""
        if (more := self._rejected - MOST_SAID) > 0:
            self._say_rejected(f"and {more} more")

    def _say_rejected(self, text: str) -> None:
        severity = logging.ERROR if self._group.rank == 0 else logging.DEBUG
        self._reports.emit("rejected", message=text, severity=severity)

    def before_loading(self, found: VersionId | None) -> None:
        """Where there is more than what was found, which is the newest of what was seen."""
        self._what_is_elsewhere(found)
        self._what_other_nodes_have(found)

    def suspicion(self, id_: VersionId, what: str, asked: bool) -> None:
        """It may be no rank's state."""
        clean = self._history.newest_clean(id_)
        if clean is None:
            other = "there is no older one that is not suspect"
        elif not asked:
            other = (
                f"{clean} is the newest that is not. To take that: restore(version={clean.version})"
                ', or on_drift="stop" (TIERCKPT_ON_DRIFT=stop)'
            )
        else:
            other = f"it was asked for; {clean} is the newest that is not"
        self.of_all(
            f"{id_} is restored, and is suspect: parts of it come from ranks that differed "
            f"({what}); {other}",
            logging.WARNING,
        )

    def where_it_was(self, id_: VersionId) -> None:
        """Nothing is on disk any more: the directory may have been removed to begin afresh."""
        if self._group.rank:
            return
        directory, memory = self._config.directory, job_directory.job_directory(self._config).path
        both = f"{shlex.quote(directory)} {shlex.quote(str(memory))}"
        self._reports.notice(
            f"{id_} was taken from memory ({memory}), and nothing is in {directory} any more. If "
            f"that was to begin afresh: end this job, and remove both, on every node: rm -r {both}",
            logging.WARNING,
        )

    def whose_it_was(self, id_: VersionId, job: str) -> None:
        """A job that moved finds its own under another name, and one that is another's place finds
        that one's: nobody can tell but who reads it."""
        if self._group.rank:
            return
        where, mine = self._config.persistent.path, self._history.job
        owner = self._owner()
        others = owner and not owner.startswith(f"{mine} on ")
        self._reports.notice(
            f"{id_} in {where} was written by job {job!r}; this one is called {mine!r}, and goes "
            "on from it. Should this be the same job, moved: give it one job_id wherever it runs. "
            "Should it not: two jobs need two places, give this one another persistent_path"
            + (f". The place is in use by {owner}" if others else ""),
            logging.WARNING,
        )

    def what_another_path_has(self, id_: VersionId, job: str) -> None:
        """Memory is found by the job's name, which is made of its path: a directory that was moved,
        or copied, comes without it. Rank 0 looks on its node; the others' are alike."""
        if self._group.rank:
            return
        theirs = JobDirectory.at(self._config.shm_dir, job, self._config.node)
        if theirs.path in self._elsewhere:
            return  # told already
        newest = _newest_in(theirs)
        if newest is not None and newest > id_:
            self._reports.notice(
                f"{id_} was written by job {job!r}, which has {newest} in memory here; this job is "
                f"called {self._history.job!r}, and goes on from {id_}. Should it be the same job, "
                f"moved: start it again with job_id={job!r}, or at the path that it had, before "
                "it writes here",
                logging.WARNING,
            )

    def _what_is_elsewhere(self, found: VersionId | None) -> None:
        """A run that was killed had its slots under another name or in another place: `shm_dir`,
        `node` or `job_id` was changed since, perhaps by mistake. `found` is what was."""
        mine = job_directory.job_directory(self._config)
        for folder in sorted(self._elsewhere):
            job, _, node = folder.name.partition("@")
            theirs = JobDirectory(folder.parent, job, node)
            try:
                # A folder in which somebody trains is that of another of this job's nodes.
                newest = None if theirs.trains() else _newest_in(theirs)
            except PermissionError:
                self._of_another_user(folder, found)
                continue
            if newest is None or (found is not None and newest <= found):
                continue
            before = {"shm_dir": str(theirs.root.parent), "job_id": theirs.job, "node": theirs.node}
            now = {"shm_dir": str(mine.root.parent), "job_id": mine.job, "node": mine.node}
            changed = (f"{k}={v!r}" for k, v in before.items() if now[k] != v)
            self._reports.notice(
                f"{newest} is in memory in {folder}, where a killed run of this job had its "
                f"slots. This one has {mine.path}, does not see it, and "
                f"{f'goes on from {found}' if found else 'has found nothing'}. To go on from "
                f"{newest}: end this job, and start it again with {', '.join(changed)}",
                logging.WARNING,
            )

    def _of_another_user(self, folder: Path, found: VersionId | None) -> None:
        user = "another user"
        with contextlib.suppress(OSError):
            user = f"user {user_name(folder.parent.stat().st_uid)}"
        self._reports.notice(
            f"a killed run of this job, of {user}, had its slots in {folder}, which this user may "
            f"not look into. This one {f'goes on from {found}' if found else 'has found nothing'}; "
            f"should there be a newer version, a start by {user} goes on from it",
            logging.WARNING,
        )

    def _what_other_nodes_have(self, found: VersionId | None) -> None:
        """`{node}` stands for another name than in the run before. Nodes of this run have told
        what they have; rank 0 looks for others', and every node that has nothing of its own."""
        rank, hosts = self._group.rank, self._history.nodes
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
        """Who holds the persistent place; empty also where that cannot be had."""
        persistent = self._config.persistent
        with contextlib.suppress(Exception):
            once = RetryPolicy(tries=1)
            made = PersistentStore(persistent.path, retry=once, **persistent.options())
            with contextlib.closing(made) as store:
                return store.owner()
        return ""

    def restored(self, result: Restored) -> None:
        """The event of the end."""
        level = " and ".join(result.levels)
        self._reports.emit(
            "restored",
            level=level,
            nbytes=result.nbytes,
            seconds=result.seconds,
            message=self._in_words(result, level),
            severity=logging.INFO if self._group.rank == 0 else logging.DEBUG,
        )

    def _in_words(self, result: Restored, level: str) -> str:
        if not level:
            return f"nothing to restore in {self._config.directory}: a fresh start"
        nbytes, seconds = size_text(result.nbytes), result.seconds["total"]
        return (
            f"restored v{result.version} (iteration {int(result)}) from {level}: {nbytes} in "
            f"{seconds:.2f} s"
        )


def _newest_in(job: JobDirectory) -> VersionId | None:
    """The newest version in that folder, as far as can be seen."""
    with contextlib.suppress(OSError):
        return max((manifest.id for _, manifest in job.sealed()), default=None)
    return None


__all__ = ["RestoreNotices"]
