"""Small real file systems, to be full or read-only. Mounting needs root; without it: skipped."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SIZE_BYTES = 1024 * 1024


def make_read_only(folder: Path, read_only: bool = True) -> None:
    """Remount; raises when something is being written there."""
    mount("-o", f"remount,{'ro' if read_only else 'rw'}", str(folder))


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")


def unmount(folder: str | Path) -> None:
    """At once for us; for who has files open there, when they are closed."""
    subprocess.run(["umount", "-l", str(folder)], check=True)
