"""Locks on files: those that this process has, and whether anybody has one. Standard library only.

The locks are POSIX's, which NFS knows, too; the kernel drops them when the process ends. It has
two rules more: they do not keep out the process that has them, and closing any descriptor of the
file drops them. So all of this process's locks are in one registry, and a file in it is never
opened to be probed. Where other code of the process may open the file, a lock of the open file
description is better (`lock_for_good`): each kind keeps out the other.

A forked child has none of its parent's locks. Any thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
import threading
from pathlib import Path

from msgspec import Struct

__all__ = [
    "any_held",
    "close",
    "free",
    "hand_over",
    "held_here",
    "holder",
    "holder_of",
    "lock",
    "lock_for_good",
    "lock_shared",
    "lock_shared_again",
    "lockable",
    "try_lock",
    "unlock",
    "unlocked",
]


LOCK_FORMAT = "hhqqi4x"
"""The kernel's `struct flock`: type, whence, start, length, process."""
_HELD = (errno.EACCES, errno.EAGAIN)
"""The errors that say that another process has the lock."""

KEEPER_SECONDS = 5.0
"""How long `close` waits for the end of a process that had the file open."""


class _Lock(Struct, frozen=True):
    """One lock of this process."""

    file: tuple[int, int]
    """Device and inode."""
    path: Path | None
    """The name under which the process took it, if it asks by that."""
    shared: bool = False
    for_good: bool = False
    """Of the open file description. A forked child would keep it when its parent is killed,
    so it gives it up at once."""


_locks: dict[int, _Lock] = {}
"""By descriptor."""
_keepers: dict[int, subprocess.Popen[bytes]] = {}
"""Processes that have this one's files open, by the descriptor that keeps them alive."""
_closing: list[_Lock] = []
"""Locks of files that are being closed: the kernel has them until then, and a new lock of the file
would go with them."""
_registry = threading.Lock()
"""Held while a file is locked or probed: a probe that ends later would drop the new lock."""


def lock(fd: int, path: Path | None = None) -> bool:
    """Lock the file until `close`. False where another process has it locked. Raises OSError where
    there are no locks. This process is not kept out: see `held_here`."""
    with _registry:
        if not try_lock(fd):
            return False
        _locks[fd] = _Lock(_file_of(fd), path)
        return True


def lock_for_good(fd: int, path: Path) -> bool:
    """As `lock`; the lock stays when this process opens the file once more and closes that (a
    backup of its folder). Where there is no such lock it is the usual one."""
    whole_file = struct.pack(LOCK_FORMAT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole_file)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        return lock(fd, path)
    with _registry:
        _locks[fd] = _Lock(_file_of(fd), path, for_good=True)
    return True


def hand_over(fd: int) -> int:
    """Let a small process have the file open in place of this one, until `close` of the returned
    descriptor, or the end of this process. The kernel flushes a file that a process has open when
    the process ends: on a hanging file system not even SIGKILL would end it. Returns `fd` where the
    lock is not of `lock_for_good`, which alone can be handed over, or no process can be started."""
    entry = _locks.get(fd)
    if entry is None or not entry.for_good:
        return fd
    nowhere, (theirs, mine) = subprocess.DEVNULL, os.pipe()
    try:
        keeper = subprocess.Popen(
            ["/bin/sh", "-c", "read -r _"],
            stdin=theirs,
            stdout=nowhere,
            stderr=nowhere,
            pass_fds=[fd],
            start_new_session=True,
        )
    except OSError:
        os.close(mine)
        return fd
    finally:
        os.close(theirs)
    with _registry:
        _keepers[mine], _locks[mine] = keeper, entry
        del _locks[fd]
    os.close(fd)
    return mine


def lock_shared(fd: int) -> None:
    """Share a lock with other readers, until `unlock`; waits for a writer's."""
    with _registry:
        fcntl.lockf(fd, fcntl.LOCK_SH)
        _locks[fd] = _Lock(_file_of(fd), None, shared=True)


def lock_shared_again() -> None:
    """Lock again what `lock_shared` has locked, after this process has opened and closed such
    files."""
    with _registry:
        for fd, each in _locks.items():
            if each.shared:
                fcntl.lockf(fd, fcntl.LOCK_SH)


