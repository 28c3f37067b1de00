"""Small real file systems, to be full or read-only. Mounting needs root; without it: skipped."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SIZE_BYTES = 1024 * 1024


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Whoever opens something in `folder` meanwhile finds a file system that is read-only. What is
    open for writing (a claim's lock) keeps the kernel from making it so: hence a mount over it."""
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
    """At once for us; for who has files open there, when they are closed."""
    subprocess.run(["umount", "-l", str(folder)], check=True)
