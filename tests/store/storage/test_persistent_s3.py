"""The persistent level on a real S3 server, which the tests start (skipped by name without one)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.store.storage.test_persistent_posix import GROUPS, PersistentConformance
from tests.support.persistent_shards import Shards, facts_of, name_of, s3_options
from tests.support.s3_server import Proxy, proxied, serving
from tests.support.warm_python.servers import PYTHON
from tierckpt.errors import CorruptShardError
from tierckpt.format import MANIFEST, PART_BYTES, ShardKey, run_name
from tierckpt.storage.persistent import (
    WINDOW_BYTES,
    Lease,
    LeaseHeldError,
    ObstoreBackend,
    PersistentError,
    PersistentStore,
    RetryPolicy,
    ShardSource,
    SystemClock,
)
from tierckpt.testing import (
    BackendConformance,
    commit_one,
    content_of,
    is_sound,
    key_of,
    manifest_of,
    put,
)

LARGE_PAGES = 3 * WINDOW_BYTES // 4096 + 1
"""A shard in two parts."""


@pytest.fixture
def url(tmp_path: Path, served: Path) -> str:
    return f"s3://{tmp_path.relative_to(served)}"


@pytest.fixture
def backend(endpoint: str, url: str) -> Iterator[ObstoreBackend]:
    made = ObstoreBackend(url, **s3_options(endpoint))
    yield made
    made.close()


class TestS3Backend(BackendConformance):
    """With conditional puts."""


@pytest.mark.usefixtures("endpoint")
class TestS3Store(PersistentConformance):
    factory = "tests.support.persistent_shards:s3"
    least_operations = 12  # an object takes one, a file five

    def test_a_shard_without_manifest_is_no_shard_and_is_cleaned(
        self, store: Any, tmp_path: Path
    ) -> None:
        """Removed through the server, which caches the listing of a directory for a while."""
        commit_one(store, key_of(1))
        commit_one(store, key_of(2))
        store.store.backend.delete(name_of(key_of(2)).stem + MANIFEST)
        assert store.keys() == [key_of(1)]
        store.clean(0)
        assert not self.data_file(tmp_path, key_of(2)).exists()
        assert is_sound(store, key_of(1))

    def data_file(self, directory: Path, key: ShardKey) -> Path:
        return self.folder(directory, key) / GROUPS.label(0) / run_name(range(1))

    def check_files(self, directory: Path, key: ShardKey) -> None:
        content = content_of(key)
        assert self.data_file(directory, key).read_bytes()[: len(content)] == content


# --- what only an object store has ------------------------------------------------------------


def large(key: ShardKey) -> ShardSource:
    image = memoryview(content_of(key, LARGE_PAGES))
    return ShardSource(key.shard, image, manifest_of(key, LARGE_PAGES))


def objects(folder: Path) -> list[Path]:
    """Objects of the server."""
    return [path for path in folder.rglob("*") if path.is_file()]


UPLOAD_KILLS = [f"op=put,hit={hit}" for hit in (1, 2, 3)]
"""One part is durable or not, or both are; the third put is the records'."""


