"""Notes: small files of one place (see `marks.SmallFiles`) that are checksummed JSON records, each
with one writer at a time: of rollbacks, runs and forks.

Rollbacks (see `core.branches`): the request that `tierckpt rollback` leaves at a place, and the
record of a run that went back. They are two files with one writer each, so that a run that stores
its record never overwrites a newer request.

Runs, in the folder `runs`: a file for the start of each run, and one for its end. They stay
when retention has removed the run's versions, so the history is longer than what is left of it. Of
very many runs, the newest are kept.

Forks (see `core.branches`): the record of a job's origin, the marks at a source, and second names
of the source's files. A mark's name has the version, so that a remover needs the listing alone to
know which versions stay. A hold is a note by a rename: a kill leaves the one or the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from tierckpt._text import error_text
from tierckpt.core.branches import Child, Origin, Rollback, RollbackRequest
from tierckpt.errors import CorruptShardError, FormatError, TierckptError
from tierckpt.format.ids import (
    FORK,
    HOLD,
    MANIFEST,
    PIN,
    RETIRED,
    VersionId,
    fork_mark,
    parse_fork_mark,
)
from tierckpt.format.records import RunEnd, RunRecord, check_head, checked, head_of, with_check
from tierckpt.storage.marks import LocalPins, Place, SmallFiles, locked_place

from . import durable

__all__ = [
    "ForkMarks",
    "FoundRuns",
    "KeptFiles",
    "Notes",
    "OriginFile",
    "Place",
    "RollbackFiles",
    "Rollbacks",
    "RunRecords",
    "is_kept",
    "remove_fork_notes",
]


class Notes(SmallFiles):
    """The notes of one place. `read` also raises CorruptShardError and FormatError."""

    def read(self, name: str, kind: str) -> dict[str, Any] | None:
        """The values of a note; None without one."""
        try:
            data = self.get(name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            values = json.loads(checked(data, f"file {name}"))
            check_head(values, kind, f"file {name}")
        except (CorruptShardError, FormatError) as error:
            raise type(error)(f"{self.where}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{self.where}/{name} cannot be read: {error_text(error)}") from error
        return dict(values)

    def write(self, name: str, kind: str, values: Mapping[str, Any]) -> None:
        """Write a note, in place of an earlier one; durable at return."""
        self.put(name, with_check(json.dumps({**head_of(kind), **values}).encode()))


ROLLBACK_REQUEST, ROLLBACK_RECORD = "rollback-request.json", "rollback.json"
ROLLBACK_KIND = "rollback"

Rollbacks = tuple[tuple[RollbackRequest, ...], tuple[Rollback, ...], tuple[Exception, ...]]
"""Requests and records of one place, at most one of each; and the errors of unreadable ones."""


class RollbackFiles:
    """The two files of one directory, or of a persistent level. One thread. Methods raise OSError
    and PersistentError; those that read also CorruptShardError and FormatError."""

    def __init__(self, place: Place) -> None:
        """A directory, or a store, which stays the caller's."""
        self._notes = Notes(place)

    @property
    def where(self) -> str:
        """The place, for messages."""
        return self._notes.where

    def all(self) -> Rollbacks:
        """The request and the record, as far as they exist and are readable. A damaged request
        does not hide the record. Raises nothing but a client's own errors."""
        errors: list[Exception] = []
        request = record = None
        try:
            request = self.request()
        except (OSError, TierckptError) as error:
            errors.append(error)
        try:
            record = self.record()
        except (OSError, TierckptError) as error:
            errors.append(error)
        return (request,) if request else (), (record,) if record else (), tuple(errors)

    def request(self) -> RollbackRequest | None:
        """The request that `ask` wrote; None without one."""
        values = self._notes.read(ROLLBACK_REQUEST, ROLLBACK_KIND)
        if values is None:
            return None
        try:
            return RollbackRequest(int(values["version"]), str(values["name"]), self.where)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{self.where}/{ROLLBACK_REQUEST} is no request: {error_text(error)}"
            ) from error

    def record(self) -> Rollback | None:
        """The record that `store` wrote; None without one."""
        values = self._notes.read(ROLLBACK_RECORD, ROLLBACK_KIND)
        if values is None:
            return None
        try:
            honoured = tuple(map(str, values["honoured"]))
            return Rollback(int(values["generation"]), int(values["version"]), honoured)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{self.where}/{ROLLBACK_RECORD} is no record: {error_text(error)}"
            ) from error

    def ask(self, request: RollbackRequest) -> None:
        """Write a request, in place of an earlier one; durable at return."""
        self._notes.write(
            ROLLBACK_REQUEST, ROLLBACK_KIND, {"version": request.version, "name": request.name}
        )

    def cancel(self) -> None:
        """Remove the request, if there is one."""
        self._notes.remove(ROLLBACK_REQUEST)

    def store(self, record: Rollback) -> None:
        """Write the record of a run, unless it is there, durable at return; then remove the request
        if the record has its name. A damaged one is replaced."""
        with contextlib.suppress(CorruptShardError, FormatError):
            there = self.record()
            if there is not None and (there == record or there.entry > record.entry):
                self._remove_honoured(record)
                return
        values = {"generation": record.generation, "version": record.version}
        self._notes.write(ROLLBACK_RECORD, ROLLBACK_KIND, {**values, "honoured": record.honoured})
        self._remove_honoured(record)

    def _remove_honoured(self, record: Rollback) -> None:
        request = self.request()
        if request is not None and request.name in record.honoured:
            self.cancel()


