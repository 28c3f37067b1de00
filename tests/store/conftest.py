"""The store tier's own fixtures."""

import multiprocessing
import multiprocessing.forkserver
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.tmpfs import SIZE_BYTES, mount


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Start it before the first test: it holds descriptors, and imports torch meanwhile."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tierckpt.testing.jobs"])
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """Where injected faults leave their marks."""
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


@pytest.fixture
def small_tmpfs() -> Iterator[Path]:
    """A memory file system of one megabyte."""
    with tempfile.TemporaryDirectory(prefix="tierckpt-test-") as folder:
        mount("-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", folder)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)
