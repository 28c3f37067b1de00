"""A rank's resources on its node, from the start of the checkpointer to its end.

Without torch. In shared memory: the job's folder, the lock that the rank holds while it runs, and
the rank's slots, with versions of earlier runs in them. On the local level: the node's exclusive
claim on the directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from tierckpt import _milestones
from tierckpt.config import Config
from tierckpt.coordination.error_barrier import gather_or_raise
from tierckpt.coordination.settings_check import JobTopology
from tierckpt.coordination.versions import Reports
from tierckpt.errors import ConfigError
from tierckpt.group import Group, Node
from tierckpt.storage import answers, job_directory
from tierckpt.storage import slots as image_file
from tierckpt.storage.claims import DirectoryClaim
from tierckpt.storage.job_directory import (
    JobBusyError,
    JobDirectory,
    JobFinishedError,
    rank_of,
    watched_directories,
)
from tierckpt.storage.marks import local_suspects
from tierckpt.storage.notes import remove_fork_notes
from tierckpt.storage.slot_pool import SlotPool, too_small
from tierckpt.storage.slots import images_of

__all__ = ["DEAD_JOB_SECONDS", "NodeResources", "held_bytes"]

DEAD_JOB_SECONDS = 3600.0
"""The next job removes the segments of a dead job that nobody has restarted for this time."""


class NodeResources:
    """One rank's folder, lock, slots and claim; owns them. Training thread; `pool`: see there."""

    def __init__(
        self, config: Config, group: Group, topology: JobTopology, slots: int, reports: Reports
    ) -> None:
        """Take all of them: `slots` slots, existing ones included. Removes the memory of dead jobs.

        Collective. Raises, on all ranks, JobBusyError if another process has a rank's lock or
        another job a directory, JobFinishedError if that one finishes meanwhile, and ConfigError if
        a place cannot be used. Holds nothing then.
        """
        self._config, self._rank, self._reports = config, group.rank, reports
        exists = os.path.exists(config.directory)
        self.directory_is_new = config.uses("local") and not exists  # without local none is made
        self.directory_is_another = False
        """True if the run that left versions in memory here had another directory."""
        self._is_first = topology.node(group.rank).first == group.rank
        """True on the first rank of a node."""
        self._is_clear = False
        self._kept: list[str] = []
        """Folders with a helper, see `answers.keep`."""
        self.finished: int | None = None
        """The version with which the training has ended by itself, once it has."""
        self.job = job_directory.job_directory(config)
        claims = self._is_first and config.uses("local")
        self._claims = self._claim(topology) if claims else None
        try:
            with contextlib.ExitStack() as undo:
                gather_or_raise(
                    group, lambda: self._take(slots, topology, undo), lambda ranks, theirs: theirs
                )
                undo.pop_all()
        except JobFinishedError as error:
            _milestones.reached(_milestones.REFUSED)
            if self._claims is not None:
                self._claims.leave_refused(error.version)
            raise

    def _take(self, slots: int, topology: JobTopology, undo: contextlib.ExitStack) -> None:
        """Take this rank's folder, lock and slots, and its node's directory. Raises JobBusyError or
        ConfigError."""
        try:
            self._take_place(slots, topology.node(self._rank), undo)
        except OSError as error:
            raise ConfigError(
                f"rank {self._rank} cannot use its place in shared memory: {error}. Only this job "
                f"writes to {self.job.path}: remove the file in the way there"
            ) from error
        if self._claims is not None:
            undo.callback(self._claims.release)
            if taken := self._claims.stake():
                raise JobBusyError(taken)

    def _take_place(self, slots: int, node: Node, undo: contextlib.ExitStack) -> None:
        config, reports = self._config, self._reports
        taken = os.path.exists(config.directory) and not os.path.isdir(config.directory)
        if taken and config.uses("local"):
            raise ConfigError(f"path: {config.directory} is a file; name a directory")
        try:
            self.job.create()
        except OSError as error:
            raise ConfigError(
                f"there is no place for slots in {self.job.root}: {error}. shm_dir must be an "
                "existing, writable directory in memory (/dev/shm)"
            ) from error
        for job in self.job.remove_dead_jobs(DEAD_JOB_SECONDS):
            text = f"removed shared memory of the dead job {job}: no process of it has run for"
            reports.notice(f"{text} {DEAD_JOB_SECONDS:g} s", logging.INFO)
        local = os.path.realpath(config.directory) if config.uses("local") else ""
        self.directory_is_another = self.job.last_local(self._rank) not in (None, local)
        self._kept = answers.keep(watched_directories(config, self._rank, node))
        undo.callback(lambda: answers.drop(self._kept))
        severity = logging.WARNING if self._is_first else logging.DEBUG
        self._lock_fd = self.job.lock_rank(
            self._rank,
            on_wait=lambda text: reports.notice(text, severity),
            watches=watched_directories(config, self._rank, node),
            local=local,
            continues_from=config.rollback_to,
        )
        undo.callback(self.job.remove_if_unused)
        undo.callback(self._unlock)
        place = image_file.place_for_slots(config)
        self.pool = SlotPool(
            self.job, self._rank, slots, reports.notice_later, place, may_grow=not config.slots
        )
        undo.callback(lambda: self.pool.close(remove=False))
        self.pool.adopt()

    def _claim(self, topology: JobTopology) -> DirectoryClaim:
        """Return the node's claim on its directory, which is not staked yet."""
        return DirectoryClaim(
            self._config.directory,
            topology.token,
            topology.node(self._rank).index,
            self._reports.notice,
            topology.launch,
            self.job.path,
            topology.starters,
            self._config.persistent.path if self._config.uses("persistent") else "",
            self._config.events_dir,
            self._config.rollback_to,
            has_keeper=self._config.agent != "inline",
        )

    @property
    def left_elsewhere(self) -> set[Path]:
        """Other folders in memory in which killed runs that used this node's directory had their
        slots; each folder is reported to one node."""
        return self._claims.found_memory - {self.job.path} if self._claims else set()

    def tell_of_room(self, shard_bytes: int, group: Group, node: Node) -> None:
        """Report, once for each node, where slots in place are, and the memory that slots of
        `shard_bytes` lack."""
        if node.first != group.rank:
            return
        count, in_place = self.pool.count, self.pool.in_place is not None
        if in_place:
            text = image_file.describe(self._config, count, shard_bytes)
            self._reports.notice(text, logging.INFO)
        lacking = lacking_room(self._config, self.job, node, shard_bytes, count, in_place)
        if lacking:
            self._reports.notice(lacking, logging.ERROR)

    def clear(self, node: Node) -> None:
        """Remove slots of earlier runs that this run does not need (they had more slots, or more
        ranks on this node). Called when all ranks have a newer version; acts once in a run, on the
        first rank of each node for all other ranks' slots."""
        if not self._is_clear:
            self.pool.drop_adopted()
            first = node.first == self._rank
            self._is_clear = not first or self.job.remove_surplus(node.ranks)

    def leave(self, remove: bool) -> None:
        """Release all, when no thread uses a slot any more. `remove`: also remove the files."""
        self.pool.close(remove)
        self._release()
        self._unlock(remove)
        if remove:
            marks = local_suspects(self.job.path)
            marks.unmark(marks.marked())
            remove_fork_notes(self.job.path)
            self.job.remove_orphans()
            self.job.remove_if_unused()

    def release(self) -> None:
        """Release all before any version was stored: adopted slots stay, new ones do not."""
        self.pool.close(remove=False)
        self._release()
        self._unlock()
        self.job.remove_if_unused()

    def _release(self) -> None:
        if self._claims is not None:
            self._claims.release(self.finished)
        answers.drop(self._kept)
        self._kept = []

    def _unlock(self, remove: bool = True) -> None:
        if remove:
            self.job.lock_path(self._rank).unlink(missing_ok=True)
        self.job.unlock_rank(self._lock_fd, self.finished)


