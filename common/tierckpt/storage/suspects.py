"""Suspects: marks beside versions that were, or may have been, taken while replicas differed.

A version whose manifest says so (`VersionFacts.suspect`) needs no mark: it was taken after the
difference had been found. Versions between the last round in which all replicas were the same and
that moment get a mark, like a pin: a file beside the version, on each level separately. Its content
describes the difference. Imports little: the agent copies marks to the persistent level, and
removes those of versions that it retires.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from tierckpt.format.ids import VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.storage.local.store import LocalStore

from .persistent import PersistentStore, VersionName

_MARK = re.compile(r"v(\d{10,})\.g(\d{6,})\.suspect")
MOST_BYTES = 4096
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
            for match in filter(None, map(_MARK.fullmatch, os.listdir(self.folder))):
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
    return text.encode()[:MOST_BYTES]


def text_of(content: bytes) -> str:
    """Text of a mark."""
    return content[:MOST_BYTES].decode(errors="replace").strip() or "replicas differ"


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


__all__ = ["SuspectMarks", "local_suspicion", "persistent_suspects", "text_of"]
