"""Pins: marks that say which versions retention must leave alone, until they are taken away.

A mark lies beside the version, on each level by itself: on every node's local disk, and on the
persistent level. A version is named by its number; what earlier runs left under the same number
is pinned with it (`pinning` has what users call).

Whoever removes a local version looks for its mark, and then removes, under a lock; whoever marks
one does that, and then looks whether it is still there, under the same lock. So a pin that was not
refused holds.
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
from tierckpt.storage.files import durable

from .store import LocalStore

_MARK = re.compile(r"v(\d{10,})\.g(\d{6,})\.pin")
_EVERYWHERE = "everywhere\n"
"""Content of a mark on the local level that goes on to the persistent one with the version."""


class LocalPins:
    """Those of one node. Any thread or process. Methods raise OSError."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._store = LocalStore(directory)

    @property
    def directory(self) -> Path:
        """The level's, on this node."""
        return self._store.directory

    def versions(self) -> set[VersionId]:
        """What is there, also in part; empty without the directory."""
        keys = [*self._store.keys(), *self._store.parities()]
        return {key.id for key in keys}

    def named(self, number: int) -> set[VersionId]:
        """What of that number is there, or pinned."""
        return {v for v in self.versions() | self.pinned() if v.version == number}

    def pinned(self) -> set[VersionId]:
        """Versions with a mark."""
        with contextlib.suppress(FileNotFoundError):
            found = map(_MARK.fullmatch, os.listdir(self._store.directory))
            return {VersionId(int(m[2]), int(m[1])) for m in found if m is not None}
        return set()

    def pins(self) -> tuple[Pin, ...]:
        """All marks, and what each says."""
        return tuple(Pin(version, self.everywhere(version)) for version in sorted(self.pinned()))

    def pin(self, versions: Iterable[VersionId], everywhere: bool = False) -> set[VersionId]:
        """Mark them; returns those that are here. A mark of what is elsewhere does no harm.

        `everywhere`: what is still to come to the persistent level is to be pinned there, too.
        """
        if not (versions := set(versions)):
            return set()  # and no directory is made for it
        self._store.create()
        with _locked(self._store.directory):
            for version in versions:
                self._set(self._mark(version), everywhere)
            self._store.sync_directory()
            return self.versions() & versions

    def _set(self, mark: Path, everywhere: bool) -> None:
        if mark.exists() and not everywhere:
            return
        if everywhere and not os.access(mark, os.W_OK):  # another user's: a new one in its place
            mark.unlink(missing_ok=True)
        with mark.open("w") as file:
            durable.share(file.fileno(), self._store.directory)
            file.write(_EVERYWHERE if everywhere else "")

    def unpin(self, versions: Iterable[VersionId]) -> set[VersionId]:
        """Take marks away; returns those that were there."""
        there = self.pinned() & set(versions)
        for version in there:
            self._mark(version).unlink(missing_ok=True)
        return there

    def everywhere(self, version: VersionId) -> bool:
        """Whether it has a mark that is meant for the persistent level, too."""
        with contextlib.suppress(FileNotFoundError):
            return self._mark(version).read_text() == _EVERYWHERE
        return False

    @contextlib.contextmanager
    def spared(self, version: VersionId) -> Iterator[bool]:
        """Whether the version is pinned; it does not become so while this is open."""
        with _locked(self._store.directory):
            yield self._mark(version).exists()

    def _mark(self, version: VersionId) -> Path:
        name = f"v{version.version:010d}.g{version.generation:06d}.pin"
        return self._store.directory / name


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One thread of one process at a time, where the file system can lock a directory (NFS cannot:
    there a pin that comes in the very moment of a removal may be too late)."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
