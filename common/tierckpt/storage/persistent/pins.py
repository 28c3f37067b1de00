"""Pins on the persistent level: versions that retention never removes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from tierckpt.errors import PinError
from tierckpt.storage.local.pins import LocalPins
from tierckpt.storage.suspects import local_suspicion

from . import PersistentStore, VersionName


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
        """Add a version that is complete; `directory` is its local level."""
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


__all__ = ["NewPins", "PersistentPins"]
