"""The agent is killed in the middle of a commit: another one commits its shards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tierckpt import _faults
from tierckpt.testing import TinyJob

NEVER = 1_000_000_000


def start(
    rules: str, tmp_path: Path, shm_dir: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> TinyJob:
    monkeypatch.setenv(_faults.FAULTS_VARIABLE, rules)
    monkeypatch.setenv(_faults.FIRED_VARIABLE, str(marks))
    return TinyJob(tmp_path / "ckpts", shm_dir=str(shm_dir), local_every_steps=NEVER)


def check_resumes(tmp_path: Path, shm_dir: Path, version: int) -> None:
    """Restores from the disk alone, to the bit."""
    undisturbed = TinyJob(None).run(version).fingerprint()
    shutil.rmtree(shm_dir)
    shm_dir.mkdir()
    with TinyJob(tmp_path / "ckpts", shm_dir=str(shm_dir), seed=5) as job:
        restored = job.restore()
        assert (int(restored), restored.levels) == (version, {"local": 1})
        assert job.fingerprint() == undisturbed
        job.checkpointer.abandon()


def test_the_last_version_of_a_job_is_on_disk_nevertheless(
    tmp_path: Path, shm_dir: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start("kill@file:op=write_manifest", tmp_path, shm_dir, marks, monkeypatch) as job:
        job.run(3)
    assert len(list(marks.iterdir())) == 1
    told = [e.message for e in job.events if e.name == "notice"]
    assert any(
        "agent ended unexpectedly; a new one commits the shards that it still had" in t
        for t in told
    )
    assert [e.version for e in job.events if (e.name, e.level) == ("committed", "local")] == [3]
    assert not [e for e in job.events if e.name == "failed"]
    check_resumes(tmp_path, shm_dir, 3)


def test_a_commit_that_two_agents_did_not_survive_is_given_up(
    tmp_path: Path, shm_dir: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version would kill agent after agent. The training continues, and the next commit counts
    from zero."""
    rules = "kill@file:op=fsync;kill@file:op=fsync,hit=1;kill@file:op=rename,hit=1"
    with start(rules, tmp_path, shm_dir, marks, monkeypatch) as job:
        job.run(2)
        job.checkpointer.save(now=True)
        failed = [e for e in job.events if (e.name, e.level) == ("failed", "local")]
        assert [e.version for e in failed] == [2]
        assert "the agent ended unexpectedly" in failed[0].message
        assert len(list(marks.iterdir())) == 2
        job.run(4)
    assert len(list(marks.iterdir())) == 3, "a newer version may kill one, too"
    assert [e.version for e in job.events if (e.name, e.level) == ("committed", "local")] == [4]
    check_resumes(tmp_path, shm_dir, 4)
