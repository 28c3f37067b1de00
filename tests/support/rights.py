"""What it is not to be root, for tests that root runs, too."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

VERSION = 0x20080522
"""Of the kernel's structures, `_LINUX_CAPABILITY_VERSION_3`."""
PASSES_BY = (1 << 1) | (1 << 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: modes of files are not asked."""


@contextlib.contextmanager
def as_anybody() -> Iterator[None]:
    """This thread, and those that it starts meanwhile, may do what the modes of files say."""
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
