"""`tierckpt delete`: what goes, and what is refused as a whole."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.exported_job import wait_until
from tests.support.tiny_course import in_shm, versions_on_disk
from tierckpt.cli import run_command
from tierckpt.offline import rows_of, survey_of
from tierckpt.storage import ForkMarks
from tierckpt.testing import TinyJob

STEPS = 5


KEPT = {"local_every_steps": 1, "local_keep": 9}
FAR = {"persistent_path": "far", "persistent_every_steps": 100}


@pytest.fixture(autouse=True)
def job(tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with v1 to v5 on disk, v4 on the persistent level, and some in memory; it has ended."""
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))
    monkeypatch.setenv("TIERCKPT_AGENT", "inline")
    monkeypatch.chdir(tmp_path)
    with TinyJob(tmp_path / "ckpts", **KEPT, **FAR) as job:
        for step in range(1, STEPS):
            job.run(step)
            job.checkpointer.wait()
    wait_until(lambda: not [*Path("far").glob("lease.*")], "the agent gives up its lease")
    with TinyJob(tmp_path / "ckpts", **KEPT) as job:
        job.restore()
        job.run(STEPS)
        job.checkpointer.save(now=True)
        job.checkpointer.abandon()


def there() -> set[tuple[str, int]]:
    return {(row.level, row.version) for row in rows_of(survey_of(["ckpts", "far"]))}


def delete(*words: str, status: int = 0) -> None:
    assert run_command(["delete", "ckpts", *words]) == status


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    """Words of the refusal, after which all is as before."""
    words: list[str] = []
    before = there()
    yield words
    error = capsys.readouterr().err
    assert all(word in error for word in [*words, "Nothing was deleted"]), error
    assert there() == before


def test_versions_go_from_all_levels_and_the_rest_is_restored(
    capsys: pytest.CaptureFixture[str], shm_dir: Path, tmp_path: Path
) -> None:
    before = there()
    assert {("local", STEPS), ("memory", STEPS), ("persistent", STEPS - 1)} < before
    delete("--versions", "v1", "3..9", "--yes")
    out = capsys.readouterr().out
    assert f"v{STEPS - 1} on persistent: 1 of 1 shards" in out
    assert "a restart then takes v2" in out
    assert "ckpts: deleted 4 versions: v1, v3, v4, v5" in out
    assert {version for _, version in there()} == {2}
    with TinyJob(tmp_path / "ckpts", seed=99) as job:
        assert job.restore() == 2


def test_all_goes_and_the_next_run_starts_from_nothing(
    capsys: pytest.CaptureFixture[str], shm_dir: Path, tmp_path: Path
) -> None:
    assert run_command(["rollback", "ckpts", "2"]) == 0
    delete("--all", "--yes")
    assert "the next run starts from nothing" in capsys.readouterr().out
    assert there() == set()
    assert in_shm(shm_dir) == []
    assert versions_on_disk(tmp_path / "ckpts") == []
    with TinyJob(tmp_path / "ckpts") as job:
        assert job.restore() == 0


def test_a_running_job_keeps_all(tmp_path: Path) -> None:
    """Asked by another process: locks show nothing to their own."""
    before = there()
    command = [sys.executable, "-m", "tierckpt", "delete", "ckpts", "--all", "--yes"]
    with TinyJob(tmp_path / "ckpts") as job:
        done = subprocess.run(command, capture_output=True, text=True)
        job.checkpointer.abandon()
    assert (done.returncode, done.stdout) == (1, "")
    assert "ckpts: the job runs now: tierckpt halt ends it" in done.stderr
    assert there() == before


def test_a_persistent_place_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a job elsewhere, or one that was killed just now."""
    with TinyJob(tmp_path / "ckpts", **KEPT, **FAR) as job:
        job.restore()
        job.run(STEPS + 1)
        job.checkpointer.save(now=True)
        job.checkpointer.abandon()
    before = there()
    delete("--all", "--yes", status=1)
    error = capsys.readouterr().err
    assert "far is in use by" in error
    assert "its lease ends in" in error
    assert before <= there()  # the flush of the newest version may end only now


@pytest.mark.parametrize("holder", ["a pin", "a fork"])
def test_a_kept_version(holder: str, refused: list[str], tmp_path: Path) -> None:
    if holder == "a pin":
        assert run_command(["pin", "ckpts", "2"]) == 0
        refused += ["v2 is pinned", "tierckpt unpin ckpts 2 ends that"]
    else:
        assert run_command(["fork", "ckpts@2", "other"]) == 0
        refused += ["v2 is held for the fork", "tierckpt unpin ckpts 2 --forks ends that"]
        assert ForkMarks(tmp_path / "ckpts").all()
    delete("--versions", "1", "2", "--yes", status=1)


def test_a_typo(refused: list[str]) -> None:
    delete("--versions", "1", "44", "--yes", status=1)
    refused += ["there is no v44; near it: v2, v3, v4, v5"]


def test_nobody_to_ask(refused: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    delete("--all", status=1)
    refused += ["nobody can be asked", "--yes deletes"]


@pytest.mark.parametrize("answer", ["", "4"])
def test_another_answer(
    answer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO(f"{answer}\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    before = there()
    delete("--all", status=1)
    assert there() == before
    assert capsys.readouterr().out.endswith("Nothing was deleted\n")
