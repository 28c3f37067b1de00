"""`tierckpt halt` and jobs that have not written to the directory that they watch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tierckpt.halt import controller
from tierckpt.storage import JobDirectory, job_id_of, jobs_at
from tierckpt.testing import TinyJob

IN_MEMORY = {"local_every_steps": 0, "local_every_seconds": 0.0}
SELDOM = {"persistent_every_steps": 0, "persistent_every_seconds": 3600.0}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "LOOK_SECONDS", 0.001)


def halt(path: Path, shm_dir: Path, *given: str) -> subprocess.CompletedProcess[str]:
    """Run it in a separate process: the job's own process would release the job's lock by reading
    that file."""
    command = [sys.executable, "-m", "tierckpt", "halt", str(path), *given]
    environment = {**os.environ, "TIERCKPT_SHM_DIR": str(shm_dir)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def ends(job: TinyJob) -> bool:
    deadline = time.monotonic() + 120
    while not job.checkpointer.should_exit():
        if time.monotonic() > deadline:
            return False
        job.run(job.iteration + 1)
    return True


@pytest.mark.parametrize("given", [{}, {"job_id": "mine", "node": "n1"}], ids=str)
def test_a_job_in_memory_alone_is_asked_by_its_path(
    given: dict[str, Any], path: Path, shm_dir: Path
) -> None:
    """The job writes nothing there before its end, and the directory does not exist."""
    with TinyJob(path, agent="inline", shm_dir=str(shm_dir), **IN_MEMORY, **given) as job:
        job.run(2)
        assert not path.exists()
        shown = halt(path, shm_dir, "--show")
        assert (shown.returncode, shown.stdout) == (0, f"{path}: the job may continue\n")
        asked = halt(path, shm_dir, "--now")
        assert asked.returncode == 0, asked.stderr
        name = JobDirectory.at(
            shm_dir, given.get("job_id") or job_id_of(path), given.get("node", "")
        )
        assert f"job {name.path.name!r} on this machine reads it" in asked.stdout
        assert ends(job)
        other = halt(path.with_name("another"), shm_dir, "--now")
        assert other.returncode == 1
        assert not path.with_name("another").exists()
    again = halt(path.with_name("another"), shm_dir, "--now")
    assert again.returncode == 1, "a job that has ended looks nowhere"


@pytest.mark.parametrize("there", [True, False], ids=["empty", "not there"])
def test_a_job_is_asked_by_its_persistent_path_before_its_first_flush(
    there: bool, path: Path, shm_dir: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    if there:
        shared.mkdir()
    settings = {"persistent_path": str(shared), "shm_dir": str(shm_dir), **SELDOM}
    with TinyJob(path, agent="inline", **settings) as job:
        job.run(2)
        asked = halt(shared, shm_dir, "--now")
        assert asked.returncode == 0, asked.stderr
        assert ends(job)


def test_a_path_is_the_same_however_it_is_written(
    path: Path, shm_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with TinyJob(path, agent="inline", shm_dir=str(shm_dir), **IN_MEMORY) as job:
        job.run(1)
        assert halt(tmp_path / "link" / "ckpts", shm_dir, "--now").returncode == 0
        assert ends(job)


def test_a_dead_job_looks_nowhere_and_an_invalid_list_names_nothing(shm_dir: Path) -> None:
    job = JobDirectory.at(shm_dir, "job")
    job.create()
    job.lock_path(0).write_text(f"1\n{json.dumps(['/dead'])}")
    assert [(each.job, each.watched()) for each in jobs_at(shm_dir)] == [("job", set())]
    program = (
        "import sys; from tierckpt.storage.job_directory import JobDirectory, take_lock\n"
        "job = JobDirectory.at(sys.argv[1], 'job'); job.lock_rank(0, watches=['/a', '/b c'])\n"
        "take_lock(job.lock_path(1)); print('held', flush=True); sys.stdin.read()"
    )
    line = [sys.executable, "-c", program, str(shm_dir)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as living:
        assert living.stdout is not None
        assert living.stdout.readline() == b"held\n"
        assert job.watched() == {"/a", "/b c"}