def killed(does: str, at: str, folder: Path) -> None:
    """Another process is killed during that operation."""
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.support import persistent_shards as p\nfrom tests.store.storage import "
        "test_persistent_s3 as t\n"
        "store = p.s3(Path(sys.argv[1])).store; key = t.key_of(1)\n"
    )
    done = subprocess.run(
        [PYTHON, "-c", program + does, str(folder)],
        env={**os.environ, "TIERCKPT_FAULTS": f"kill@file:{at}"},
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("at", UPLOAD_KILLS)
def test_a_flush_killed_among_parts_is_repeated_and_leaves_nothing_beside(
    at: str, endpoint: str, url: str, tmp_path: Path
) -> None:
    killed("store.flush(p.facts_of(key), 1 << 25, [t.large(key)])", at, tmp_path)
    store = PersistentStore(url, **s3_options(endpoint))
    assert store.versions() == []
    result = store.flush(facts_of(key_of(1)), 1 << 25, [large(key_of(1))])
    assert result.committed
    assert result.written_bytes == len(large(key_of(1)).image)
    store.open_shard(name_of(key_of(1)), 0).verify()
    parts = sorted(p.stat().st_size for p in objects(tmp_path) if p.parent.suffix == ".parts")
    assert parts == [LARGE_PAGES * 4096 - PART_BYTES, PART_BYTES]
    assert store.retire(name_of(key_of(1)))
    assert not objects(tmp_path)
    store.close()


def test_a_throttling_server_is_asked_again_and_a_forbidding_one_is_not(
    proxy: Proxy, url: str
) -> None:
    said: list[str] = []
    waits: list[float] = []
    store = PersistentStore(
        url,
        retry=RetryPolicy(tries=3, first_seconds=1.0),
        sleep=waits.append,
        on_retry=said.append,
        **s3_options(proxy.url),
    )
    key = key_of(1)
    source = ShardSource(0, memoryview(content_of(key)), manifest_of(key))
    failures = iter([503, 500])
    proxy.rule = lambda method, path, number: next(failures, None) if method == "PUT" else None
    assert store.flush(facts_of(key), 1 << 20, [source]).committed
    assert len(waits) == len(said) == 2
    assert "try 3 in" in said[1]

    proxy.rule = lambda method, path, number: 403 if method == "PUT" else None
    with pytest.raises(PersistentError, match="check the credentials") as forbidden:
        store.flush(facts_of(key_of(2)), 1 << 20, [source])
    assert not forbidden.value.transient
    assert url in str(forbidden.value)
    assert len(waits) == 2

    proxy.rule = lambda method, path, number: 503 if method == "PUT" else None
    with pytest.raises(PersistentError, match="given up after 3 tries") as overloaded:
        store.flush(facts_of(key_of(2)), 1 << 20, [source])
    assert overloaded.value.transient
    assert store.versions() == [name_of(key)]
    store.close()


def kill_servers(directory: Path) -> None:
    """SIGKILL the servers of this directory that this process has started."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for pid in (task / "children").read_text().split():
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"serve" in words and str(directory).encode() in words:
                    os.kill(int(pid), signal.SIGKILL)


@pytest.mark.usefixtures("endpoint")
def test_a_flush_survives_a_killed_server_that_comes_back(tmp_path: Path) -> None:
    served, said, once = tmp_path / "served", list[str](), threading.Lock()
    (served / "bucket").mkdir(parents=True)
    with contextlib.ExitStack() as servers:
        front = servers.enter_context(proxied(servers.enter_context(serving(served)), served))

        def rule(method: str, path: str, number: int) -> None:
            if method == "PUT" and path.endswith(".parts/00001"):
                kill_servers(served)
                front.rule = lambda *_: None

        def wait(seconds: float) -> None:
            with once:
                if len(said) and "again" not in said:
                    said.append("again")
                    url = servers.enter_context(serving(served))
                    front.upstream = urlsplit(url).netloc

        options = {"sleep": wait, "on_retry": said.append, **s3_options(front.url)}
        store = PersistentStore("s3://bucket/job", **options)
        front.rule = rule
        assert store.flush(facts_of(key_of(1)), 1 << 25, [large(key_of(1))]).committed
        assert "again" in said
        store.open_shard(name_of(key_of(1)), 0).verify()
        store.close()


@pytest.mark.parametrize(
    ("status", "code", "advised"),
    [
        (400, "ExpiredToken", "check the credentials"),
        (507, "NoSpace", "device is full"),
    ],
)
def test_an_error_in_the_middle_of_a_flush_names_the_remedy(
    status: int, code: str, advised: str, proxy: Proxy, url: str
) -> None:
    store = PersistentStore(url, **s3_options(proxy.url))
    proxy.rule = lambda method, path, number: (status, code) if ".parts/00001" in path else None
    with pytest.raises(PersistentError, match=f"{advised}") as failed:
        store.flush(facts_of(key_of(1)), 1 << 25, [large(key_of(1))])
    assert not failed.value.transient
    proxy.reset()
    assert store.flush(facts_of(key_of(1)), 1 << 25, [large(key_of(1))]).committed
    store.close()


def test_a_corrupted_object_is_found(endpoint: str, tmp_path: Path, url: str) -> None:
    shards = Shards(url, **s3_options(endpoint))
    key = key_of(1)
    shards.commit(key, memoryview(content_of(key)), manifest_of(key))
    name = name_of(key)
    file = tmp_path / name.stem / GROUPS.label(0) / run_name(range(1))
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    put(shards.store.backend, f"{name.stem}/{GROUPS.label(0)}/{file.name}", bytes(data))
    with pytest.raises(CorruptShardError, match="differ from their checksum"):
        shards.store.open_shard(name, 0).verify()
    shards.store.close()


def test_a_race_for_a_free_lease_has_one_winner(proxy: Proxy, url: str) -> None:
    """Both saw it free. The store's conditional put decides."""
    backends = [ObstoreBackend(url, **s3_options(proxy.url)) for _ in range(2)]
    leases = [
        Lease(b, run_id, run_id, SystemClock()) for b, run_id in zip(backends, "12", strict=True)
    ]
    assert leases[0]._take(1, None) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends[1], "_exists", lambda name: False)  # it looked a moment before
        assert leases[1]._take(1, None) is None
    with pytest.raises(LeaseHeldError):
        leases[1].ensure()
    for backend in backends:
        backend.close()
