"""Marks: small files beside versions, on each level separately, that say one thing about a version.

A mark's name has the version and the kind, its content is a short text. There are two kinds.

A pin keeps a version from being removed by retention, until the pin is removed. It names a version
by its number, so versions of earlier runs with the same number are pinned with it (`pinning` has
the user's functions). A remover of a local version looks for its mark and then removes the
version, under a lock. A user who pins a version sets the mark and then looks whether the version
still exists, under the same lock. So an accepted pin holds.

A suspect is a version that was, or may have been, taken while replicas differed. A version with a
manifest that says so (`VersionFacts.suspect`) needs no mark: it was taken after the difference had
been found. Versions between the last round in which all replicas were the same and that moment get
a mark. Its content describes the difference.

`notes` has what concerns a whole job, and forks. Both stand on `SmallFiles`.

Imports little: the agent copies marks to the persistent level, and removes those of versions that
it retires.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from tierckpt.core.restore_plan import Pin
from tierckpt.errors import PinError
from tierckpt.format.ids import PIN, SUSPECT, VersionId, VersionName, held_by_forks
from tierckpt.format.manifest import Manifest
from tierckpt.storage import durable

from .local import LocalStore

if TYPE_CHECKING:
    from .persistent import PersistentStore

__all__ = [
    "LocalPins",
    "Marks",
    "NewPins",
    "PersistentPins",
    "Place",
    "SmallFiles",
    "local_suspects",
    "local_suspicion",
    "locked_place",
    "persistent_suspects",
]


Place: TypeAlias = "str | os.PathLike[str] | PersistentStore"


class SmallFiles:
    """Small files at one place: the directory of a node's local level, the job's folder in memory,
    or the root of a persistent level. Each is replaced as a whole. One thread. Methods raise
    OSError and PersistentError."""

    def __init__(self, place: Place) -> None:
        """A directory, or a store, which stays the caller's."""
        self._place = Path(place) if isinstance(place, str | os.PathLike) else place

    @property
    def where(self) -> str:
        """The place, for messages."""
        return str(self._place) if isinstance(self._place, Path) else self._place.url

    def names(self, folder: str = "") -> list[str]:
        """Names of the files at the place, or in a folder there; empty if it is missing."""
        if not isinstance(self._place, Path):
            return sorted(n for n in self._place.backend.sizes(folder) if not n.endswith("/"))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(n for n in os.listdir(self._place / folder) if not n.startswith("."))
        return []

    def get(self, name: str) -> bytes:
        """The content of a file. Raises FileNotFoundError without it."""
        if not isinstance(self._place, Path):
            return self._place.backend.read(name)
        with durable.open_plain(self._place / name) as file:
            return file.read()

    def put(self, name: str, data: bytes) -> None:
        """Write a file, in place of an earlier one; durable at return."""
        if not isinstance(self._place, Path):
            self._place.put(name, data)
            return
        path = self._place / name
        with durable.replacing(path) as temp, temp.open("wb") as file:
            durable.share(file.fileno(), self._place)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            durable.sync(path.parent)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        if isinstance(self._place, Path):
            durable.remove(self._place / name)
        else:
            self._place.backend.delete(name)


V = TypeVar("V", VersionId, VersionName)
MAX_BYTES = 4096
"""Limit of a mark's text."""
_UNSAID = {PIN: "", SUSPECT: "replicas differ"}
"""What a mark without a text says."""


class Marks(Generic[V]):
    """Marks of one kind at one place. Versions are VersionIds in a directory, and VersionNames in a
    store. Methods raise OSError and PersistentError."""

    def __init__(self, place: Place, kind: str, parse: Callable[[str], V | None]) -> None:
        """`parse` reads the stem of a version's files; None for other names."""
        self._files, self._kind = SmallFiles(place), kind
        self._parse: Callable[[str], V | None] = parse

    def marked(self) -> set[V]:
        """The versions with a mark."""
        names = (n for n in self._files.names() if n.endswith(self._kind))
        found = (self._parse(name.removesuffix(self._kind)) for name in names)
        return {version for version in found if version is not None}

    def text(self, version: V) -> str:
        """What a version's mark says; empty without one."""
        with contextlib.suppress(FileNotFoundError):
            content = self._files.get(version.stem + self._kind)
            return content[:MAX_BYTES].decode(errors="replace").strip() or _UNSAID[self._kind]
        return ""

    def texts(self) -> dict[V, str]:
        """The versions with a mark that says something, and what."""
        found = {version: self.text(version) for version in self.marked()}
        return {version: text for version, text in found.items() if text}

    def mark(self, versions: Iterable[V], text: str = "") -> None:
        """Mark versions, whether they exist yet or not."""
        for version in versions:
            self._files.put(version.stem + self._kind, text.encode()[:MAX_BYTES])

    def unmark(self, versions: Iterable[V]) -> set[V]:
        """Remove marks; returns the versions that had one."""
        there = self.marked() & set(versions)
        for version in there:
            self._files.remove(version.stem + self._kind)
        return there


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


