"""A persistent path with another job's versions: they are restored, and a notice names the job."""

from __future__ import annotations

import logging
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tierckpt.storage import job_id_of
from tierckpt.storage.persistent import Lease, PersistentError
from tierckpt.testing import TinyJob

STEPS = 2
PATIENCE_SECONDS = 60.0


@pytest.fixture
def job(tmp_path: Path, shm_dir: Path) -> Any:
    """`job(path, **settings)`: all of them have one persistent path."""

    def start(path: str, **settings: Any) -> TinyJob:
        given = {
            "shm_dir": str(shm_dir),
            "agent": "inline",
            "persistent_path": str(tmp_path / "shared"),
            "persistent_every_steps": 1,
            **settings,
        }
        return TinyJob(tmp_path / path, **given)

    return start


def warnings(found: TinyJob) -> list[str]:
    return [e.message for e in found.heard("notice") if "was written by job" in e.message]


def test_a_version_of_another_job_is_reported_with_the_holder_of_the_place(job: Any) -> None:
    with job("a", job_id="one") as one:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not one.heard("committed", "persistent"):  # which arrives only at a boundary
            assert time.monotonic() < deadline
            time.sleep(0.01)
            one.run(one.iteration + 1)
        with job("b", job_id="two", seed=99) as two:
            assert two.restore() > 0
            (warning,) = warnings(two)
            assert "was written by job 'one'; this job is called 'two'" in warning
            assert "give it one job_id" in warning
            assert "each job needs its own" in warning
            assert "The path is in use by one on " in warning
            two.checkpointer.abandon()
        one.checkpointer.abandon()


def test_a_job_that_moved_under_another_name_is_shown_how_to_keep_its_own(job: Any) -> None:
    with job("here") as first:
        first.run(STEPS)
    with job("there", seed=99) as second:
        assert second.restore() == STEPS
        (warning,) = warnings(second)
        assert "written by job 'here-" in warning
        assert "this job is called 'there-" in warning
        assert "in use by" not in warning, "it ended, and gave the place back"
        second.run(STEPS + 1)
    with job("there") as third:
        assert third.restore() == STEPS + 1
        assert warnings(third) == [], "its own by now"


@pytest.mark.parametrize("path", ["here", "there"])
def test_a_jobs_own_version_is_not_reported(path: str, job: Any) -> None:
    with job("here", job_id="job") as first:
        first.run(STEPS)
    with job(path, job_id="job") as second:
        assert second.restore() == STEPS
        assert warnings(second) == []


@pytest.mark.parametrize(("back", "told"), [("moved", 1), ("here", 0)])
def test_memory_left_by_a_moved_directory_is_reported(
    back: str, told: int, job: Any, tmp_path: Path
) -> None:
    """It is found by the path that the job had."""
    alone = {"persistent_path": "", "local_every_steps": 2}
    first = job("here", **alone).run(3)
    first.checkpointer.complete()
    first.checkpointer.abandon()
    if back == "moved":
        (tmp_path / "here").rename(tmp_path / "moved")
    with job(back, seed=99, **alone) as second:
        assert second.restore() == 3 - told
        found = warnings(second)
        assert len(found) == told
        for text in found:
            name = job_id_of(tmp_path / "here")
            assert f"v2 was written by job {name!r}, which has v3 in memory here" in text
            assert f"restart it with job_id={name!r}" in text
        second.checkpointer.abandon()
    with job("moved", seed=99, job_id=job_id_of(tmp_path / "here"), **alone) as third:
        assert third.restore() == 3, "as it was told"


@pytest.mark.parametrize(
    ("setting", "on_disk"), [("shm_dir", True), ("node", False), ("job_id", True), ("", False)]
)
def test_memory_of_a_killed_run_in_another_place_is_reported(
    setting: str, on_disk: bool, job: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Its claim names the folder: each of these settings names another folder."""
    (other := shm_dir / "other").mkdir()
    alone = {"persistent_path": "", "persistent_every_steps": 0}
    alone["local_every_steps"] = 2 if on_disk else 1000
    changed = {"shm_dir": str(other), "node": "b", "job_id": "mine"}
    before = {setting: changed[setting]} if setting else {}
    first = job("ckpts", **alone, **before).run(3)
    first.settle()
    (claim,) = (tmp_path / "ckpts").glob(".claim.*")
    # By another process: this one would drop its lock.
    left = subprocess.check_output(["cat", str(claim)])
    first.checkpointer.abandon()
    claim.write_bytes(left)
    with job("ckpts", seed=99, **alone) as second:
        found = 2 if on_disk else 0
        assert second.restore() == (found if setting else 3)
        said = [e.message for e in second.heard("notice") if e.severity == logging.WARNING]
        second.checkpointer.abandon()
    if not setting:
        assert said == []
        return
    (text,) = said
    assert text.startswith(f"v3 is in memory in {first.checkpointer._resources.job.path}, ")
    assert (f"continues from v{found}" if found else "found nothing") in text
    assert text.endswith(f"restart it with {setting}={changed[setting]!r}")
    with job("ckpts", seed=99, **alone, **before) as third:
        assert third.restore() == 3, "as it was told"


def test_a_store_that_does_not_name_its_holder_costs_no_restore(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job("a", job_id="one") as first:
        first.run(STEPS)

    def forbidden(*_: object) -> None:
        raise PersistentError("no right to read", "", transient=False)

    with monkeypatch.context() as patch, job("b", job_id="two") as second:
        patch.setattr(Lease, "newest", forbidden)
        assert second.restore() == STEPS
        assert len(warnings(second)) == 1
        second.checkpointer.abandon()
