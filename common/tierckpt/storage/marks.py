"""Marks beside versions, on each level separately: pins and suspects.

A pin keeps a version from being removed by retention, until the pin is removed. It names a version
by its number, so versions of earlier runs with the same number are pinned with it (`pinning` has
the user's functions). A remover of a local version looks for its mark and then removes the
version, under a lock. A user who pins a version sets the mark and then looks whether the version
still exists, under the same lock. So an accepted pin holds.

A suspect is a version that was, or may have been, taken while replicas differed. A version with a
manifest that says so (`VersionFacts.suspect`) needs no mark: it was taken after the difference had
been found. Versions between the last round in which all replicas were the same and that moment get
a mark. Its content describes the difference.

Imports little: the agent copies marks to the persistent level, and removes those of versions that
it retires.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.core.restore_plan import Pin
from tierckpt.errors import PinError
from tierckpt.format.ids import VersionId, VersionName, held_by_forks
from tierckpt.format.manifest import Manifest
from tierckpt.storage import durable

from .local import LocalStore

if TYPE_CHECKING:
    from .persistent import PersistentStore

__all__ = [
    "NewPins",
    "PersistentPins",
    "SuspectMarks",
    "local_suspicion",
    "persistent_suspects",
    "text_of",
]


_PIN_MARK = re.compile(r"v(\d{10,})\.g(\d{6,})\.pin")
_EVERYWHERE = "everywhere\n"
"""Content of a local mark, copied to the persistent level with the version."""


class LocalPins:
    """Pins of one node. Any thread or process. Methods raise OSError."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._store = LocalStore(directory)

    @property
    def directory(self) -> Path:
        """The pins of this node's local level."""
        return self._store.directory

    def versions(self) -> set[VersionId]:
        """The versions here, complete or in part; empty if the directory is missing."""
        keys = [*self._store.keys(), *self._store.parities()]
        return {key.id for key in keys}

    def named(self, number: int) -> set[VersionId]:
        """Versions with that number that exist here or are pinned."""
        return {v for v in self.versions() | self.pinned() if v.version == number}

    def pinned(self) -> set[VersionId]:
        """Versions with a mark."""
        with contextlib.suppress(FileNotFoundError):
            found = map(_PIN_MARK.fullmatch, os.listdir(self._store.directory))
            return {VersionId(int(m[2]), int(m[1])) for m in found if m is not None}
        return set()

    def held(self) -> set[VersionId]:
        """Versions that forks need, see `storage.notes`: they stay as pinned ones do."""
        with contextlib.suppress(FileNotFoundError):
            return held_by_forks(os.listdir(self._store.directory))
        return set()

    def pins(self) -> tuple[Pin, ...]:
        """All marks, with the content of each."""
        return tuple(Pin(version, self.everywhere(version)) for version in sorted(self.pinned()))

    def pin(self, versions: Iterable[VersionId], everywhere: bool = False) -> set[VersionId]:
        """Mark these versions; returns those that exist here. A mark of a version elsewhere does no
        harm.

        With `everywhere`, copies that reach the persistent level later are pinned there, too.
        """
        if not (versions := set(versions)):
            return set()  # and no directory is created for the mark
        self._store.create()
        with locked_place(self._store.directory):
            for version in versions:
                self._set(self._mark(version), everywhere)
            self._store.sync_directory()
            return self.versions() & versions

    def _set(self, mark: Path, everywhere: bool) -> None:
        if mark.exists() and not everywhere:
            return
        if everywhere and not os.access(mark, os.W_OK):  # another user's mark: replace it
            mark.unlink(missing_ok=True)
        with mark.open("w") as file:
            durable.share(file.fileno(), self._store.directory)
            file.write(_EVERYWHERE if everywhere else "")

    def unpin(self, versions: Iterable[VersionId]) -> set[VersionId]:
        """Remove marks; returns the versions that had one."""
        there = self.pinned() & set(versions)
        for version in there:
            self._mark(version).unlink(missing_ok=True)
        return there

    def everywhere(self, version: VersionId) -> bool:
        """Whether the version has a mark that also applies to the persistent level."""
        with contextlib.suppress(FileNotFoundError):
            return self._mark(version).read_text() == _EVERYWHERE
        return False

    @contextlib.contextmanager
    def spared(self, version: VersionId) -> Iterator[bool]:
        """Whether the version is pinned or held; this does not change while the context is
        open."""
        with locked_place(self._store.directory):
            yield self._mark(version).exists() or version in self.held()

    def _mark(self, version: VersionId) -> Path:
        return self._store.directory / f"{version.stem}.pin"


@contextlib.contextmanager
def locked_place(directory: Path) -> Iterator[None]:
    """Lock for one thread of one process at a time, if the file system can lock a directory. (NFS
    cannot: a pin set in the very moment of a removal may be too late there.)"""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