def lacking_room(
    config: Config,
    job: JobDirectory,
    node: Node,
    shard_bytes: int,
    count: int,
    in_place: bool = False,
) -> str:
    """The text of a notice if memory has too little room for `count` slots of each rank of this
    node; empty if there is enough.

    `shard_bytes` is an estimate while the optimizer has no state yet. `in_place`: slots are files
    of the local level.
    """
    place = config.directory if in_place else config.shm_dir
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    files = image_file.most_files(config, count) if in_place else count
    held = held_bytes(config, job, node, in_place)
    more = files * shard_bytes * len(node.ranks) - held
    if more <= free:
        return ""
    ranks = len(node.ranks)
    needs = f"{place} has {free} bytes free, and this node's ranks ({ranks}) need about {more} more"
    if in_place:
        return (
            f"{needs} there for {count} slots each and the versions that they keep: some will not "
            "be committed. Give it more memory, or let local_keep keep fewer"
        )
    return f"{needs} for {count} slots each: {too_small(place)}"


def held_bytes(config: Config, job: JobDirectory, node: Node, in_place: bool) -> int:
    """Bytes of the slots of this node's ranks: in files of the local level, or in shared memory."""
    files = [(path, path.name) for path in job.segments()]
    if in_place:
        files = images_of(Path(config.directory), job.path)
    held = 0
    for path, slot in files:
        with contextlib.suppress(FileNotFoundError):  # replaced by its rank just now
            held += path.lstat().st_size if rank_of(slot) in node.ranks else 0
    return held
