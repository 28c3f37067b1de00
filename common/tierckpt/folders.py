"""Folders that a loss of power does not take away, with all that was made durable in them.

fsync of a file, and of the folder that has its name, says nothing of the folder's own name.
Standard library only.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

REFUSALS = frozenset(
    {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM, errno.EROFS}
)
"""How file systems say that a folder cannot be synced, or that it is not ours to sync."""


def make(folder: Path, parents: bool = True) -> None:
    """Make a folder if it is not there, and, with `parents`, what it is in. Raises OSError.

    From the top down, each made durable before the next is made. So one that is there is durable,
    but perhaps for the last: who made that may not have come further. Its name is synced always.
    """
    missing = [each for each in (folder, *folder.parents) if parents and not each.exists()]
    for each in reversed(missing or [folder]):
        each.mkdir(exist_ok=True)
        try:
            sync(each.parent)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise


def sync(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
