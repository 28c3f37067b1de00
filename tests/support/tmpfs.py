"""Small real file systems, full or read-only. A mount needs root; other users skip the test."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SIZE_BYTES = 1024 * 1024


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make files in `folder` read-only for the block. A file open for writing (a claim's lock)
    keeps the kernel from remounting the file system, so another one is mounted over it."""
    mount("--bind", str(folder), str(folder))
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield
    finally:
        unmount(folder)


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")


def unmount(folder: str | Path) -> None:
    """Unmount: at once for new opens, and for open files when they are closed."""
    subprocess.run(["umount", "-l", str(folder)], check=True)
