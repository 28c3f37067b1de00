"""A benchmark's files: folders that are gone afterwards, and results that are whole or absent."""

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

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def temporary(parent: Path) -> Iterator[Path]:
    """A folder of the benchmark's name in `parent`."""
    name = Path(sys.argv[0]).stem
    folder = Path(tempfile.mkdtemp(prefix=f"tierckpt-{name}-", dir=parent)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clean_up_when_terminated() -> None:
    """A plain kill shall clean up, too: raise where the main thread is, so that `finally` runs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


def write_json(path: Path, document: dict[str, Any], indent: int | None = 1) -> None:
    """Replace the file in one step: whoever reads it finds a whole one."""
    part = path.with_name(f".{path.name}.part")
    with open(part, "w") as file:
        file.write(json.dumps(document, indent=indent) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
