"""One lock, of one process at a time, on an open file; the kernel drops it when its process ends.

POSIX's: NFS knows it, too. It does not keep out the process that has it, and closing any descriptor
of the file drops it. Standard library only.
"""

from __future__ import annotations

import errno
import fcntl


def try_lock(fd: int) -> bool:
    """False where another process has the lock. Raises OSError where there are no locks."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


__all__ = ["try_lock"]
