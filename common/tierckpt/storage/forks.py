"""Files of forks (see `core.fork`): the record of a job's origin, the marks at a source, and second
names of the source's files.

All lie in the directory of a node's local level, or at the root of the persistent level. A mark's
name has the version, so that a remover needs the listing alone to know which versions stay. A hold
is a note by a rename: a kill leaves the one or the other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from tierckpt._text import in_words
from tierckpt.core.fork import Child, Origin
from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.ids import VersionId
from tierckpt.format.version_names import (
    FORK,
    HOLD,
    MANIFEST,
    PIN,
    RETIRED,
    fork_mark,
    parse_fork_mark,
)
from tierckpt.storage.files import durable
from tierckpt.storage.local.pins import LocalPins, locked

from .notes import Notes, Place
from .persistent import PersistentStore

ORIGIN, KEPT = "fork.json", ".kept"
_NOT_KEPT = (HOLD, FORK, PIN, RETIRED)
KIND = "fork"


class OriginFile:
    """The record of the origin at one place of a job. One thread. Methods raise OSError and
    PersistentError."""

    def __init__(self, place: Place) -> None:
        """A directory, or a store, which stays the caller's."""
        self._notes = Notes(place)

    def read(self) -> Origin | None:
        """The record; None without one. Also raises CorruptShardError and FormatError."""
        values = self._notes.read(ORIGIN, KIND)
        if values is None:
            return None
        try:
            return Origin.from_json(values)
        except (KeyError, TypeError, ValueError) as error:
            where = f"{self._notes.where}/{ORIGIN}"
            raise FormatError(f"{where} is no record of a fork: {in_words(error)}") from error

    def write(self, origin: Origin) -> None:
        """Write the record, in place of an earlier one; durable at return."""
        self._notes.write(ORIGIN, KIND, origin.to_json())

    def remove(self) -> None:
        """Remove the record, if it is there."""
        self._notes.remove(ORIGIN)


class ForkMarks:
    """The marks of forks at one place of their source. Any thread or process. Methods raise OSError
    and PersistentError."""

    def __init__(self, place: Place) -> None:
        """A directory, or a store, which stays the caller's."""
        self._store = place if isinstance(place, PersistentStore) else None
        self._folder = Path() if isinstance(place, PersistentStore) else Path(place)
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
                values = self._notes.read(name, KIND)
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
            self._notes.write(name, KIND, values)
            there = any(each.id == child.id for each in self._store.versions())
            retired = any(each.id == child.id for each in self._store.retired())
            return there and not retired
        with locked(self._folder):
            self._notes.write(name, KIND, values)
            return child.id in LocalPins(self._folder).versions()

    def release(self, id_: VersionId, fork: str) -> bool:
        """Turn a hold into a note. Returns whether there was one."""
        held, note = fork_mark(id_, fork, True), fork_mark(id_, fork, False)
        if self._store is None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.rename(self._folder / held, self._folder / note)
                return True
            return False
        values = self._notes.read(held, KIND)
        if values is None:
            return False
        self._notes.write(note, KIND, {k: values[k] for k in ("path", "host", "since_seconds")})
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
    def remove_all(place: str | os.PathLike[str]) -> None:
        """Remove all such folders of the directory, also one that a killed start left."""
        with contextlib.suppress(FileNotFoundError):
            for each in [each for each in Path(place).iterdir() if is_kept(each)]:
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


__all__ = ["ForkMarks", "KeptFiles", "OriginFile", "is_kept", "remove_fork_notes"]
