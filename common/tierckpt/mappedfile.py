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

_MADV_POPULATE_READ = 22
"""Of <linux/mman.h>, since Linux 5.14; Python has no name for it."""
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
        begin, nbytes = self._pages(low, high)
        if nbytes > 0:
            self._mapped.madvise(mmap.MADV_WILLNEED, begin, nbytes)

    def bring(self, low: int, high: int) -> None:
        """Have a range in memory. Lets other threads run meanwhile.

        Raises OSError (EIO) where that cannot be read.
        """
        self.ask(low, high)
        begin, nbytes = self._pages(low, high)
        if nbytes <= 0:
            return
        # Not by mmap.madvise, which would hold all of Python until the disk has answered.
        if _libc.madvise(self._address + begin, nbytes, _MADV_POPULATE_READ):
            error = ctypes.get_errno()
            if error not in (
                errno.EINVAL,
                errno.ENOSYS,
            ):  # an older kernel: pages come when touched
                raise OSError(
                    errno.EIO,
                    f"bytes {low} to {high} cannot be read: the disk fails ({os.strerror(error)}), "
                    "or the file was cut short",
                )

    def _pages(self, low: int, high: int | None) -> tuple[int, int]:
        """The range in whole pages: its beginning, and its length."""
        begin = low - low % mmap.PAGESIZE
        size = len(self._mapped)
        return begin, (size if high is None else min(high, size)) - begin

    def close(self) -> None:
        """Unmap; later, where somebody still holds a part of it."""
        with contextlib.suppress(BufferError):
            self.view.release()
        with contextlib.suppress(BufferError):
            self._mapped.close()
