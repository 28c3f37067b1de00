"""Two jobs at one path on two machines: told apart, and a dead one's claim is nobody's."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store.processes import end, python
from tierckpt import claims, filelock
from tierckpt.claims import PREFIX, Claims, launch_of
from tierckpt.jobdirectory import JobBusyError
from tierckpt.testing import TinyJob

TOKEN, OTHERS = "00aa", "11bb"
HOLD = (
    "import json, sys; from tierckpt.claims import Claims\n"
    "found = Claims(sys.argv[1], sys.argv[2], 0, print, json.loads(sys.argv[3]))\n"
    "assert found.stake() == ''; print('staked', flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "HERE_SECONDS", 0.3)
    monkeypatch.setattr(claims, "ELSEWHERE_SECONDS", 0.3)


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def mine(tmp_path: Path, notices: list[str]) -> Iterator[Any]:
    """`mine(node=0, **environment)`: a claim of this process."""
    made = []

    def claim(node: int = 0, token: str = TOKEN, **environment: str) -> Claims:
        made.append(
            Claims(tmp_path, token, node, lambda text, _: notices.append(text), environment)
        )
        return made[-1]

    yield claim
    for each in made:
        each.release()


@pytest.fixture
def living(tmp_path: Path) -> Iterator[Any]:
    """`living(**environment)`: another job, in a process of its own, that has claimed the place."""
    made = []

    def start(**environment: str) -> subprocess.Popen[str]:
        process = python(HOLD, tmp_path, OTHERS, json.dumps(environment))
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "staked\n"
        return process

    yield start
    for process in made:
        process.kill()
        end(process)


def marks(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name.startswith(PREFIX))


def test_nodes_of_one_job_share_a_place_and_leave_nothing(tmp_path: Path, mine: Any) -> None:
    zero, one = mine(0), mine(1)
    assert (zero.stake(), one.stake()) == ("", "")
    assert marks(tmp_path) == [f".claim.{TOKEN}.0", f".claim.{TOKEN}.1"]
    zero.release()
    one.release()
    assert marks(tmp_path) == []


def test_a_job_that_lives_is_named_and_left_alone(
    tmp_path: Path, mine: Any, living: Any, notices: list[str]
) -> None:
    other = living()
    why = mine().stake()
    assert f"another job is at work in {tmp_path} (process {other.pid} on " in why
    assert "give this one another path" in why
    assert f"remove {tmp_path}/.claim.{OTHERS}.0" in why
    assert marks(tmp_path) == [f".claim.{OTHERS}.0"]
    (text,) = notices
    assert f"is in use by process {other.pid}" in text
    (tmp_path / f".claim.{OTHERS}.0").unlink()
    assert mine().stake() == "", "the way out that was named"


def test_a_dead_jobs_claim_is_taken_over(
    tmp_path: Path, mine: Any, living: Any, notices: list[str]
) -> None:
    other = living()
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert marks(tmp_path) == [f".claim.{OTHERS}.0"]
    assert mine().stake() == ""
    assert (marks(tmp_path), notices) == ([f".claim.{TOKEN}.0"], [])


def test_one_that_is_just_dying_is_waited_for(
    mine: Any, living: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = living()
    naps = []

    def kill(seconds: float) -> None:
        naps.append(seconds)
        other.kill()
        other.wait()

    monkeypatch.setattr(claims.time, "sleep", kill)
    monkeypatch.setattr(claims, "HERE_SECONDS", 60.0)
    assert mine().stake() == ""
    assert len(naps) == 1


def test_a_life_that_hangs_keeps_no_successor_of_the_same_launch_out(
    tmp_path: Path, mine: Any, living: Any
) -> None:
    living(SLURM_JOB_ID="7")
    assert mine(SLURM_JOB_ID="7").stake() == ""
    assert len(marks(tmp_path)) == 2
    assert "another job" in mine(token="22cc", SLURM_JOB_ID="8").stake()


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"TORCHELASTIC_RUN_ID": "a"}, "torchrun a"),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "a"}, "Slurm job 7 of a cluster"),
        ({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "h"}, ""),
        (
            {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "h", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"},
            "Horovod h:1",
        ),
    ],
)
def test_launches_have_names_where_launchers_give_them(
    environment: dict[str, str], name: str
) -> None:
    assert launch_of(environment) == name


def test_another_claim_of_this_very_process_is_seen(tmp_path: Path, mine: Any) -> None:
    """Its own locks do not keep a process out."""
    assert mine(token=OTHERS).stake() == ""
    assert f"process {os.getpid()} on " in mine().stake()
    assert marks(tmp_path) == [f".claim.{OTHERS}.0"]


def test_a_claim_that_says_nothing_of_its_holder_counts(tmp_path: Path, mine: Any) -> None:
    path = tmp_path / f".claim.{OTHERS}.0.new"
    holder = python(
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True); sys.stdin.read()",
        path,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    assert "another job is at work" in mine().stake()
    holder.kill()
    end(holder)
    assert mine().stake() == ""
    assert marks(tmp_path) == [f".claim.{TOKEN}.0"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_the_job_goes_on_and_is_told(
    code: int,
    tmp_path: Path,
    mine: Any,
    living: Any,
    notices: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    living()

    def none_here(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", none_here)
    assert mine().stake() == ""
    (text,) = notices
    assert "a job on another machine that has the same path would not be found" in text
    assert marks(tmp_path) == [f".claim.{OTHERS}.0"], "and touches nobody's"


def test_whoever_was_taken_for_dead_before_it_had_its_lock_tries_again(
    tmp_path: Path, mine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one looks between the making of the file and its lock."""
    removed = []
    lock = filelock.try_lock

    def late(fd: int) -> bool:
        if not removed:
            removed.append(tmp_path / f".claim.{TOKEN}.0.new")
            removed[0].unlink()
        return lock(fd)

    monkeypatch.setattr(filelock, "try_lock", late)
    assert mine().stake() == ""
    assert removed
    assert marks(tmp_path) == [f".claim.{TOKEN}.0"]


# --- in a job ------------------------------------------------------------------------------------

JOB = (
    "import sys; from tierckpt.testing import TinyJob\n"
    "with TinyJob(sys.argv[1], shm_dir=sys.argv[2], node='other', agent='inline') as job:\n"
    "    job.run(2); print('running', flush=True); sys.stdin.read()"
)


def test_a_second_job_is_refused_until_the_first_one_has_ended(
    tmp_path: Path, shm_dir: Path
) -> None:
    """On another machine: its memory has nothing of this one's."""
    path, memory = tmp_path / "ckpts", shm_dir / "another machine's"
    memory.mkdir()
    settings = {"shm_dir": str(shm_dir), "agent": "inline"}
    first = python(JOB, path, memory)
    assert first.stdout is not None
    assert first.stdout.readline() == "running\n"
    with pytest.raises(JobBusyError, match=f"another job is at work in {path}.*{first.pid}"):
        TinyJob(path, **settings)
    first.kill()
    end(first)
    with TinyJob(path, **settings) as job:
        assert job.restore() == 2
        assert len(marks(path)) == 1
        job.run(3)
    assert marks(path) == []


def test_one_without_a_local_level_claims_nothing(tmp_path: Path, shm_dir: Path) -> None:
    path = tmp_path / "ckpts"
    nothing = {"local_every_steps": 0, "local_every_seconds": 0.0}
    with TinyJob(path, shm_dir=str(shm_dir), **nothing) as job:
        job.run(2)
    assert not path.exists()
