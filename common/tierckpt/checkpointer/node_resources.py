"""A rank's place on its node, from attach to the end.

In shared memory that is the job's folder, the lock which says that the rank lives, and the rank's
slots, with what an earlier run left in them; on the local level, the node's claim on the directory
that no other job has then.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from tierckpt.config import Config
from tierckpt.coordination.error_barrier import gather_or_raise
from tierckpt.coordination.reports import Reports
from tierckpt.coordination.settings_check import JobTopology
from tierckpt.errors import ConfigError
from tierckpt.group import Group, Node
from tierckpt.halt.controller import watched_directories
from tierckpt.state.training_state import TrainingState
from tierckpt.storage.local.directory_claim import DirectoryClaim
from tierckpt.storage.memory import image_file, job_directory
from tierckpt.storage.memory.job_directory import JobBusyError
from tierckpt.storage.memory.slot_pool import SlotPool
from tierckpt.storage.suspects import SuspectMarks

from . import attach


class NodeResources:
    """Owns what it names. Training thread; `pool` has rules of its own."""

    def __init__(
        self, config: Config, group: Group, topology: JobTopology, slots: int, reports: Reports
    ) -> None:
        """Take it: `slots` of them, those adopted that are there. What dead jobs left is removed.

        Collective. On all ranks alike, raises JobBusyError while another process has a rank's
        place, or another job a directory; ConfigError where there is no place.
        """
        self._config, self._rank, self._reports = config, group.rank, reports
        there = os.path.exists(config.directory)
        self.directory_is_new = config.uses("local") and not there  # else nobody makes it
        self.directory_is_another = False
        """Than the run before had that left what is in memory here."""
        self._is_first = topology.node(group.rank).first == group.rank
        """Of its node's ranks."""
        self._is_clear = False
        self._claims: DirectoryClaim | None = None
        with contextlib.ExitStack() as undo:
            gather_or_raise(
                group, lambda: self._take(slots, topology, undo), lambda ranks, theirs: theirs
            )
            undo.pop_all()

    def _take(self, slots: int, topology: JobTopology, undo: contextlib.ExitStack) -> None:
        """This rank's place and its node's directory. Raises JobBusyError or ConfigError."""
        try:
            self._take_place(slots, topology.node(self._rank), undo)
        except OSError as error:
            raise ConfigError(
                f"rank {self._rank} cannot have its place in shared memory: {error}. Move what is "
                f"in the way there out of {self.job.path}, which this job alone writes to"
            ) from error
        if taken := self._claim(topology, undo):
            raise JobBusyError(taken)

    def _take_place(self, slots: int, node: Node, undo: contextlib.ExitStack) -> None:
        config, reports = self._config, self._reports
        taken = os.path.exists(config.directory) and not os.path.isdir(config.directory)
        if taken and config.uses("local"):
            raise ConfigError(f"path: {config.directory} is a file; name a directory")
        self.job = job_directory.job_directory(config)
        try:
            self.job.create()
        except OSError as error:
            raise ConfigError(
                f"there is no place for slots in {self.job.root}: {error}. shm_dir must be a "
                "directory that is there, in memory (/dev/shm), and writable"
            ) from error
        for job in self.job.remove_dead_jobs(config.memory.linger_seconds):
            text = f"removed shared memory of the dead job {job}: nobody has lived there for"
            reports.notice(f"{text} {config.memory.linger_seconds:g} s", logging.INFO)
        local = os.path.realpath(config.directory) if config.uses("local") else ""
        self.directory_is_another = self.job.last_local(self._rank) not in (None, local)
        severity = logging.WARNING if self._is_first else logging.DEBUG
        self._lock_fd = self.job.lock_rank(
            self._rank,
            on_wait=lambda text: reports.notice(text, severity),
            watches=watched_directories(config, self._rank, node),
            local=local,
        )
        undo.callback(self.job.remove_if_unused)
        undo.callback(self._unlock)
        place = image_file.place_for_slots(config)
        self.pool = SlotPool(self.job, self._rank, slots, reports.notice_later, place)
        undo.callback(lambda: self.pool.close(remove=False))
        self.pool.adopt()

    def _claim(self, topology: JobTopology, undo: contextlib.ExitStack) -> str:
        """Once a node; why another job has the directory, else empty."""
        node = topology.node(self._rank)
        if node.first != self._rank or not self._config.uses("local"):
            return ""
        self._claims = DirectoryClaim(
            self._config.directory,
            topology.token,
            node.index,
            self._reports.notice,
            topology.launch,
            self.job.path,
            topology.starters,
        )
        undo.callback(self._claims.release)
        return self._claims.stake()

    @property
    def left_elsewhere(self) -> set[Path]:
        """Folders in memory, but this job's own, in which killed runs that had this node's
        directory had their slots; each is told of to one node."""
        return self._claims.found_memory - {self.job.path} if self._claims else set()

    def tell_of_room(self, state: TrainingState, group: Group, node: Node) -> None:
        """Say where the slots are, if not here, and what they lack for `state`: once a node."""
        if node.first != group.rank:
            return
        count, in_place = len(self.pool.slots), self.pool.in_place is not None
        each_bytes = attach.shard_bytes(state, group.size)
        if in_place:
            self._reports.notice(image_file.describe(self._config, count, each_bytes), logging.INFO)
        lacking = attach.lacking_room(self._config, self.job, node, each_bytes, count, in_place)
        if lacking:
            self._reports.notice(lacking, logging.ERROR)

    def clear(self, node: Node) -> None:
        """Remove what earlier runs left here and none of this one's slots took over (they had more
        slots, or more ranks on this node): all ranks have something newer. Once a run and node."""
        if not self._is_clear:
            first = node.first == self._rank
            self._is_clear = not first or self.job.remove_surplus(node.ranks, len(self.pool.slots))

    def leave(self, remove: bool) -> None:
        """Give it up, when nobody is at work on a slot any more; with `remove` nothing stays."""
        self.pool.close(remove)
        self._release()
        self._unlock(remove)
        if remove:
            marks = SuspectMarks(self.job.path)
            marks.remove(marks.all())
            self.job.remove_orphans()
            self.job.remove_if_unused()

    def let_go(self) -> None:
        """Give it up before anything was put there: what was found stays, and nothing else."""
        self.pool.close(remove=False)
        self._release()
        self._unlock()
        self.job.remove_if_unused()

    def _release(self) -> None:
        if self._claims is not None:
            self._claims.release()

    def _unlock(self, remove: bool = True) -> None:
        if remove:
            self.job.lock_path(self._rank).unlink(missing_ok=True)
        self.job.unlock_rank(self._lock_fd)


__all__ = ["NodeResources"]
