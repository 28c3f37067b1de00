"""Notes about the runs of this job, for `tierckpt log` (see `format.run_record`)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from tierckpt.config import Config
from tierckpt.coordination.reports import Reports
from tierckpt.coordination.settings_check import JobTopology
from tierckpt.core.levels import LOCAL, PERSISTENT
from tierckpt.format.ids import VersionId
from tierckpt.format.run_record import RunRecord
from tierckpt.group import Group
from tierckpt.storage.persistent import PersistentStore, RetryPolicy
from tierckpt.storage.run_records import RunRecords

from .annotations import facts_here

CLOSE_SECONDS = 2.0
"""Time that the end of the job waits for a record on its way to a slow place."""


class RunNotes:
    """Writes a record when a run begins: on the local level of each node, and on rank 0 to the
    persistent level. A thread does it, so that no start waits for a disk. Training thread."""

    def __init__(
        self, config: Config, group: Group, topology: JobTopology, reports: Reports
    ) -> None:
        """Nothing is written yet."""
        node = topology.node(group.rank)
        self._config, self._reports = config, reports
        self._ranks, self._nodes = group.size, node.count
        self._local = config.uses(LOCAL) and node.first == group.rank
        self._persistent = config.uses(PERSISTENT) and group.rank == 0
        self._threads: list[threading.Thread] = []
        self.began: VersionId | None = None
        """The version of this job that the run restores; None: it begins without one."""
        self.fork = ""
        """The version of another job that the run begins from; empty: none."""

    def write(self, run_id: str, generation: int) -> None:
        """Note that a run began. Raises nothing: a failure is reported."""
        if not (self._config.run_records and (self._local or self._persistent)):
            return
        record = RunRecord(
            run_id=run_id,
            generation=generation,
            began=self.began,
            fork=self.fork,
            started_seconds=time.time(),
            ranks=self._ranks,
            nodes=self._nodes,
            **facts_here(self._config.node),
        )
        thread = threading.Thread(
            target=self._write, args=(record,), name="tierckpt-run-record", daemon=True
        )
        self._threads = [each for each in self._threads if each.is_alive()]
        with contextlib.suppress(RuntimeError):  # the limit of threads: the training matters more
            thread.start()
            self._threads.append(thread)

    def _write(self, record: RunRecord) -> None:
        try:
            if self._local:
                RunRecords(self._config.directory).add(record)
            if self._persistent:
                place, few = self._config.persistent, RetryPolicy(tries=3)
                made = PersistentStore(place.path, retry=few, **place.options())
                with contextlib.closing(made) as store:
                    store.create()
                    RunRecords(store).add(record)
        except Exception as error:  # a client's own errors, too
            text = (
                f"the record of this run could not be written, and `tierckpt log` lacks it: {error}"
            )
            self._reports.notice_later(text, logging.INFO)

    def close(self) -> None:
        """Wait a little for records on their way."""
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)


__all__ = ["RunNotes"]
