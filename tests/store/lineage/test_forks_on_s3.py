"""Forks from and to an object store, where marks are objects, and nothing can be renamed."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.s3_server import KEY, SECRET
from tierckpt import history
from tierckpt.cli import run_command
from tierckpt.lineage import OwnMarks
from tierckpt.offline import rows_of, survey_of
from tierckpt.storage import OriginFile
from tierckpt.storage.persistent import PersistentStore, VersionManifest, VersionName
from tierckpt.testing import TinyJob

pytestmark = pytest.mark.usefixtures("inline_agent")

STEPS = 4


class Places:
    """Jobs with a folder, and a place in the store, of their name."""

    def __init__(self, folder: Path, served: Path, shm_dir: Path) -> None:
        self.folder, self._shm = folder, str(shm_dir)
        self._url = f"s3://{folder.relative_to(served)}/far"

    def far(self, name: str) -> str:
        return f"{self._url}/{name}"

    def marks(self, name: str) -> list[str]:
        found = (self.folder / "far" / name).glob("*")  # the server keeps objects as files
        return sorted(f.suffix for f in found if f.suffix in (".hold", ".fork", ".json"))

    def job(self, name: str, **settings: Any) -> TinyJob:
        far = {"persistent_path": self.far(name), "persistent_every_steps": 2}
        near = {"shm_dir": self._shm, "local_keep": 1, "persistent_keep": 1}
        return TinyJob(self.folder / name, **near | far | settings)

    def train(self, name: str, steps: int) -> str:
        with self.job(name) as job:
            job.restore()
            return job.run(steps).fingerprint()

    def lose(self, name: str) -> None:
        shutil.rmtree(self.folder / name)


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
    assert [run_command(order), run_command(["fork", "--cancel", places.far("b")])] == [0, 0]
    assert (places.marks("a"), places.marks("b")) == ([], [])
    assert run_command(order) == 0
    assert run_command(["list", places.far("b")]) == 0
    assert f"the next run starts from {places.far('a')}@v{STEPS}" in capsys.readouterr().out
    with places.job("b", seed=9) as job:
        assert job.restore() == STEPS
        assert job.fingerprint() == state


def test_a_fork_on_a_new_node_is_known_by_its_record_in_the_store(
    places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was killed at the moment of its first version, before it ended the hold, with its node."""
    places.train("a", STEPS)
    with monkeypatch.context() as killed:
        killed.setattr(OwnMarks, "settle", lambda self, *safe: None)
        with places.job("b", fork_from=places.far("a")) as job:
            job.restore()
            job.run(STEPS + 2)
    places.lose("b")
    assert places.marks("a") == [".hold"]
    ends = f"tierckpt unpin {places.far('a')} {STEPS} --forks"
    assert run_command(["list", places.far("a")]) == 0
    assert ends not in capsys.readouterr().out, "the path of the fork leads to nothing now"
    with places.job("b", fork_from=places.far("a")) as job:
        assert job.restore() == STEPS + 2
        job.run(STEPS + 3)
        assert not [e.text() for e in job.events if "has no effect" in e.text()]
    assert places.marks("a") == [".fork"]
    origin = OriginFile(places.folder / "b").read()
    assert origin is not None
    assert (str(origin), origin.held) == (f"{places.far('a')}@v{STEPS}", False)


def test_a_bucket_with_several_jobs_leads_on_to_each(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        places.train(name, STEPS)
    capsys.readouterr()
    above = places.far("a").rpartition("/")[0]
    below = f"there are folders below it: {above}/a, {above}/b; give one of them"
    for command, text in (("list", "no checkpoints here"), ("log", "no run has left anything")):
        assert run_command([command, above]) == 0
        assert below in (out := capsys.readouterr().out)
        assert text in out
        assert run_command([command, f"{above}/a@v{STEPS}"]) == 0
        assert f"only a fork's source takes @v{STEPS}" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="no checkpoints here; there are folders below it"):
        history(above)
    assert run_command(["list", f"{above}/a", f"{above}/b"]) == 0
    assert f"2 jobs are here; for one of them: tierckpt list {above}/a" in capsys.readouterr().out


def test_the_manifests_of_many_versions_are_read_at_the_same_time(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, they would take a round trip each."""
    with places.job("a", persistent_keep="1, every 2") as job:
        for step in range(2, 2 * STEPS + 1, 2):
            job.run(step)
            job.checkpointer.wait()
    two, inner = threading.Barrier(2), PersistentStore.read_manifest

    def both(store: PersistentStore, name: VersionName) -> VersionManifest:
        two.wait(120)
        return inner(store, name)

    monkeypatch.setattr(PersistentStore, "read_manifest", both)
    there = survey_of(places.far("a"))
    monkeypatch.setattr(PersistentStore, "read_manifest", None)
    assert [row.iteration for row in rows_of(there)] == [2, 4, 6, 8], "none is read once more"