RUNS_FOLDER = "runs"
RUN_KIND, RUN_END_KIND = "run", "run-end"
RUN_SUFFIX, RUN_END_SUFFIX = ".json", ".end.json"
MAX_RUNS = 512
"""Limit of the runs at a place, some 1000 bytes each."""


class FoundRuns(Struct):
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
        self._folder = Path(place) / RUNS_FOLDER if isinstance(place, str | os.PathLike) else None
        self._notes = Notes(place)

    def add(self, record: RunRecord) -> None:
        """Write a record, and remove those of the oldest runs above the limit."""
        if self._folder is not None:
            durable.make_one(self._folder)
        self._notes.write(f"{_run_stem(record)}{RUN_SUFFIX}", RUN_KIND, record.to_json())
        names = self._notes.names(RUNS_FOLDER)
        runs = [name for name in names if not name.endswith(RUN_END_SUFFIX)][:-MAX_RUNS]
        old = {name.removesuffix(RUN_SUFFIX) for name in runs}
        for name in names:
            if name.removesuffix(RUN_END_SUFFIX).removesuffix(RUN_SUFFIX) in old:
                self._notes.remove(f"{RUNS_FOLDER}/{name}")

    def add_end(self, record: RunRecord, end: RunEnd) -> None:
        """Write the end of a run, unless another rank has: the first error is the cause of the
        others."""
        name = f"{_run_stem(record)}{RUN_END_SUFFIX}"
        if self._folder is not None:
            durable.make_one(self._folder)
            if (self._folder.parent / name).exists():
                return
        self._notes.write(name, RUN_END_KIND, end.to_json())

    def names(self) -> set[str]:
        """Names of the runs with a record at the place; no record is read."""
        stems = (name.removesuffix(RUN_SUFFIX) for name in self._notes.names(RUNS_FOLDER))
        return {stem.partition(".")[2] for stem in stems if not stem.endswith(".end")}

    def end_of(self, run_id: str) -> RunEnd | None:
        """The end of one run, if it has been noted. Raises the errors of a record that cannot be
        read, too."""
        for name in self._notes.names(RUNS_FOLDER):
            if name.endswith(f".{run_id}{RUN_END_SUFFIX}"):
                values = self._notes.read(f"{RUNS_FOLDER}/{name}", RUN_END_KIND)
                return RunEnd.from_json(values) if values else None
        return None

    def all(self) -> FoundRuns:
        """All records at the place."""
        found = FoundRuns()
        for name in self._notes.names(RUNS_FOLDER):
            is_end = name.endswith(RUN_END_SUFFIX)
            try:
                values = self._notes.read(
                    f"{RUNS_FOLDER}/{name}", RUN_END_KIND if is_end else RUN_KIND
                )
                self._read(values or {}, is_end, found)
            except (CorruptShardError, FormatError) as error:
                found.troubles.append(f"the record of a run: {error}")
            except (KeyError, TypeError, ValueError) as error:
                where = f"{self._notes.where}/{RUNS_FOLDER}/{name}"
                found.troubles.append(f"the record of a run, {where}: {error_text(error)}")
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


def _run_stem(record: RunRecord) -> str:
    return f"{RUNS_FOLDER}/g{record.generation:06d}.{record.run_id}"


ORIGIN, KEPT = "fork.json", ".kept"
_NOT_KEPT = (HOLD, FORK, PIN, RETIRED)
FORK_KIND = "fork"


class OriginFile:
    """The record of the origin at one place of a job. One thread. Methods raise OSError and
    PersistentError."""

    def __init__(self, place: Place) -> None:
        """A directory, or a store, which stays the caller's."""
        self._notes = Notes(place)

    def read(self) -> Origin | None:
        """The record; None without one. Also raises CorruptShardError and FormatError."""
        values = self._notes.read(ORIGIN, FORK_KIND)
        if values is None:
            return None
        try:
            return Origin.from_json(values)
        except (KeyError, TypeError, ValueError) as error:
            where = f"{self._notes.where}/{ORIGIN}"
            raise FormatError(f"{where} is no record of a fork: {error_text(error)}") from error

    def write(self, origin: Origin) -> None:
        """Write the record, in place of an earlier one; durable at return."""
        self._notes.write(ORIGIN, FORK_KIND, origin.to_json())

    def remove(self) -> None:
        """Remove the record, if it is there."""
        self._notes.remove(ORIGIN)


