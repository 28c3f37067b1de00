"""Comeback: one `restore()`, from taking stock of the levels to telling what it took.

`restore` finds, verifies and loads; here is what comes before and after: the inventory, what it
means that nothing was found, and the words for the user.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from tierckpt._host import host_name
from tierckpt._text import size_text, some
from tierckpt.config import Config
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.job_history import JobHistory
from tierckpt.coordination.reports import Reports
from tierckpt.core.copies import Found, FoundParity, Location
from tierckpt.errors import RestoreError
from tierckpt.format.ids import Lineage, VersionId
from tierckpt.group import Group
from tierckpt.restored import Restored
from tierckpt.state.training_state import TrainingState
from tierckpt.storage.local.claim_file import user_name
from tierckpt.storage.local.sibling_nodes import MOST_FOLDERS, siblings_of, words_for
from tierckpt.storage.memory import job_directory
from tierckpt.storage.memory.job_directory import JobDirectory
from tierckpt.storage.persistent import PersistentStore, RetryPolicy

from .progress import Progress
from .restorer import Restorer, load
from .shard_image import FarStore
from .tensor_fill import TensorPreallocator
from .verified_version import SpillPolicy, VerifiedVersion

Inventories = Sequence[Sequence[Found]]
Parities = Sequence[Sequence[FoundParity]]
FEW_FOLDERS = 16
"""Of other nodes, are looked into where rank 0 looks into more."""
MOST_SAID = 8
"""Events of copies that were rejected: a job of thousands has as many shards."""


class RestoreSession:
    """Good for one restore: made, `find`, `load` if that found something, `report`.

    Training thread; all ranks do the same. What it is given stays its owner's: the live state is
    changed by `load` alone, and `history` by taking stock, and where a run begins afresh.
    """

    def __init__(
        self,
        config: Config,
        group: Group,
        state: TrainingState,
        history: JobHistory,
        reports: Reports,
        bar: Progress,
        begin_seconds: float,
        elsewhere: Collection[Path] = (),
    ) -> None:
        """Takes stock of all levels: collective. `begin_seconds`: when `restore()` was called, by
        `time.perf_counter()`. `elsewhere`: see `NodeResources.left_elsewhere`."""
        self._config = config
        self._group, self._state, self._history, self._reports = group, state, history, reports
        self._begin_seconds, self._elsewhere = begin_seconds, elsewhere
        self._version: int | None = None
        """That was asked for."""
        self.passed_over: list[VersionId] = []
        """Newer ones than what was found, which are suspect, newest first."""
        self._error_barrier = ErrorBarrier(group)
        with self._error_barrier:
            history.look(self._error_barrier)
            self._inventory_seconds = time.perf_counter() - begin_seconds
            self._new = TensorPreallocator(state)
            self._restorer = Restorer(
                self._error_barrier,
                history.found,
                self._reject,
                history.parities,
                bar,
                self._open_store,
                self._new,
                self._look_again,
                history.nodes,
                SpillPolicy(Path(config.directory), _live_bytes(state)),
            )
        self._told: set[str] = set()
        """Problems that were rejected, and nodes that do not answer."""

    def _open_store(self, place: Location) -> FarStore:
        agent = self._history.open_agent(place)
        return agent or PersistentStore(place.where, **self._config.persistent.options())

    def find(self, version: int | None, live_version: int) -> VerifiedVersion | None:
        """The newest sound version, or `version`; the caller closes it. Collective.

        None when there is nothing: a run has begun afresh then. Raises RestoreError, on all ranks,
        where that would be wrong: something was asked for, or may be where nobody could look, or
        the live state, at `live_version`, is no fresh one; where there is something of a newer
        format and `version` does not say to go back behind it; and where a rank fails by itself.
        """
        with contextlib.ExitStack() as on_failure:
            with self._error_barrier:
                attempt = self._find(version)
                if version is None:
                    newest = attempt.plan.id if attempt else None
                    self._tell_what_is_elsewhere(newest)
                    self._tell_what_other_nodes_have(newest)
                if attempt is None:
                    self._nothing_found(version, live_version)
                else:
                    on_failure.callback(attempt.close)
                    if version is None:
                        self._tell_what_is_passed_over(attempt.plan.id)
                        self._tell_what_is_lost(attempt.plan.id)
                    self._history.reject(self._restorer.bad)
            on_failure.pop_all()
        return attempt

    def has_newer(self, attempt: VerifiedVersion) -> bool:
        """Whether anything of a newer version was seen; alike on all ranks."""
        found = (each.key.id for inventory in self._history.found for each in inventory)
        return any(id_ > attempt.plan.id for id_ in found)

    def _find(self, version: int | None) -> VerifiedVersion | None:
        self._version = version
        try:
            self._judge_what_was_seen()
            if version is None and self._config.on_drift == "stop" and self._history.suspects:
                suspects = self._history.suspects.keys()
                attempt = self._restorer.find(None, suspects)
                if attempt is not None:
                    self.passed_over = self._history.newer_suspects(attempt.plan.id)
                    return attempt
            return self._restorer.find(version)
        finally:
            self._count_rejected()

    def _tell_what_is_passed_over(self, found: VersionId) -> None:
        """Who asks to stop where replicas differ does not want to go on from such a version. Where
        the run before went back to the same version, and came no further before replicas differed
        again, a launcher could try for ever: RestoreError, on all ranks."""
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
                f"the run of this job before this one was started from {found}, as the next one "
                f"would be, and replicas differed again before a newer version was known to be "
                f"alike on all ranks ({why}). Nothing was changed, so that a launcher does not "
                "try that for ever",
                f"Find the cause first. Then restore(version={found.version}) tries {found} once "
                'more; on_drift="warn" (TIERCKPT_ON_DRIFT=warn) goes on from the newest version, '
                "suspect or not",
            )
        self._tell_one(
            f"{found} is restored, the newest version that is not suspect, as on_drift is "
            f'"stop". {why}. To take one of these all the same: restore(version='
            f'{newest.version}), or on_drift="warn"'
        )

    def _tell_one(self, text: str) -> None:
        self._reports.notice(text, logging.DEBUG if self._group.rank else logging.WARNING)

    def _look_again(self, missing: str) -> tuple[Inventories, Parities]:
        """Take stock once more: something was retired since."""
        self._note(
            f"{missing}: not there any more, or never seen by the rank that was to read it. "
            "Looking once more"
        )
        self._history.look(self._error_barrier)
        self._judge_what_was_seen()
        return self._history.found, self._history.parities

    def _note(self, text: str) -> None:
        """What all ranks know, by one."""
        self._reports.notice(text, logging.DEBUG if self._group.rank else logging.INFO)

    def _judge_what_was_seen(self) -> None:
        for text in self._history.silent:
            if text not in self._told:
                self._told.add(text)
                self._note(text)
        if self._history.newer and self._version is None:
            newer = some(self._history.newer, between="; ")
            raise RestoreError(
                f"a newer tierckpt was here: {newer}. Nothing was changed, and nothing older was "
                "taken in its place",
                "To go on without it: restore(version=...) goes back to an older version; moving "
                "it away, or another path, starts without it",
            )
        for problem in (*self._history.problems, *self._history.unseen):
            if problem not in self._told:
                self._told.add(problem)
                self._restorer.rejected.append(problem)
                self._reject(problem)

    def _tell_what_is_lost(self, found: VersionId) -> None:
        """Going far back must not look like the ordinary course."""
        lost = self._history.once_complete()
        if lost is not None and lost > found and lost not in self.passed_over:
            self._reports.notice(
                f"going back to {found}, although {lost} was complete once: {self._what_is_left()}",
                logging.WARNING if self._group.rank == 0 else logging.DEBUG,
            )

    def _nothing_found(self, version: int | None, live_version: int) -> None:
        """A fresh start, unless something was expected, or may be where nobody could look."""
        unseen = some([*self._history.unseen, *self._history.nameless], between="; ")
        if version is not None:
            hidden = f", and what is there could not be seen in {unseen}" if unseen else ""
            raise RestoreError(
                f"no complete, sound v{version} was found on any level{hidden}", self._versions()
            )
        if live_version > 0:
            raise RestoreError(
                f"nothing sound was found on any level; the live state stays at v{live_version}"
            )
        if unseen:
            raise RestoreError(
                f"nothing to restore was found, and what is there could not be seen in {unseen}",
                "There may be checkpoints, so this job does not start afresh. Mend that and start "
                "again. If none are there: take the place out of the settings, move away what is "
                "named, or leave out restore()",
            )
        if (lost := self._history.once_complete()) is not None:
            raise RestoreError(
                f"this job had complete checkpoints ({lost} was one), and has none any more: "
                f"{self._what_is_left()}",
                "Start again with the nodes, or the disks, that have the rest: tierckpt list "
                f"{self._config.directory} tells on each what is there. To give it up: another "
                "path, or moving away what is left, starts from the beginning",
            )
        if self._restorer.rejected or self._history.remains():
            self._reports.notice(
                "starting from the beginning: no complete, sound version was found, nor is one "
                f"known to have ever been on all ranks' disks; {self._what_is_left()}",
                logging.ERROR if self._restorer.rejected else logging.WARNING,
            )
        self._history.begin_afresh()

    def _versions(self) -> str:
        found = {f.key.id.version for each in self._history.found for f in each}
        names = some([f"v{version}" for version in sorted(found, reverse=True)], MOST_SAID)
        there = f"There are {names}" if names else "There is none at all"
        return f"{there}; tierckpt list {self._config.directory} tells which are complete"

    def _what_is_left(self) -> str:
        shards = "; ".join(self._history.remains(self._restorer.left_out)) or "none"
        rejected = some(self._restorer.rejected, between="; ")
        return f"what was found: {shards}" + (f"; {rejected}" if rejected else "")

    def load(
        self, attempt: VerifiedVersion, strict: bool, load_adapter: Callable[[Any], None]
    ) -> tuple[Lineage, Restored]:
        """Load what `find` found; returns its lineage and what was done. Collective.

        `load_adapter` is given the adapter's own; where it raises, that is the attempt's trouble.
        Raises what `restore.load` raises.
        """
        begin = time.perf_counter()
        if set(attempt.plan.levels) == {"memory"} and self._history.gone_from_disk():
            self._tell_where_it_was(attempt.plan.id)  # also to who changed the model meanwhile
        manifest, result, notices, adapter = load(
            self._state, attempt, self._error_barrier, strict, self._new
        )
        try:
            load_adapter(adapter)
        except Exception as error:
            attempt.fail(error)
            self._state.torn = True
        for text in notices:
            self._reports.notice(text, logging.WARNING)
        result.suspect = self._history.suspects.get(attempt.plan.id, result.suspect)
        if result.suspect:
            self._tell_suspicion(attempt.plan.id, result.suspect)
        if "persistent" in result.levels and manifest.facts.job != self._history.job:
            self._tell_whose_it_was(attempt.plan.id, manifest.facts.job)
        elif self._version is None and manifest.facts.job != self._history.job:
            self._tell_what_another_path_has(attempt.plan.id, manifest.facts.job)
        result.seconds["load"] = time.perf_counter() - begin
        return manifest.facts.lineage, result

    def _tell_suspicion(self, id_: VersionId, what: str) -> None:
        """It may be no rank's state. Said by rank 0, as all know."""
        clean = self._history.newest_clean(id_)
        if clean is None:
            other = "there is no older one that is not suspect"
        elif self._version is None:
            other = (
                f"{clean} is the newest that is not. To take that: restore(version={clean.version})"
                ', or on_drift="stop" (TIERCKPT_ON_DRIFT=stop)'
            )
        else:
            other = f"it was asked for; {clean} is the newest that is not"
        self._tell_one(
            f"{id_} is restored, and is suspect: parts of it come from ranks that differed "
            f"({what}); {other}"
        )

    def _tell_where_it_was(self, id_: VersionId) -> None:
        """Who removed the directory may have meant to begin afresh."""
        if self._group.rank:
            return
        directory, memory = self._config.directory, job_directory.job_directory(self._config).path
        both = f"{shlex.quote(directory)} {shlex.quote(str(memory))}"
        self._reports.notice(
            f"{id_} was taken from memory ({memory}), and nothing is in {directory} any more. If "
            f"that was to begin afresh: end this job, and remove both, on every node: rm -r {both}",
            logging.WARNING,
        )

    def _tell_whose_it_was(self, id_: VersionId, job: str) -> None:
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

    def _tell_what_another_path_has(self, id_: VersionId, job: str) -> None:
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

    def _tell_what_is_elsewhere(self, found: VersionId | None) -> None:
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
                self._tell_of_another_user(folder, found)
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

    def _tell_of_another_user(self, folder: Path, found: VersionId | None) -> None:
        user = "another user"
        with contextlib.suppress(OSError):
            user = f"user {user_name(folder.parent.stat().st_uid)}"
        self._reports.notice(
            f"a killed run of this job, of {user}, had its slots in {folder}, which this user may "
            f"not look into. This one {f'goes on from {found}' if found else 'has found nothing'}; "
            f"should there be a newer version, a start by {user} goes on from it",
            logging.WARNING,
        )

    def _tell_what_other_nodes_have(self, found: VersionId | None) -> None:
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

    def report(self, result: Restored) -> Restored:
        """Complete it with what the way there took, and say it."""
        self._restorer.report(result)
        total_seconds = time.perf_counter() - self._begin_seconds
        result.seconds.update(inventory=self._inventory_seconds, total=total_seconds)
        level = " and ".join(result.levels)
        self._reports.emit(
            "restored",
            level=level,
            nbytes=result.nbytes,
            seconds=result.seconds,
            message=self._in_words(result, level),
            severity=logging.INFO if self._group.rank == 0 else logging.DEBUG,
        )
        return result

    def _in_words(self, result: Restored, level: str) -> str:
        if not level:
            return f"nothing to restore in {self._config.directory}: a fresh start"
        nbytes, seconds = size_text(result.nbytes), result.seconds["total"]
        return (
            f"restored v{result.version} (iteration {int(result)}) from {level}: {nbytes} in "
            f"{seconds:.2f} s"
        )

    def _reject(self, text: str) -> None:
        if len(self._restorer.rejected) <= MOST_SAID:
            self._say_rejected(text)

    def _count_rejected(self) -> None:
        """Those that were not said one by one."""
        if (more := len(self._restorer.rejected) - MOST_SAID) > 0:
            self._say_rejected(f"and {more} more")

    def _say_rejected(self, text: str) -> None:
        severity = logging.ERROR if self._group.rank == 0 else logging.DEBUG
        self._reports.emit("rejected", message=text, severity=severity)


def _newest_in(job: JobDirectory) -> VersionId | None:
    """The newest version in that folder, as far as can be seen."""
    with contextlib.suppress(OSError):
        return max((manifest.id for _, manifest in job.sealed()), default=None)
    return None


def _live_bytes(state: TrainingState) -> int:
    """Of what a version has, in this rank's memory."""
    walk = state.walk()
    tensors = [*walk.params, *walk.buffers, *(tensor for tensor, *_ in walk.state)]
    return sum(t.numel() * t.element_size() for t in tensors if t.device.type == "cpu")


__all__ = ["RestoreSession"]
