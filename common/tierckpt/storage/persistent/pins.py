"""Pins on the persistent level: versions that no retention removes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from tierckpt.errors import PinError
from tierckpt.storage.local.pins import LocalPins
from tierckpt.storage.suspects import local_suspicion

from . import PersistentStore, VersionName


class PersistentPins:
    """Those of the persistent level. One thread. Methods raise PersistentError and OSError."""

    def __init__(self, store: PersistentStore) -> None:
        self._store = store

    def versions(self) -> set[VersionName]:
        """What is there."""
        return set(self._store.versions())

    def named(self, number: int) -> set[VersionName]:
        """What of that number is there, or pinned."""
        return {v for v in self.versions() | self.pinned() if v.id.version == number}

    def pinned(self) -> set[VersionName]:
        """Versions with a mark."""
        return set(self._store.pinned())

    def pin(self, versions: Iterable[VersionName]) -> set[VersionName]:
        """Mark them; returns those that are there, and stay."""
        done = set()
        for version in versions:
            with contextlib.suppress(FileNotFoundError):
                self._store.pin(version)
                done.add(version)
        return done

    def unpin(self, versions: Iterable[VersionName]) -> set[VersionName]:
        """Take marks away; returns those that were there."""
        there = self.pinned() & set(versions)
        for version in there:
            self._store.unpin(version)
        return there


class NewPins:
    """Versions that came to the persistent level, each to be pinned there if its mark on the local
    level says so, and marked as suspect if it is one. One thread.

    Who pins a version marks it on local, and then looks on the persistent level; here it is there
    first, and then its mark is looked for. So one of the two finds the other.
    """

    def __init__(self) -> None:
        self._unseen: list[tuple[LocalPins, VersionName]] = []
        """To be looked at, oldest first."""

    def add(self, directory: str, name: VersionName) -> None:
        """A version is complete whose local level `directory` is."""
        self._unseen.append((LocalPins(directory), name))

    def pin(self, store: PersistentStore) -> None:
        """See to all that were added. Raises PinError where that fails for one: before it is tried
        again nothing must be removed there."""
        while self._unseen:
            local, name = self._unseen[0]
            try:
                _pin_as(local, name, store)
            except OSError as error:
                raise PinError(
                    f"v{name.id.version} could not be pinned as it is on local: {error}"
                ) from error
            self._unseen.pop(0)


def _pin_as(local: LocalPins, name: VersionName, store: PersistentStore) -> None:
    if text := local_suspicion(local.directory, name.id):
        store.mark_suspect(name, text.encode())
    if local.everywhere(name.id):
        PersistentPins(store).pin([name])
        if not local.everywhere(name.id):  # unpinned meanwhile, before it was here
            store.unpin(name)


__all__ = ["NewPins", "PersistentPins"]
