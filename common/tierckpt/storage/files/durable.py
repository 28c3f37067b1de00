"""Folders that a loss of power does not take away, with all that was made durable in them.

fsync of a file, and of the folder that has its name, says nothing of the folder's own name.
Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

NO_RIGHT = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
REFUSALS = NO_RIGHT | {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""How file systems say that a folder cannot be synced, or that it is not ours to sync."""


SHARED = stat.S_IRGRP | stat.S_IWGRP


def make(folder: Path, parents: bool = True) -> None:
    """Make a folder if it is not there, and, with `parents`, what it is in. Raises OSError.

    From the top down, each made durable before the next is made. So one that is there is durable,
    but perhaps for the last: who made that may not have come further. Its name is synced always.
    """
    missing = [each for each in (folder, *folder.parents) if parents and not each.exists()]
    for each in reversed(missing or [folder]):
        make_one(each)
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


def make_one(folder: Path) -> None:
    """Make it if it is not there, not durably, with the rights that its parent gives its group.
    Raises OSError."""
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    with contextlib.suppress(OSError):  # else it is this user's alone to write to
        above = folder.parent.stat()
        if above.st_mode & stat.S_ISGID and above.st_mode & stat.S_IWGRP:
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IRWXG)


def share(fd: int, folder: Path) -> None:
    """Let the group of `folder` write to a new file in it, where it may write to the folder: who of
    it comes next goes on with what is there, whatever the umask of who made it."""
    with contextlib.suppress(OSError):  # then it is its owner's alone
        above, found = folder.stat(), os.fstat(fd)
        if above.st_mode & stat.S_IWGRP and found.st_gid == above.st_gid:
            mode = stat.S_IMODE(found.st_mode)
            if mode | SHARED != mode and found.st_uid == os.geteuid():
                os.fchmod(fd, mode | SHARED)


def open_plain(path: Path, buffering: int = -1) -> BinaryIO:
    """The file, to be read; never waits for somebody to write to it, as opening a FIFO does.

    Raises OSError for what is no file. FileNotFoundError means that there is nothing of that name,
    not even a link that leads nowhere.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(errno.EINVAL, "a link that leads nowhere", str(path)) from None
        raise
    return os.fdopen(plain(fd, path), "rb", buffering)


def plain(fd: int, path: Path) -> int:
    """The descriptor of what was opened at `path`; where that is no file it is closed, and OSError
    says what is there."""
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    what = "a directory" if stat.S_ISDIR(kind) else "no regular file"
    raise OSError(errno.EINVAL, f"{what} in the place of a file", str(path))


def remove(path: Path) -> None:
    """Remove a file or a link, if it is there. A directory is not ours, and stays."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()
