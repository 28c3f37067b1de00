"""The files of a benchmark: temporary folders, and result files that are written atomically."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path(os.environ.get("TIERCKPT_SHM_DIR", "/dev/shm"))
"""Where jobs have their memory: as everywhere, the setting `shm_dir` names another place."""


@contextmanager
def temporary(parent: Path) -> Iterator[Path]:
    """Make a folder in `parent`, named after the benchmark; delete it at the end."""
    name = Path(sys.argv[0]).stem
    folder = Path(tempfile.mkdtemp(prefix=f"tierckpt-{name}-", dir=parent)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def job_in_memory() -> Iterator[str]:
    """Make a folder in shared memory for all levels of a job, with `shm` in it for its slots;
    delete it at the end."""
    with temporary(SHARED_MEMORY) as folder:
        (folder / "shm").mkdir()
        yield str(folder)


def clean_up_when_terminated() -> None:
    """Turn SIGTERM into SystemExit on the main thread, so that `finally` blocks run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


def write_json(path: Path, document: dict[str, Any], indent: int | None = 1) -> None:
    """Replace the file in one step: a reader always finds a complete one."""
    part = path.with_name(f".{path.name}.part")
    with open(part, "w") as file:
        file.write(json.dumps(document, indent=indent) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def evict(folder: Path) -> None:
    """Drop all files in `folder` from the page cache, as a reboot does."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
