"""A locked file for writing, past the page cache if the file system supports it.

The lock is held from the first byte on, and the kernel drops it when the process is killed:
cleaners recognize a living writer by it. Standard library only.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from tierckpt import _faults
from tierckpt.format.ids import PAGE_BYTES

from . import durable, file_lock

WRITE_BYTES = 256 * 1024 * 1024
"""Size of one write. The kernel gives all of it to the device at once; between two writes the
device waits until this thread has a core again, which takes milliseconds where training uses all
cores. A process that is killed lives until its write has ended."""


class DirectFile:
    """A file that is being written. For one thread at a time; every method may raise OSError."""

    def __init__(self, path: Path) -> None:
        """Raises BlockingIOError if another process has the file locked: waiting for one that hangs
        could take forever."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd, self.direct = os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # tmpfs of older kernels, some network file systems
                raise
            self._fd, self.direct = os.open(path, flags, 0o644), False
        try:
            durable.share(self._fd, path.parent)
            if not file_lock.lock(self._fd):
                raise BlockingIOError(f"another process is still writing {path}")
        except OSError:
            self.close()
            raise

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close and unlock."""
        file_lock.close(self._fd)

    @property
    def is_removed(self) -> bool:
        """True if the file has no name any more."""
        return os.fstat(self._fd).st_nlink == 0

    def write(self, image: memoryview, start: int) -> None:
        """Write `image` at byte `start` of the file."""
        offset = 0
        while offset < len(image):
            _faults.point("file", op="write", offset=start + offset)
            try:
                part = image[offset : offset + WRITE_BYTES]
                offset += os.pwrite(self._fd, part, start + offset)
            except OSError as error:
                if not (self.direct and error.errno == errno.EINVAL):
                    raise
                self._leave_direct()
            else:
                if self.direct and (start + offset) % PAGE_BYTES:
                    self._leave_direct()  # a short write; the rest is no longer aligned

    def sync(self, nbytes: int) -> None:
        """Give the file exactly `nbytes`, and make it durable."""
        if os.fstat(self._fd).st_size != nbytes:
            os.ftruncate(self._fd, nbytes)
        _faults.point("file", op="fsync")
        os.fdatasync(self._fd)  # its length is durable too; `commit` makes its name durable

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False
