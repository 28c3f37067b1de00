"""Pins: marks that keep versions from being removed by retention, until the marks are removed.

A mark lies beside the version, on each level separately: on every node's local disk, and on the
persistent level. It names a version by its number, so versions of earlier runs with the same number
are pinned with it (`pinning` has the user's functions).

A remover of a local version looks for its mark and then removes the version, under a lock. A user
who pins a version sets the mark and then looks whether the version still exists, under the same
lock. So an accepted pin holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tierckpt.core.copies import Pin
from tierckpt.format.ids import VersionId
from tierckpt.format.version_names import held_by_forks
from tierckpt.storage.files import durable

from .store import LocalStore

_MARK = re.compile(r"v(\d{10,})\.g(\d{6,})\.pin")
_EVERYWHERE = "everywhere\n"
"""Content of a local mark that is copied to the persistent level with the version."""


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
            found = map(_MARK.fullmatch, os.listdir(self._store.directory))
            return {VersionId(int(m[2]), int(m[1])) for m in found if m is not None}
        return set()

    def held(self) -> set[VersionId]:
        """Versions that forks need, see `storage.forks`: they stay as pinned ones do."""
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
        with locked(self._store.directory):
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
        with locked(self._store.directory):
            yield self._mark(version).exists() or version in self.held()

    def _mark(self, version: VersionId) -> Path:
        return self._store.directory / f"{version.stem}.pin"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock for one thread of one process at a time, if the file system can lock a directory. (NFS
    cannot: a pin that is set in the very moment of a removal may be too late there.)"""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
