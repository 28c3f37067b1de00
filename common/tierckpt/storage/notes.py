"""Notes: small checksummed JSON records at one place, each with one writer at a time.

A place is the directory of a node's local level, or the root of a persistent level. A note is
replaced as a whole.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierckpt._text import in_words
from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format.checksummed_json import check_head, checked, head_of, with_check
from tierckpt.storage.files import durable

from .persistent import PersistentStore

Place = str | os.PathLike[str] | PersistentStore


class Notes:
    """The notes of one place. One thread. Methods raise OSError and PersistentError; those that
    read also CorruptShardError and FormatError."""

    def __init__(self, place: Place) -> None:
        """A directory, or a store, which stays the caller's."""
        self._place = place if isinstance(place, PersistentStore) else Path(place)

    @property
    def where(self) -> str:
        """The place, for messages."""
        return self._place.url if isinstance(self._place, PersistentStore) else str(self._place)

    def names(self, folder: str = "") -> list[str]:
        """Names of the files at the place, or in a folder there; empty if that is missing."""
        if isinstance(self._place, PersistentStore):
            return sorted(n for n in self._place.notes(folder) if not n.endswith("/"))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(n for n in os.listdir(self._place / folder) if not n.startswith("."))
        return []

    def read(self, name: str, kind: str) -> dict[str, Any] | None:
        """The values of a note; None without one."""
        try:
            if isinstance(self._place, PersistentStore):
                data = self._place.note(name)
            else:
                with durable.open_plain(self._place / name) as file:
                    data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            values = json.loads(checked(data, f"file {name}"))
            check_head(values, kind, f"file {name}")
        except (CorruptShardError, FormatError) as error:
            raise type(error)(f"{self.where}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{self.where}/{name} cannot be read: {in_words(error)}") from error
        return dict(values)

    def write(self, name: str, kind: str, values: Mapping[str, Any]) -> None:
        """Write a note, in place of an earlier one; durable at return."""
        data = with_check(json.dumps({**head_of(kind), **values}).encode())
        if isinstance(self._place, PersistentStore):
            self._place.put_note(name, data)
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
        """Remove a note, if it is there."""
        if isinstance(self._place, PersistentStore):
            self._place.remove_note(name)
        else:
            durable.remove(self._place / name)


__all__ = ["Notes", "Place"]
