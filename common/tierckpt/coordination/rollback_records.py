"""Records of rollbacks, kept on every node of the job.

A node that was not there when a run went back gets the record at the next restart. So it is lost
only with all nodes and the persistent level.
"""

from __future__ import annotations

import contextlib
import logging

from tierckpt.config import Config
from tierckpt.core.rollback import Rollback
from tierckpt.storage.persistent import PersistentStore, RetryPolicy
from tierckpt.storage.rollbacks import RollbackFiles

from .job_history import JobHistory
from .reports import Reports


def keep_record(config: Config, rank: int, history: JobHistory, reports: Reports) -> None:
    """Store the record of the last run that went back at all places of this rank that lack it: the
    node's, and on rank 0 the persistent level. Not collective; a failure is reported."""
    hosts, record = history.nodes, history.rollback
    is_first = hosts.index(hosts[rank]) == rank
    persistent = config.persistent.path if rank == 0 else ""
    places = [config.directory] * is_first + [persistent] * bool(persistent)
    if record is None or history.keeps_record(len(places)):
        return
    for place in places:
        try:
            _store(place, record, config)
        except Exception as error:  # a client's own errors, too
            reports.notice(
                f"the rollback to v{record.version} could not be noted in {place}: {error}. A "
                "restart that sees no other place goes back once more while the request is still "
                "there: remove it. Without it, and before this run has a version, it goes on from "
                "a newer version",
                logging.WARNING,
            )


def _store(place: str, record: Rollback, config: Config) -> None:
    persistent = config.persistent
    if place != persistent.path:
        RollbackFiles(place).store(record)
        return
    few = RetryPolicy(tries=3)
    made = PersistentStore(persistent.path, retry=few, **persistent.options())
    with contextlib.closing(made) as store:
        store.create()
        RollbackFiles(store).store(record)


__all__ = ["keep_record"]