_EVERYWHERE = "everywhere"
"""Text of a local mark that is copied to the persistent level with the version."""


class LocalPins(Marks[VersionId]):
    """Pins of one node. Any thread or process. Methods raise OSError."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__(directory, PIN, VersionId.parse)
        self._store = LocalStore(directory)

    @property
    def directory(self) -> Path:
        """The directory of this node's local level."""
        return self._store.directory

    def versions(self) -> set[VersionId]:
        """The versions here, complete or in part; empty if the directory is missing."""
        keys = [*self._store.keys(), *self._store.parities()]
        return {key.id for key in keys}

    def named(self, number: int) -> set[VersionId]:
        """Versions with that number that exist here or are pinned."""
        return {v for v in self.versions() | self.marked() if v.version == number}

    def pins(self) -> tuple[Pin, ...]:
        """All marks, with the content of each."""
        return tuple(Pin(version, self.everywhere(version)) for version in sorted(self.marked()))

    def pin(self, versions: Iterable[VersionId], everywhere: bool = False) -> set[VersionId]:
        """Mark these versions; returns those that exist here. A mark of a version elsewhere does no
        harm.

        With `everywhere`, copies that reach the persistent level later are pinned there, too.
        """
        if not (versions := set(versions)):
            return set()  # and no directory is created for the mark
        self._store.create()
        with locked_place(self.directory):
            if everywhere:
                self.mark(versions, f"{_EVERYWHERE}\n")
            else:
                self.mark(versions - self.marked())
            return self.versions() & versions

    def everywhere(self, version: VersionId) -> bool:
        """Whether the version has a mark that also applies to the persistent level."""
        return self.text(version) == _EVERYWHERE

    @contextlib.contextmanager
    def spared(self, version: VersionId) -> Iterator[bool]:
        """Whether the version is pinned, or held by a fork (see `storage.notes`); this does not
        change while the context is open."""
        with locked_place(self.directory):
            names = self._files.names()
            yield version.stem + PIN in names or version in held_by_forks(names)


class PersistentPins(Marks[VersionName]):
    """Pins of the persistent level. One thread. Methods raise PersistentError and OSError."""

    def __init__(self, store: PersistentStore) -> None:
        super().__init__(store, PIN, VersionName.parse)
        self._store = store

    def versions(self) -> set[VersionName]:
        """Versions that exist."""
        return set(self._store.versions())

    def named(self, number: int) -> set[VersionName]:
        """Versions with that number that exist or are pinned."""
        return {v for v in self.versions() | self.marked() if v.id.version == number}

    def pin(self, versions: Iterable[VersionName]) -> set[VersionName]:
        """Mark versions; returns those that exist, and stay. Of others no mark is left."""
        self.mark(versions := set(versions))
        done = (versions & self.versions()) - set(self._store.retired())
        self.unmark(versions - done)
        return done


def local_suspects(folder: str | os.PathLike[str]) -> Marks[VersionId]:
    """Marks of suspects in one folder: a node's local level, or the job's in memory."""
    return Marks(folder, SUSPECT, VersionId.parse)


def persistent_suspects(store: PersistentStore) -> Marks[VersionName]:
    """Marks of suspects on the persistent level."""
    return Marks(store, SUSPECT, VersionName.parse)


def local_suspicion(directory: str | os.PathLike[str], id_: VersionId) -> str:
    """Why a version on a node's local level is suspect, by its mark or its manifest; empty if it is
    not. Raises OSError."""
    if text := local_suspects(directory).text(id_):
        return text
    store = LocalStore(directory)
    keys = store.keys()
    for key in keys:
        if key.id == id_:
            with contextlib.suppress(Exception):  # damage is reported elsewhere
                return Manifest.decode(store.read_manifest(key)).facts.suspect
    return ""


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
        persistent_suspects(store).mark([name], text)
    if local.everywhere(name.id):
        PersistentPins(store).pin([name])
        if not local.everywhere(name.id):  # unpinned before it came here
            PersistentPins(store).unmark([name])
