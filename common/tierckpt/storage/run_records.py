"""Records of runs at one place of a job: a file for each run, in the folder `runs`.

They stay when retention has removed the run's versions, so the history is longer than what is left
of it. Of very many, the newest are kept.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.run_record import RunRecord

from .files import durable
from .notes import Notes, Place
from .persistent import PersistentStore

FOLDER = "runs"
KIND = "run"
MOST_KEPT = 512
"""Limit of the records at a place, some 700 bytes each."""


class RunRecords:
    """The records of one place. One thread. Methods raise OSError and PersistentError."""

    def __init__(self, place: Place) -> None:
        """A directory, or a store, which stays the caller's."""
        self._folder = None if isinstance(place, PersistentStore) else Path(place) / FOLDER
        self._notes = Notes(place)

    def add(self, record: RunRecord) -> None:
        """Write a record, and remove the oldest ones above the limit."""
        if self._folder is not None:
            durable.make_one(self._folder)
        name = f"g{record.generation:06d}.{record.run_id}.json"
        self._notes.write(f"{FOLDER}/{name}", KIND, record.to_json())
        for old in self._notes.names(FOLDER)[:-MOST_KEPT]:
            self._notes.remove(f"{FOLDER}/{old}")

    def all(self) -> list[RunRecord]:
        """The records that can be read, oldest first."""
        found = []
        for name in self._notes.names(FOLDER):
            with contextlib.suppress(
                CorruptShardError, FormatError, KeyError, TypeError, ValueError
            ):
                values = self._notes.read(f"{FOLDER}/{name}", KIND)
                found += [RunRecord.from_json(values)] if values else []
        return sorted(found, key=lambda each: (each.generation, each.started_seconds))


__all__ = ["RunRecords"]
