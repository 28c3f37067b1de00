"""A complete file that a program wrote for a version."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from tierckpt.errors import TierckptError

PREFIX = "file/"
"""Begin of the names of entries that are files."""


@dataclass(frozen=True)
class SourceFile:
    """A complete file that a version is to contain."""

    name: str
    path: str
    nbytes: int
    mode: int
    """Permission bits."""

    @staticmethod
    def at(name: str, path: str | os.PathLike[str]) -> SourceFile:
        """Look at a file. Raises TierckptError if it is missing or no plain file."""
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            raise TierckptError(
                f"{name!r} was routed and not written: write the file at the path that route() "
                "returned, and close it before the version ends"
            ) from None
        if not stat.S_ISREG(found.st_mode):
            raise TierckptError(f"{name!r} is no plain file: only plain files can be stored")
        return SourceFile(name, os.fspath(path), found.st_size, stat.S_IMODE(found.st_mode))


__all__ = ["PREFIX", "SourceFile"]
