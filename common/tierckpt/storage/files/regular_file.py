"""Files that are opened, or removed, by a name under which anything at all may lie. Standard
library only."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


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
