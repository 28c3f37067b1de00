"""Suspects: marks beside versions that were taken while replicas differed, or may have.

A version with a manifest that says so (`VersionFacts.suspect`) needs no mark: it was taken after
the difference had been found. Those between the last round in which all were alike and that moment
get one, as pins are set: a file beside the version, on each level by itself. Its content says what
differs. Light: the agent takes marks along to the persistent level, and removes those of versions
that it retires.
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
"""Of a mark's text."""


class SuspectMarks:
    """Those in one folder: a node's local level, or the job's in memory. Any thread or process.
    Methods raise OSError."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def all(self) -> dict[VersionId, str]:
        """What is marked, and what each mark says; empty without the folder."""
        found: dict[VersionId, str] = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for match in filter(None, map(_MARK.fullmatch, os.listdir(self.folder))):
                id_ = VersionId(int(match[2]), int(match[1]))
                with contextlib.suppress(FileNotFoundError):
                    found[id_] = text_of((self.folder / match[0]).read_bytes())
        return found

    def add(self, ids: Iterable[VersionId], text: str) -> None:
        """Mark these, be they there yet or not, if the folder is."""
        if not self.folder.is_dir():
            return
        for id_ in ids:
            temp = self.folder / f".{_name(id_)}.{os.getpid()}"
            temp.write_bytes(_bytes_of(text))
            temp.replace(self.folder / _name(id_))

    def remove(self, ids: Iterable[VersionId]) -> None:
        """Take marks away that are there."""
        for id_ in ids:
            (self.folder / _name(id_)).unlink(missing_ok=True)


def _name(id_: VersionId) -> str:
    return f"v{id_.version:010d}.g{id_.generation:06d}.suspect"


def _bytes_of(text: str) -> bytes:
    return text.encode()[:MOST_BYTES]


def text_of(content: bytes) -> str:
    """What a mark says."""
    return content[:MOST_BYTES].decode(errors="replace").strip() or "replicas differ"


def local_suspicion(directory: str | os.PathLike[str], id_: VersionId) -> str:
    """What is said of a version on a node's local level, by a mark or by a manifest; empty where
    nothing is. Raises OSError."""
    if text := SuspectMarks(directory).all().get(id_):
        return text
    store = LocalStore(directory)
    keys = store.keys()
    for key in keys:
        if key.id == id_:
            with contextlib.suppress(Exception):  # damaged: that is said elsewhere
                return Manifest.decode(store.read_manifest(key)).facts.suspect
    return ""


def persistent_suspects(store: PersistentStore) -> dict[VersionName, str]:
    """Versions of the persistent level that are marked, and what each mark says."""
    found = {}
    for name in store.suspects():
        with contextlib.suppress(FileNotFoundError):  # retired meanwhile
            found[name] = text_of(store.suspicion(name))
    return found


__all__ = ["SuspectMarks", "local_suspicion", "persistent_suspects", "text_of"]