def unlock(fd: int) -> None:
    """Give the lock up; the file stays open."""
    with _registry:
        _locks.pop(fd, None)
        fcntl.lockf(fd, fcntl.LOCK_UN)


def close(fd: int) -> None:
    """Close the file, and with it give up its lock, if it has one."""
    with _registry:
        closing = _locks.pop(fd, None)
        if closing is not None:
            _closing.append(closing)
    try:
        os.close(fd)  # outside: it may take long on a network file system
        if keeper := _keepers.pop(fd, None):
            with contextlib.suppress(subprocess.TimeoutExpired):
                keeper.wait(KEEPER_SECONDS)
    finally:
        if closing is not None:
            _closing.remove(closing)


def held_here(path: Path) -> bool:
    """True while this process has the file locked, be it by another name of its folder. A file that
    was removed meanwhile counts by its name."""
    held = _held()
    if any(each.path == path for each in held):
        return True
    with contextlib.suppress(OSError):
        found = path.stat()
        return any(each.file == (found.st_dev, found.st_ino) for each in held)
    return False


def any_held(folder: Path | None = None) -> bool:
    """True while this process has locked any file by its name, in that folder if one is given."""
    paths = [each.path for each in _held() if each.path is not None]
    return any(folder in (None, path.parent) for path in paths)


def unlocked(path: Path) -> bool:
    """True when no process, this one included, has the file locked. Raises OSError where it cannot
    be opened, or there are no locks."""
    with _registry, contextlib.ExitStack() as opened:
        # Opened without access first, which no lock notices, and which says what file it is.
        name = os.open(path, os.O_PATH | os.O_CLOEXEC)
        opened.callback(os.close, name)
        file = _file_of(name)
        if any(each.file == file for each in _held()):
            return False
        link = f"/proc/self/fd/{name}"
        try:
            fd = os.open(link, os.O_RDWR | os.O_CLOEXEC)
        except PermissionError:  # another user's: readers' locks keep out writers, too
            fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            return free(fd)
        opened.callback(os.close, fd)
        return try_lock(fd)


def holder(path: Path) -> int | None:
    """Process that has the file locked; see `holder_of`. Raises OSError where it cannot be
    opened."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return holder_of(fd)
    finally:
        os.close(fd)


# --- of a descriptor, past the registry ----------------------------------------------------------


def try_lock(fd: int) -> bool:
    """False where another process has the lock. Raises OSError where there are no locks. Until any
    descriptor of the file is closed."""
    return _try(fd, fcntl.LOCK_EX)


def holder_of(fd: int) -> int | None:
    """Process that has the lock, 0 if it is in another container or has an open file's lock; None
    if no other process has. Takes no lock, not even for a moment, so it keeps no process out; `fd`
    need not be one that may be written to. For processes without locks of their own on the file.
    Raises OSError where there are no locks."""
    whole_file = struct.pack(LOCK_FORMAT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(LOCK_FORMAT, fcntl.fcntl(fd, fcntl.F_GETLK, whole_file))
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def held(fd: int) -> bool:
    """True while another process has the lock; as `holder_of`."""
    return holder_of(fd) is not None


def free(fd: int) -> bool:
    """False where another process has the lock; `fd` need not be one that may be written to.
    Raises OSError where there are no locks."""
    return _try_and_undo(fd, fcntl.LOCK_SH)


def lockable(fd: int) -> bool:
    """True where `try_lock` would get it; no longer locked, if it was by this process."""
    return _try_and_undo(fd, fcntl.LOCK_EX)


def _try_and_undo(fd: int, how: int) -> bool:
    if not _try(fd, how):
        return False
    fcntl.lockf(fd, fcntl.LOCK_UN)
    return True


def _try(fd: int, how: int) -> bool:
    try:
        fcntl.lockf(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


def _held() -> list[_Lock]:
    return [*_locks.copy().values(), *_closing]


def _file_of(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _give_up_in_child() -> None:
    """The numbers of descriptors stay taken, as whoever has them may close them."""
    global _registry
    _registry = threading.Lock()  # another thread may have had it
    for_good = [fd for fd, each in _locks.items() if each.for_good]
    _locks.clear()
    _keepers.clear()
    _closing.clear()
    if for_good:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in for_good:
            os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)


os.register_at_fork(after_in_child=_give_up_in_child)