class ForkMarks:
    """The marks of forks at one place of their source. Any thread or process. Methods raise OSError
    and PersistentError."""

    def __init__(self, place: Place) -> None:
        """A directory, or a store, which stays the caller's."""
        self._store = None if isinstance(place, str | os.PathLike) else place
        self._folder = Path(place) if isinstance(place, str | os.PathLike) else Path()
        self._notes = Notes(place)

    def all(self) -> list[Child]:
        """The marks that can be read, oldest first; of an unreadable one, the name alone."""
        found = []
        for name in self._notes.names():
            if (mark := parse_fork_mark(name)) is None:
                continue
            id_, fork, held = mark
            path, host, since = "", "", 0.0
            with contextlib.suppress(CorruptShardError, FormatError, KeyError, ValueError):
                values = self._notes.read(name, FORK_KIND)
                if values is None:
                    continue  # removed after the listing
                path, host = str(values["path"]), str(values["host"])
                since = float(values["since_seconds"])
            found.append(Child(id_, fork, path, host, since, held, self._notes.where))
        return sorted(found, key=lambda each: (each.since_seconds, each.name))

    def add(self, child: Child) -> bool:
        """Set a mark. Returns whether this place has the version, or a part of it, afterwards: if
        so, retention leaves it there as long as the mark is a hold."""
        values = {"path": child.path, "host": child.host, "since_seconds": child.since_seconds}
        name = fork_mark(child.id, child.name, child.held)
        self._notes.remove(fork_mark(child.id, child.name, not child.held))  # of the same fork
        if self._store is not None:
            self._notes.write(name, FORK_KIND, values)
            there = any(each.id == child.id for each in self._store.versions())
            retired = any(each.id == child.id for each in self._store.retired())
            return there and not retired
        with locked_place(self._folder):
            self._notes.write(name, FORK_KIND, values)
            return child.id in LocalPins(self._folder).versions()

    def release(self, id_: VersionId, fork: str) -> bool:
        """Turn a hold into a note. Returns whether there was one."""
        held, note = fork_mark(id_, fork, True), fork_mark(id_, fork, False)
        if self._store is None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.rename(self._folder / held, self._folder / note)
                return True
            return False
        values = self._notes.read(held, FORK_KIND)
        if values is None:
            return False
        self._notes.write(
            note, FORK_KIND, {k: values[k] for k in ("path", "host", "since_seconds")}
        )
        self._notes.remove(held)
        return True

    def remove(self, id_: VersionId, fork: str) -> None:
        """Remove a mark of either kind, if it is there."""
        for held in (True, False):
            self._notes.remove(fork_mark(id_, fork, held))


class KeptFiles:
    """Second names (hard links) of the files of a source's version, in a folder of the fork: the
    version is there as long as the fork needs it, also if the source is deleted. A store never
    writes to a file with several names. One thread. Methods raise OSError."""

    def __init__(self, place: str | os.PathLike[str], fork: str) -> None:
        """The directory of the fork's local or persistent level; the name of the fork."""
        self.folder = Path(place) / f"{fork}{KEPT}"

    def link(self, source: str, id_: VersionId) -> None:
        """Link the files that a place of the source has of a version. Those that are linked already
        stay. An error leaves a part, without a manifest of what is missing."""
        stem, folder = f"{id_.stem}.", Path(source)
        names = [n for n in os.listdir(folder) if n.startswith(stem) and not n.endswith(_NOT_KEPT)]
        if not names:
            raise FileNotFoundError(f"{source} has no files of {id_}")
        durable.make(self.folder)
        try:
            for name in sorted(names, key=lambda each: (each.endswith(MANIFEST), each)):
                _link(folder / name, self.folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # if it is empty
            raise
        durable.sync(self.folder)

    @staticmethod
    def all_in(place: str | os.PathLike[str]) -> list[Path]:
        """All such folders of the directory, also one that a killed start left."""
        with contextlib.suppress(FileNotFoundError):
            return [each for each in Path(place).iterdir() if is_kept(each)]
        return []

    @staticmethod
    def remove_all(place: str | os.PathLike[str]) -> None:
        """Remove these folders."""
        for each in KeptFiles.all_in(place):
            shutil.rmtree(each)


def _link(path: Path, target: Path) -> None:
    if path.is_dir():
        target.mkdir(exist_ok=True)
        for name in os.listdir(path):
            _link(path / name, target / name)
        durable.sync(target)
        return
    with contextlib.suppress(FileExistsError):
        os.link(path, target)


def remove_fork_notes(folder: str | os.PathLike[str]) -> None:
    """Remove record and marks from the folder of a job in memory, which goes away."""
    with contextlib.suppress(OSError):
        for name in Notes(folder).names():
            if name == ORIGIN or parse_fork_mark(name) is not None:
                (Path(folder) / name).unlink(missing_ok=True)


def is_kept(place: str | os.PathLike[str]) -> bool:
    """Whether a directory is the folder of a `KeptFiles`."""
    return os.fspath(place).rstrip("/").endswith(KEPT)
