"""One lock, of one process at a time, on an open file; the kernel drops it when its process ends.

POSIX's: NFS knows it, too. It does not keep out the process that has it, and closing any descriptor
of the file drops it. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

_held: dict[Path, int] = {}
"""By path of a locked file, the process that has the lock: a forked child has none of them."""


def try_lock(fd: int) -> bool:
    """False where another process has the lock. Raises OSError where there are no locks."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def free(fd: int) -> bool:
    """False where another process has the lock; `fd` need not be one that may be written to.
    Raises OSError where there are no locks."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    fcntl.lockf(fd, fcntl.LOCK_UN)
    return True


def lockable(fd: int) -> bool:
    """True where `try_lock` would get it; no longer locked, if it was by this process."""
    if not try_lock(fd):
        return False
    fcntl.lockf(fd, fcntl.LOCK_UN)
    return True


def hold(path: Path) -> None:
    """This process has the lock of the file at `path`, which does not keep itself out."""
    _held[path] = os.getpid()


def held_here(path: Path) -> bool:
    """True from `hold` to `let_go`; not in a child that was forked meanwhile."""
    return _held.get(path) == os.getpid()


def held_by_another_name(path: Path) -> bool:
    """As `held_here`, also where its folder had another name: by a link, or another mount."""
    for each, process in list(_held.items()):
        if process != os.getpid() or each.name != path.name:
            continue
        with contextlib.suppress(OSError):
            if os.path.samefile(each, path):
                return True
    return False


def any_held_in(folder: Path) -> bool:
    """True while this process has the lock of any file in that folder."""
    return any(each.parent == folder for each, who in _held.items() if who == os.getpid())


def any_held() -> bool:
    """True while this process has the lock of any file."""
    return os.getpid() in _held.values()


def let_go(path: Path) -> None:
    """The inverse of `hold`."""
    _held.pop(path, None)


__all__ = [
    "any_held",
    "free",
    "held_by_another_name",
    "held_here",
    "hold",
    "let_go",
    "lockable",
    "try_lock",
]
