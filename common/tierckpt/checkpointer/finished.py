"""Trainings that have finished: made their last step, and closed without an error or a halt.

A restart goes on where a run was killed or halted. From the end of a finished training it goes on
as well (with more epochs), but a second training that shares its path would take that end for its
own result. Two cases are certain, and refused: the start waited for that run and saw it finish
(`JobFinishedError`), or this process itself has finished it, and a model, an optimizer or a trainer
is another object now (a further fold, fine-tuning, a trial). In all other cases nobody can know,
and a run that makes no step says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from tierckpt import _milestones
from tierckpt.config import Config
from tierckpt.coordination.reports import Reports
from tierckpt.core.levels import LOCAL, PERSISTENT
from tierckpt.errors import RestoreError
from tierckpt.format.ids import VersionId
from tierckpt.format.run_record import TRAINING_END
from tierckpt.storage.memory.job_directory import JobDirectory
from tierckpt.storage.run_records import RunRecords

_ends: dict[tuple[str, int], tuple[int, VersionId, list[weakref.ref[Any]]]] = {}
"""By place and rank: the process, the last version, and the parts of the newest training that this
process has finished there."""


class Finished:
    """One rank's knowledge of finished trainings at its places. Training thread."""

    asked = False
    """The script asks for the newest version by an argument of its framework."""
    trains = False
    """The run is a training for certain, not a look at the result of one."""
    _began_at_end = False
    """The restored version is the last one of a run that has finished."""

    def __init__(
        self, config: Config, rank: int, job: JobDirectory, parts: Sequence[Any], reports: Reports
    ) -> None:
        """`parts`: the objects that go on together in a training; if all are the same again, it is
        the same training."""
        self.parts = parts
        self._config, self._rank, self._job, self._reports = config, rank, job, reports

    def _places(self) -> Iterator[tuple[str, int]]:
        if self._config.uses(LOCAL):
            yield os.path.realpath(self._config.directory), self._rank
        yield str(self._job.path), self._rank
        if self._config.uses(PERSISTENT):
            yield self._config.persistent.path, self._rank

    def refuse(self, found: VersionId) -> None:
        """Raise RestoreError if this process has finished a training with other parts there, and
        `found` would be its end."""
        for place in self._places():
            process, end, parts = _ends.get(place, (0, found, []))
            same = [id(ref()) for ref in parts] == [id(each) for each in self.parts]
            if process == os.getpid() and found.generation <= end.generation and not same:
                _milestones.reached(_milestones.REFUSED)
                raise RestoreError(
                    f"{place[0]} has the end of another training, v{end.version}: this process has "
                    "finished it, and made a model, an optimizer or a trainer since. This one "
                    "would take that end for its own, and make no step or too few",
                    "Give each training a path of its own (with fork_from=THAT PATH it begins with "
                    f"that end). To go on here: restore(version={found.version}), or the setting "
                    f"rollback_to={found.version}",
                )

    def began_with(self, run_id: str, version: int) -> None:
        """The run begins with this version of that run."""
        self._began_at_end = False
        if self._rank == 0 and self._config.uses(LOCAL):
            with contextlib.suppress(Exception):  # it is for a warning only
                end = RunRecords(self._config.directory).end_of(run_id)
                self._began_at_end = end is not None and (
                    (end.reason, end.version) == (TRAINING_END, version)
                )

    def closed(self, last: VersionId, steps: int) -> int | None:
        """The training has closed with this version, after so many steps of this run, and not
        because it was halted. Returns the version if it has finished by itself."""
        if sys.exc_info()[1] is not None:  # close() in a `finally`
            return None
        parts = [weakref.ref(each) for each in self.parts]
        _ends.update(dict.fromkeys(self._places(), (os.getpid(), last, parts)))
        if not steps and (self.trains or self._began_at_end):
            here = " where an earlier run has finished" if self._began_at_end else ""
            self._reports.notice_of_all(
                f"nothing is left to train: this run has made no step. It began with "
                f"v{last.version},{here or ' its last one'}. If it is to go on, raise its number "
                "of steps or epochs; another training needs another path",
                logging.WARNING,
            )
        return last.version if steps else None


__all__ = ["Finished"]
