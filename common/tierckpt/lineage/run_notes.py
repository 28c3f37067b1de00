"""Notes about the runs of this job, for `tierckpt log` (see `format.run_record`)."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time

from tierckpt._text import is_url
from tierckpt.config import Config
from tierckpt.coordination.reports import Reports
from tierckpt.coordination.settings_check import JobTopology
from tierckpt.core.levels import LOCAL, PERSISTENT
from tierckpt.format.ids import VersionId
from tierckpt.format.run_record import RunEnd, RunRecord
from tierckpt.group import Group
from tierckpt.storage.files import answers
from tierckpt.storage.persistent import PersistentStore, RetryPolicy
from tierckpt.storage.run_records import RunRecords

from .annotations import end_reason, facts_here

CLOSE_SECONDS = 2.0
"""Time that the end of the job waits for a record on its way to a slow place."""
ERROR_SECONDS = 0.5
"""The same after an error: a restart waits for the end of this process."""


class RunNotes:
    """Writes a record when a run begins, and when it ends: on the local level of each node, and on
    rank 0 to the persistent level. A thread does it, so that no start waits for a disk. Training
    thread.

    After an error any rank writes, the first one for all of its node, and only to the local level:
    the restart must not wait for a store."""

    def __init__(
        self, config: Config, group: Group, topology: JobTopology, reports: Reports
    ) -> None:
        """Nothing is written yet."""
        node = topology.node(group.rank)
        self._config, self._reports, self._rank = config, reports, group.rank
        self._ranks, self._nodes = group.size, node.count
        self._is_first = node.first == group.rank
        self._record: RunRecord | None = None
        self._threads: list[threading.Thread] = []
        self._close_seconds = CLOSE_SECONDS
        self.began: VersionId | None = None
        """The version of this job that the run restores; None: it begins without one."""
        self.fork = ""
        """The version of another job that the run begins from; empty: none."""

    def write(self, run_id: str, generation: int) -> None:
        """Note that a run began. Raises nothing: a failure is reported."""
        if not (self._config.run_records and (self._config.uses(LOCAL) or self._far)):
            return
        self._record = RunRecord(
            run_id=run_id,
            generation=generation,
            began=self.began,
            fork=_whole(self.fork),
            started_seconds=time.time(),
            ranks=self._ranks,
            nodes=self._nodes,
            best=self._config.best,
            events=_whole(self._config.events_dir),
            traces=_whole(self._config.trace_dir),
            persistent=self._config.persistent.path if self._config.uses(PERSISTENT) else "",
            **facts_here(self._config.node),
        )
        self._begin(None, self._config.uses(LOCAL) and self._is_first, self._far)

    def end(self, asked: str, abandoned: bool, version: int) -> None:
        """Note that the run ends, and how; only once, and only if its beginning was noted. Raises
        nothing. For `asked` and `abandoned` see `end_reason`."""
        if self._record is None:
            return
        reason, failed = end_reason(asked, abandoned)
        end = RunEnd(self._record.run_id, time.time(), reason, self._rank, failed, version)
        local = self._config.uses(LOCAL) and (self._is_first or failed)
        self._begin(end, local, self._far and not (failed and local))
        self._record = None
        self._close_seconds = ERROR_SECONDS if failed else CLOSE_SECONDS

    @property
    def _far(self) -> bool:
        return self._config.uses(PERSISTENT) and self._rank == 0

    def _begin(self, end: RunEnd | None, local: bool, far: bool) -> None:
        if self._record is None or not (local or far):
            return
        self._threads = [each for each in self._threads if each.is_alive()]
        thread = threading.Thread(
            target=self._write,
            args=(self._record, end, local, far, [*self._threads]),
            name="tierckpt-run-record",
            daemon=True,
        )
        with contextlib.suppress(RuntimeError):  # the limit of threads: the training matters more
            thread.start()
            self._threads.append(thread)

    def _write(
        self,
        record: RunRecord,
        end: RunEnd | None,
        local: bool,
        far: bool,
        earlier: list[threading.Thread],
    ) -> None:
        for each in earlier:
            each.join()
        try:
            if local:
                answers.ensure(self._config.directory, CLOSE_SECONDS)
                _add(RunRecords(self._config.directory), record, end)
            if far:
                place, few = self._config.persistent, RetryPolicy(tries=3)
                answers.ensure(place.path, CLOSE_SECONDS)
                made = PersistentStore(place.path, retry=few, **place.options())
                with contextlib.closing(made) as store:
                    store.create()
                    _add(RunRecords(store), record, end)
        except Exception as error:  # a client's own errors, too
            what = "end" if end else "record"
            text = (
                f"the {what} of this run could not be noted, and `tierckpt log` lacks it: {error}"
            )
            self._reports.notice_later(text, logging.INFO)

    def close(self) -> None:
        """Wait a little for records on their way."""
        for thread in self._threads:
            thread.join(self._close_seconds)


def _whole(source: str) -> str:
    """A source, perhaps with its version, as an absolute path; a URL as it is."""
    return os.path.abspath(source) if source and not is_url(source) else source


def _add(there: RunRecords, record: RunRecord, end: RunEnd | None) -> None:
    if end is None:
        there.add(record)
    else:
        there.add_end(record, end)


__all__ = ["RunNotes"]