_SUSPECT_MARK = re.compile(r"v(\d{10,})\.g(\d{6,})\.suspect")
MAX_BYTES = 4096
"""Limit of a mark's text."""


class SuspectMarks:
    """Marks in one folder: a node's local level, or the job's in memory. Any thread or process.
    Methods raise OSError."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def all(self) -> dict[VersionId, str]:
        """The marked versions with the text of each mark; empty if the folder is missing."""
        found: dict[VersionId, str] = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for match in filter(None, map(_SUSPECT_MARK.fullmatch, os.listdir(self.folder))):
                id_ = VersionId(int(match[2]), int(match[1]))
                with contextlib.suppress(FileNotFoundError):
                    found[id_] = text_of((self.folder / match[0]).read_bytes())
        return found

    def add(self, ids: Iterable[VersionId], text: str) -> None:
        """Mark these versions, whether they exist yet or not; nothing if the folder is missing."""
        if not self.folder.is_dir():
            return
        for id_ in ids:
            temp = self.folder / f".{_name(id_)}.{os.getpid()}"
            temp.write_bytes(_bytes_of(text))
            temp.replace(self.folder / _name(id_))

    def remove(self, ids: Iterable[VersionId]) -> None:
        """Remove the marks of these versions, if any."""
        for id_ in ids:
            (self.folder / _name(id_)).unlink(missing_ok=True)


def _name(id_: VersionId) -> str:
    return f"{id_.stem}.suspect"


def _bytes_of(text: str) -> bytes:
    return text.encode()[:MAX_BYTES]


def text_of(content: bytes) -> str:
    """Text of a mark."""
    return content[:MAX_BYTES].decode(errors="replace").strip() or "replicas differ"


def local_suspicion(directory: str | os.PathLike[str], id_: VersionId) -> str:
    """Why a version on a node's local level is suspect, by its mark or its manifest; empty if it is
    not. Raises OSError."""
    if text := SuspectMarks(directory).all().get(id_):
        return text
    store = LocalStore(directory)
    keys = store.keys()
    for key in keys:
        if key.id == id_:
            with contextlib.suppress(Exception):  # damage is reported elsewhere
                return Manifest.decode(store.read_manifest(key)).facts.suspect
    return ""


def persistent_suspects(store: PersistentStore) -> dict[VersionName, str]:
    """The marked versions of the persistent level, with the text of each mark."""
    found = {}
    for name in store.suspects():
        with contextlib.suppress(FileNotFoundError):  # retired after the listing
            found[name] = text_of(store.suspicion(name))
    return found


class PersistentPins:
    """Pins of the persistent level. One thread. Methods raise PersistentError and OSError."""

    def __init__(self, store: PersistentStore) -> None:
        self._store = store

    def versions(self) -> set[VersionName]:
        """Versions that exist."""
        return set(self._store.versions())

    def named(self, number: int) -> set[VersionName]:
        """Versions with that number that exist or are pinned."""
        return {v for v in self.versions() | self.pinned() if v.id.version == number}

    def pinned(self) -> set[VersionName]:
        """Versions with a mark."""
        return set(self._store.pinned())

    def pin(self, versions: Iterable[VersionName]) -> set[VersionName]:
        """Mark versions; returns those that exist, and stay."""
        done = set()
        for version in versions:
            with contextlib.suppress(FileNotFoundError):
                self._store.pin(version)
                done.add(version)
        return done

    def unpin(self, versions: Iterable[VersionName]) -> set[VersionName]:
        """Remove marks; returns the versions that had one."""
        there = self.pinned() & set(versions)
        for version in there:
            self._store.unpin(version)
        return there


class NewPins:
    """Versions new on the persistent level, to be pinned there if their local mark says so, and
    marked as suspect if they are. One thread.

    A user who pins a version sets the local mark first and then looks on the persistent level; here
    the version exists there first, and then its local mark is read. So one of the two finds the
    other.
    """

    def __init__(self) -> None:
        self._unseen: list[tuple[LocalPins, VersionName]] = []
        """Versions still to be processed, oldest first."""

    def add(self, directory: str, name: VersionName) -> None:
        """Add a complete version; `directory` is its local level."""
        self._unseen.append((LocalPins(directory), name))

    def pin(self, store: PersistentStore) -> None:
        """Process all added versions. Raises PinError if one fails: nothing may be removed from the
        persistent level before a later call succeeds."""
        while self._unseen:
            local, name = self._unseen[0]
            try:
                _pin_as(local, name, store)
            except OSError as error:
                raise PinError(
                    f"v{name.id.version} could not be pinned as on the local level: {error}"
                ) from error
            self._unseen.pop(0)


def _pin_as(local: LocalPins, name: VersionName, store: PersistentStore) -> None:
    if text := local_suspicion(local.directory, name.id):
        store.mark_suspect(name, text.encode())
    if local.everywhere(name.id):
        PersistentPins(store).pin([name])
        if not local.everywhere(name.id):  # unpinned before it came here
            store.unpin(name)
