"""Records of runs at one place of a job, in the folder `runs`: a file for the beginning of each
run, and one for its end.

They stay when retention has removed the run's versions, so the history is longer than what is left
of it. Of very many runs, the newest are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierckpt._text import in_words
from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.run_record import RunEnd, RunRecord

from .files import durable
from .notes import Notes, Place
from .persistent import PersistentStore

FOLDER = "runs"
KIND, END_KIND = "run", "run-end"
SUFFIX, END_SUFFIX = ".json", ".end.json"
MOST_KEPT = 512
"""Limit of the runs at a place, some 1000 bytes each."""


@dataclass
class FoundRuns:
    """The records at one place."""

    records: list[RunRecord] = field(default_factory=list)
    """Oldest first."""
    ends: dict[str, RunEnd] = field(default_factory=dict)
    """By the run's name."""
    troubles: list[str] = field(default_factory=list)
    """Records that cannot be read, with the reasons."""


class RunRecords:
    """The records of one place. One thread. Methods raise OSError and PersistentError."""

    def __init__(self, place: Place) -> None:
        """A directory, or a store, which stays the caller's."""
        self._folder = None if isinstance(place, PersistentStore) else Path(place) / FOLDER
        self._notes = Notes(place)

    def add(self, record: RunRecord) -> None:
        """Write a record, and remove those of the oldest runs above the limit."""
        if self._folder is not None:
            durable.make_one(self._folder)
        self._notes.write(f"{_stem(record)}{SUFFIX}", KIND, record.to_json())
        names = self._notes.names(FOLDER)
        runs = [name for name in names if not name.endswith(END_SUFFIX)][:-MOST_KEPT]
        old = {name.removesuffix(SUFFIX) for name in runs}
        for name in names:
            if name.removesuffix(END_SUFFIX).removesuffix(SUFFIX) in old:
                self._notes.remove(f"{FOLDER}/{name}")

    def add_end(self, record: RunRecord, end: RunEnd) -> None:
        """Write the end of a run, unless another rank has: the first error is the cause of the
        others."""
        name = f"{_stem(record)}{END_SUFFIX}"
        if self._folder is not None:
            durable.make_one(self._folder)
            if (self._folder.parent / name).exists():
                return
        self._notes.write(name, END_KIND, end.to_json())

    def names(self) -> set[str]:
        """Names of the runs with a record at the place; no record is read."""
        stems = (name.removesuffix(SUFFIX) for name in self._notes.names(FOLDER))
        return {stem.partition(".")[2] for stem in stems if not stem.endswith(".end")}

    def end_of(self, run_id: str) -> RunEnd | None:
        """The end of one run, if it has been noted. Raises the errors of a record that cannot be
        read, too."""
        for name in self._notes.names(FOLDER):
            if name.endswith(f".{run_id}{END_SUFFIX}"):
                values = self._notes.read(f"{FOLDER}/{name}", END_KIND)
                return RunEnd.from_json(values) if values else None
        return None

    def all(self) -> FoundRuns:
        """All records at the place."""
        found = FoundRuns()
        for name in self._notes.names(FOLDER):
            is_end = name.endswith(END_SUFFIX)
            try:
                values = self._notes.read(f"{FOLDER}/{name}", END_KIND if is_end else KIND)
                self._read(values or {}, is_end, found)
            except (CorruptShardError, FormatError) as error:
                found.troubles.append(f"the record of a run: {error}")
            except (KeyError, TypeError, ValueError) as error:
                where = f"{self._notes.where}/{FOLDER}/{name}"
                found.troubles.append(f"the record of a run, {where}: {in_words(error)}")
        found.records.sort(key=lambda each: (each.generation, each.started_seconds))
        return found

    @staticmethod
    def _read(values: dict[str, Any], is_end: bool, found: FoundRuns) -> None:
        if not values:  # removed since the listing
            return
        if is_end:
            end = RunEnd.from_json(values)
            found.ends[end.run_id] = end
        else:
            found.records.append(RunRecord.from_json(values))


def _stem(record: RunRecord) -> str:
    return f"{FOLDER}/g{record.generation:06d}.{record.run_id}"


__all__ = ["FoundRuns", "RunRecords"]
