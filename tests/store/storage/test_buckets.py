"""A missing (perhaps mistyped) bucket is no fresh start; an empty prefix is one."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.support.persistent_shards import s3_options
from tests.support.s3_server import Proxy
from tierckpt.cli import run_command
from tierckpt.config import STORAGE_OPTIONS
from tierckpt.errors import RestoreError
from tierckpt.storage.persistent import (
    ObstoreBackend,
    PersistentError,
    PersistentStore,
    RetryPolicy,
)
from tierckpt.testing import TinyJob

VARIABLE = f"TIERCKPT_{STORAGE_OPTIONS.upper()}"
STEPS = 2
PATIENCE_SECONDS = 60.0


class Bucket:
    """A bucket that does not exist until the server makes it: the server caches its listings."""

    def __init__(self, endpoint: str) -> None:
        self.name, self._options = f"bucket-{uuid.uuid4().hex[:8]}", s3_options(endpoint)

    def make(self) -> None:
        self._ask("PUT")

    def remove(self) -> None:
        self._ask("DELETE")

    def _ask(self, method: str) -> None:
        backend = ObstoreBackend(f"s3://{self.name}", **self._options)
        url = backend._client.sign(backend._store, method, "", timedelta(minutes=1))
        with urlopen(Request(url, method=method)) as answer:
            assert answer.status in (200, 204)


@pytest.fixture
def gone(endpoint: str, served: Path) -> Iterator[Bucket]:
    bucket = Bucket(endpoint)
    yield bucket
    shutil.rmtree(served / bucket.name, ignore_errors=True)


@pytest.fixture
def start(tmp_path: Path, shm_dir: Path) -> Any:
    def start(url: str, **options: Any) -> TinyJob:
        given = {"persistent_path": url, STORAGE_OPTIONS: options, "persistent_every_steps": 1}
        return TinyJob(tmp_path / "ckpts", shm_dir=str(shm_dir), agent="inline", **given)

    return start


def test_a_missing_bucket_is_an_error_until_it_is_made(
    gone: Bucket,
    endpoint: str,
    start: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, options = f"s3://{gone.name}/deep/in/it", s3_options(endpoint)
    monkeypatch.setenv(VARIABLE, json.dumps(options))
    told = f"there is no bucket '{gone.name}'"
    with start(url, **options) as job:
        with pytest.raises(RestoreError, match=f"{told}.*create the bucket") as refused:
            job.restore()
        assert "does not start from the beginning" in str(refused.value)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not job.heard("failed", "persistent"):  # a job that does not restore gets the notice
            assert time.monotonic() < deadline
            time.sleep(0.01)
            job.run(job.iteration + 1)
        assert told in job.heard("failed", "persistent")[0].text()
        assert run_command(["list", url]) == 1
        assert told in capsys.readouterr().out
        gone.make()
        assert run_command(["list", url]) == 0
        assert "no checkpoints here" in capsys.readouterr().out
        job.run(job.iteration + 1)
    assert PersistentStore(url, **options).versions(), "the way out that was named"
    assert run_command(["list", url]) == 0


def test_an_empty_prefix_is_a_fresh_start_and_costs_one_request(gone: Bucket, proxy: Proxy) -> None:
    for place in ("", "/job"):
        backend = ObstoreBackend(f"s3://{gone.name}{place}", **s3_options(proxy.url))
        with pytest.raises(FileNotFoundError, match="no bucket"):
            backend.sizes()
        backend.close()
    gone.make()
    proxy.reset()
    backend = ObstoreBackend(f"s3://{gone.name}/job", **s3_options(proxy.url))
    assert [backend.sizes() for _ in range(3)] == [{}, {}, {}]
    assert len(proxy.requests) == 3, "a listing says both"
    gone.remove()
    with pytest.raises(FileNotFoundError, match="no bucket"):
        backend.sizes()
    backend.close()


def test_a_bucket_that_may_be_listed_alone_is_there(gone: Bucket, proxy: Proxy) -> None:
    gone.make()
    proxy.rule = lambda method, path, number: 403 if method == "HEAD" else None
    backend = ObstoreBackend(f"s3://{gone.name}/job", **s3_options(proxy.url))
    assert backend.sizes() == {}
    backend.close()


def test_where_access_is_denied_nothing_is_taken_for_empty(gone: Bucket, proxy: Proxy) -> None:
    gone.make()
    proxy.rule = lambda method, path, number: 403
    store = PersistentStore(
        f"s3://{gone.name}/job", retry=RetryPolicy(tries=1), **s3_options(proxy.url)
    )
    with pytest.raises(PersistentError, match="credentials"):
        store.versions()
    store.close()


def test_a_store_without_buckets_has_fresh_starts(start: Any) -> None:
    url = f"memory://{uuid.uuid4().hex}/ckpts"
    with start(url) as job:
        assert job.restore() == 0
        job.run(STEPS)
    assert PersistentStore(url).versions()
