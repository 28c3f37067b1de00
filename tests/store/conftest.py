"""The store tier's own fixtures."""

import multiprocessing
import multiprocessing.forkserver
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.late_copies import copy_by_layer
from tests.support.persistent_shards import ENDPOINT, SERVED, s3_options
from tests.support.s3_server import Proxy, proxied, serving
from tests.support.tiny_course import fingerprints
from tests.support.tmpfs import SIZE_BYTES, mount, unmount
from tierckpt.storage.persistent import ObstoreBackend


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Start it before the first test: it holds descriptors, and imports torch in the meantime."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def settings(shm_dir: Path) -> dict[str, Any]:
    """Settings of a job with memory of this test alone."""
    return {"shm_dir": str(shm_dir)}


@pytest.fixture
def inline_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that do not say otherwise need no process for their agent: a start takes half a
    second."""
    monkeypatch.setenv("TIERCKPT_AGENT", "inline")


@pytest.fixture
def by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are copied layer by layer, as large ones are, and none at its boundary."""
    copy_by_layer(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Folder of its checkpoints."""
    return tmp_path / "ckpts"


@pytest.fixture(scope="module")
def course() -> dict[int, str]:
    """Fingerprints of the undisturbed course, from `fingerprints`."""
    return fingerprints()


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """Folder in which injected faults leave their marks."""
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
            unmount(folder)


# --- a real S3 server ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every test's own directory is below this one."""
    return tmp_path_factory.getbasetemp().parent


@pytest.fixture(scope="module")
def endpoint(served: Path) -> Iterator[str]:
    """A server for all tests of a module; the client's threads are started, too, and stay."""
    with serving(served) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv(SERVED, str(served))
        patch.setenv(ENDPOINT, url)
        first = ObstoreBackend("s3://nobucket", **s3_options(url))
        with pytest.raises(FileNotFoundError, match="no bucket"):
            first.sizes()
        first.close()
        yield url


@pytest.fixture(scope="module")
def bad_server(endpoint: str, served: Path) -> Iterator[Proxy]:
    with proxied(endpoint, served) as proxy:
        yield proxy


@pytest.fixture
def proxy(bad_server: Proxy) -> Iterator[Proxy]:
    bad_server.reset()
    yield bad_server
    bad_server.reset()
