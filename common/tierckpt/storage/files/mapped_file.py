"""A mapped file whose disk may fail.

To touch a page that the disk cannot read, or that lies behind the end of a file cut short
meanwhile, ends the process with SIGBUS: no exception, no other copy tried. So the kernel is asked
to bring pages before they are touched, and that can fail like any call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
"""Of <linux/mman.h>, since Linux 5.14; Python has no names for them."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedFile:
    """The bytes of `mapped`, in `view`. Any thread; the owner closes it."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.view = memoryview(mapped)
        self._mapped = mapped
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def ask(self, low: int = 0, high: int | None = None) -> None:
        """Have the disk begin to read a range, all at once: page faults alone ask for a few pages
        at a time."""
        if (nbytes := self._there(low, high)) > 0:
            self._advise(low, nbytes, mmap.MADV_WILLNEED)

    def bring(self, low: int, high: int) -> None:
        """Have a range in memory. Lets other threads run meanwhile.

        Raises OSError (EIO) where that cannot be read.
        """
        if (nbytes := self._there(low, high)) <= 0:
            return
        self.ask(low, high)
        error = self._advise(low, nbytes, _MADV_POPULATE_READ)
        # An older kernel knows no such thing: pages come when they are touched.
        if error not in (0, errno.EINVAL, errno.ENOSYS):
            raise OSError(
                errno.EIO,
                f"bytes {low} to {high} cannot be read: the disk fails ({os.strerror(error)}), "
                "or the file was cut short",
            )

    def _advise(self, low: int, nbytes: int, advice: int) -> int:
        """madvise(2) for whole pages; 0, or the number of the error. Not by mmap.madvise, which
        would hold all of Python until the disk has answered."""
        return _advise(self._address + low, nbytes, advice)

    def _there(self, low: int, high: int | None) -> int:
        """How many bytes of a range the file has; below 0 where it ends before."""
        nbytes = len(self._mapped)
        return (nbytes if high is None else min(high, nbytes)) - low

    def close(self) -> None:
        """Unmap; later, where somebody still holds a part of it."""
        with contextlib.suppress(BufferError):
            self.view.release()
        with contextlib.suppress(BufferError):
            self._mapped.close()


def populate(address: int, nbytes: int) -> bool:
    """Have the kernel give all pages of this process's own memory there, at once: that takes three
    quarters of what a fault for each of them does. False where it does not do so."""
    return _advise(address, nbytes, _MADV_POPULATE_WRITE) == 0


def _advise(address: int, nbytes: int, advice: int) -> int:
    begin = address - address % mmap.PAGESIZE
    failed = _libc.madvise(begin, address + nbytes - begin, advice)
    return ctypes.get_errno() if failed else 0
