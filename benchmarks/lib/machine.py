"""The context of a result: command, commit, hardware, software, date."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def description(directory: Path) -> dict[str, Any]:
    """Describe this run and its machine. Checkpoints go to `directory`."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        **commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": platform.release(),
        "filesystem": filesystem(directory),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg(),
    }


def commit() -> dict[str, Any]:
    """The checked-out commit, and whether the working tree differs from it."""
    head = _git("rev-parse", "--verify", "HEAD")
    return {"commit": head, "dirty": bool(_git("status", "--porcelain")) if head else None}


def filesystem(directory: Path) -> str:
    """Return the type of the file system of `directory`, such as ext4 or tmpfs."""
    best = ("", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split()[4]
        inside = Path(mount) in (directory, *directory.parents)
        if inside and len(mount) >= len(best[0]):
            best = (mount, right.split()[0])
    return best[1]


def scratch_parent() -> Path:
    """A folder on a disk: that for temporary files, or the current one if it is in memory."""
    temporary = Path(tempfile.gettempdir()).resolve()
    return Path.cwd() if filesystem(temporary) == "tmpfs" else temporary


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _field(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"
