"""One lock, of one process at a time, on an open file; the kernel drops it when its process ends.

POSIX's: NFS knows it, too. It does not keep out the process that has it, and closing any descriptor
of the file drops it. Where other code of the process may open the file, a lock of the open file
description is better (`try_lock_for_good`): each kind keeps out the other. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from pathlib import Path

_for_good: set[int] = set()
"""Descriptors that this process has locked so. A child that is forked would keep the lock when its
parent is killed, so it gives them up at once."""
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


def try_lock_for_good(fd: int) -> bool:
    """As `try_lock`, until `close`; also when this process opens the file once more and closes that
    (a backup of its folder). Where there is no such lock it is the usual one."""
    whole_file = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole_file)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        return try_lock(fd)
    _for_good.add(fd)
    return True


def close(fd: int) -> None:
    """Close it, and with it give up a lock `for_good`."""
    _for_good.discard(fd)
    os.close(fd)


def _give_up_in_child() -> None:
    """The numbers stay taken, as whoever has them may close them."""
    if _for_good:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in _for_good:
            os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)
        _for_good.clear()


os.register_at_fork(after_in_child=_give_up_in_child)


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
    "close",
    "free",
    "held_by_another_name",
    "held_here",
    "hold",
    "let_go",
    "lockable",
    "try_lock",
    "try_lock_for_good",
]
