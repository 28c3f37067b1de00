"""Forks from and to an object store, where marks are objects, and nothing can be renamed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.s3_server import KEY, SECRET
from tierckpt.cli.main import main
from tierckpt.testing.tiny_job import TinyJob

STEPS = 4


class Places:
    """Jobs with a folder, and a place in the store, of their name."""

    def __init__(self, folder: Path, served: Path, shm_dir: Path) -> None:
        self._folder, self._shm = folder, str(shm_dir)
        self._url = f"s3://{folder.relative_to(served)}/far"

    def far(self, name: str) -> str:
        return f"{self._url}/{name}"

    def marks(self, name: str) -> list[str]:
        found = (self._folder / "far" / name).glob("*")  # the server keeps objects as files
        return sorted(f.suffix for f in found if f.suffix in (".hold", ".fork", ".json"))

    def job(self, name: str, **settings: Any) -> TinyJob:
        far = {"persistent_path": self.far(name), "persistent_every_steps": 2}
        near = {"shm_dir": self._shm, "local_keep_last": 1, "persistent_keep_last": 1}
        return TinyJob(self._folder / name, **near, **far, **settings)

    def train(self, name: str, steps: int) -> str:
        with self.job(name) as job:
            job.restore()
            return job.run(steps).fingerprint()

    def lose(self, name: str) -> None:
        shutil.rmtree(self._folder / name)


@pytest.fixture
def places(
    tmp_path: Path,
    served: Path,
    endpoint: str,
    shm_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Places:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return Places(tmp_path, served, shm_dir)


def test_a_fork_of_stores_alone_is_exact_and_held_until_it_has_a_version(places: Places) -> None:
    state = places.train("a", STEPS)
    places.lose("a")
    with places.job("b", seed=9, fork_from=places.far("a")) as job:
        assert job.restore() == STEPS
        assert job.fingerprint() == state
        job.checkpointer.abandon()
    places.lose("b")
    assert (places.marks("a"), places.marks("b")) == ([".hold"], [".json"])
    places.train("a", STEPS + 2)
    with places.job("b", seed=8, fork_from=places.far("a")) as job:
        assert job.restore() == STEPS, "the record in the store names the version"
        assert job.fingerprint() == state
        job.run(STEPS + 2)
    assert places.marks("a") == [".fork"]


def test_the_command_orders_a_fork_between_stores(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    state = places.train("a", STEPS)
    order = ["fork", f"{places.far('a')}@{STEPS}", places.far("b")]
    assert [main(order), main(["fork", "--cancel", places.far("b")])] == [0, 0]
    assert (places.marks("a"), places.marks("b")) == ([], [])
    assert main(order) == 0
    assert main(["list", places.far("b")]) == 0
    assert f"the next start begins from {places.far('a')}@v{STEPS}" in capsys.readouterr().out
    with places.job("b", seed=9) as job:
        assert job.restore() == STEPS
        assert job.fingerprint() == state
