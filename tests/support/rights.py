"""Rights of an ordinary user, for tests that root runs, too."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

VERSION = 0x20080522
"""Version of the kernel's structures, `_LINUX_CAPABILITY_VERSION_3`."""
PASSES_BY = (1 << 1) | (1 << 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, which bypass modes of files."""


@contextlib.contextmanager
def as_anybody() -> Iterator[None]:
    """Bind this thread, and threads that it starts in the block, to the modes of files."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    before = (ctypes.c_uint32 * 6)()
    _check(libc.capget(header, before))
    less = (ctypes.c_uint32 * 6)(*before)
    less[0] &= ~PASSES_BY
    _check(libc.capset(header, less))
    try:
        yield
    finally:
        _check(libc.capset(header, before))


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
