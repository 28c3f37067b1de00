"""A mapped file on a disk that may fail.

Touching a page that the disk cannot read, or after the end of a file that was truncated, ends the
process with SIGBUS: no exception, and no other copy is tried. So the kernel is asked to read pages
before they are touched; that call can fail like any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
"""From <linux/mman.h>, since Linux 5.14; Python has no names for them."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedFile:
    """The bytes of `mapped`, in `view`. Any thread; the owner closes it."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.view = memoryview(mapped)
        self._mapped = mapped
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def ask(self, low: int = 0, high: int | None = None) -> None:
        """Start reading a range from the disk, all at once: page faults alone read a few pages at a
        time."""
        if (nbytes := self._there(low, high)) > 0:
            self._advise(low, nbytes, mmap.MADV_WILLNEED)

    def bring(self, low: int, high: int) -> None:
        """Read a range into memory. Other threads run during the read.

        Raises OSError (EIO) if the range cannot be read.
        """
        if (nbytes := self._there(low, high)) <= 0:
            return
        self.ask(low, high)
        error = self._advise(low, nbytes, _MADV_POPULATE_READ)
        # Older kernels do not have this call: pages are read when they are touched.
        if error not in (0, errno.EINVAL, errno.ENOSYS):
            raise OSError(
                errno.EIO,
                f"bytes {low} to {high} cannot be read: the disk fails ({os.strerror(error)}), "
                "or the file was truncated",
            )

    def _advise(self, low: int, nbytes: int, advice: int) -> int:
        """madvise(2) for whole pages; returns 0 or the error number. mmap.madvise would hold the
        interpreter lock until the disk has answered."""
        return _advise(self._address + low, nbytes, advice)

    def _there(self, low: int, high: int | None) -> int:
        """Bytes of a range that the file has; below 0 if it ends before the range."""
        nbytes = len(self._mapped)
        return (nbytes if high is None else min(high, nbytes)) - low

    def close(self) -> None:
        """Unmap; later, if a part is still in use."""
        with contextlib.suppress(BufferError):
            self.view.release()
        with contextlib.suppress(BufferError):
            self._mapped.close()


def populate(address: int, nbytes: int) -> bool:
    """Have the kernel allocate all pages of a range of this process's own memory at once: this
    takes three quarters of the time of page faults. Returns False if the kernel does not support
    it."""
    return _advise(address, nbytes, _MADV_POPULATE_WRITE) == 0


def _advise(address: int, nbytes: int, advice: int) -> int:
    begin = address - address % mmap.PAGESIZE
    failed = _libc.madvise(begin, address + nbytes - begin, advice)
    return ctypes.get_errno() if failed else 0
