"""A complete file that a program wrote for a version."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from dataclasses import dataclass
from pathlib import Path

from tierckpt.errors import TierckptError
from tierckpt.storage.files.mounts import SHARED, mount_of

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
    def at(name: str, folder: Path) -> SourceFile:
        """Look at the file of this name in a folder. Raises TierckptError if it is missing, no
        plain file, elsewhere by a link, or still open for writing."""
        path = os.path.join(folder, name)
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            raise TierckptError(
                f"{name!r} was routed and not written: write the file at the path that route() "
                "returned, and close it before the version ends"
            ) from None
        there = os.path.join(os.path.realpath(folder), name)
        if not stat.S_ISREG(found.st_mode) or os.path.realpath(path) != there:
            raise TierckptError(
                f"{name!r} is no plain file in the folder that route() made: only plain files can "
                "be stored, without links"
            )
        if _is_open_for_writing(path):
            raise TierckptError(
                f"{name!r} is still open for writing, so a part may be missing: close it (end "
                "the `with`, delete the memory map) before the version ends"
            )
        found = os.lstat(path)  # again: nobody writes now
        return SourceFile(name, path, found.st_size, stat.S_IMODE(found.st_mode))


def _is_open_for_writing(path: str) -> bool:
    """True if a process of this node has the file open, or mapped, for writing. False if the file
    system cannot tell: those that other machines see refuse leases for reasons of their own.

    The kernel grants a lease for reading only if there is no such process. SIGURG, which processes
    ignore, in place of SIGIO, which ends them, would come if one opened the file at this moment.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN and mount_of(os.path.realpath(path)).kind not in SHARED
    finally:
        os.close(fd)
    return False


__all__ = ["PREFIX", "SourceFile"]
