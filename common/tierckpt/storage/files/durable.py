"""Folders that survive a loss of power, with everything that was made durable in them.

fsync of a file, and of its folder, does not make the folder's own name durable. Standard library
only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

NO_RIGHT = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
REFUSALS = NO_RIGHT | {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""Errors of file systems that cannot sync a folder, or do not let this user do it."""


SHARED = stat.S_IRGRP | stat.S_IWGRP


def make(folder: Path, parents: bool = True) -> None:
    """Create a folder and, with `parents`, its missing parents, durably. Raises OSError.

    Works from the top down, and makes each folder durable before it creates the next. So an
    existing folder is durable, except perhaps the last one, whose creator may have died; its name
    is always synced.
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
    """Create a folder if it is missing, not durably, with the rights that its parent gives its
    group. Raises OSError."""
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    with contextlib.suppress(OSError):  # else only this user can write to it
        above = folder.parent.stat()
        if above.st_mode & stat.S_ISGID and above.st_mode & stat.S_IWGRP:
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IRWXG)


def share(fd: int, folder: Path) -> None:
    """Let the group of `folder` write to a new file in it, if it may write to the folder: another
    user of the group can then continue the job, whatever the umask of the creator."""
    with contextlib.suppress(OSError):  # then only its owner can use it
        above, found = folder.stat(), os.fstat(fd)
        if above.st_mode & stat.S_IWGRP and found.st_gid == above.st_gid:
            mode = stat.S_IMODE(found.st_mode)
            if mode | SHARED != mode and found.st_uid == os.geteuid():
                os.fchmod(fd, mode | SHARED)


def open_plain(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading; never blocks, as opening a FIFO does.

    Raises OSError for anything else. FileNotFoundError means that the name does not exist, not even
    as a broken link.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(errno.EINVAL, "a broken link", str(path)) from None
        raise
    return os.fdopen(plain(fd, path), "rb", buffering)


def plain(fd: int, path: Path) -> int:
    """The descriptor, if it is a regular file; else it is closed, and OSError names the kind of
    `path`."""
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    kind_name = "a directory" if stat.S_ISDIR(kind) else "no regular file"
    raise OSError(errno.EINVAL, f"{kind_name} instead of a file", str(path))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context with a new file's path beside `path`: at the end that file takes the place of `path`,
    atomically; after an OSError it is removed. Not durable by itself. Raises OSError."""
    temp = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        yield temp
        temp.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)
        raise


def remove(path: Path) -> None:
    """Remove a file or a link, if it exists. A directory is left alone."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()
