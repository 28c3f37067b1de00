"""A level that cannot be written costs checkpoints, with errors, and never a training step."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tierckpt.errors import ConfigError
from tierckpt.events import decode, lines_of
from tierckpt.testing import TinyJob, injected

pytestmark = pytest.mark.usefixtures("inline_agent")

STEPS = 6


@pytest.fixture
def settings(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    # Memory stands for a disk.
    monkeypatch.setattr("tierckpt.storage.slots.memory_kind", lambda directory: "")
    # Nothing is retired: the freed space would let a job continue on a full disk.
    return {"shm_dir": str(shm_dir), "local_keep": 100}


@pytest.fixture(scope="module")
def course() -> dict[int, str]:
    job = TinyJob(None)
    return {step: job.run(step).fingerprint() for step in range(1, 4 * STEPS + 1)}


def check_continued(job: TinyJob, course: dict[int, str], reason: str) -> int:
    """The last steps were made, and the errors say why and since when the level is behind."""
    job.settle()
    assert job.fingerprint() == course[job.iteration]
    failures = job.heard("failed", "local")
    assert failures
    assert all(reason in e.message for e in failures)
    assert all("training continues" in e.message for e in failures)
    assert not job.heard("failed", "memory")
    committed = [e.version for e in job.heard("committed", "local")]
    assert failures[-1].behind_since == max(committed)
    return len(committed)


def check_recovered(job: TinyJob, course: dict[int, str], committed_before: int) -> None:
    until = job.iteration + STEPS
    job.run(until)
    job.settle()
    assert len(job.heard("committed", "local")) > committed_before
    assert job.heard("committed", "local")[-1].version == until
    assert job.fingerprint() == course[until]


def check_restores(path: Path, shm: Path, step: int, course: dict[int, str]) -> None:
    """From disk alone."""
    shm.mkdir()
    with TinyJob(path, seed=99, shm_dir=str(shm)) as job:
        restored = job.restore()
        assert (int(restored), restored.levels) == (step, {"local": 1})
        assert job.fingerprint() == course[step]


def test_a_full_disk(
    small_tmpfs: Path, shm_dir: Path, settings: Any, course: dict[int, str]
) -> None:
    path = small_tmpfs / "ckpts"
    filler = small_tmpfs / "somebody else's"
    with TinyJob(path, **settings) as job:
        job.run(STEPS)
        job.settle()
        fill_up(filler)
        job.run(2 * STEPS)
        committed = check_continued(job, course, "No space left on device")
        assert not list(path.glob(".*tmp")), "what was begun is removed: the disk is full"
        for file in (filler, small_tmpfs / "one more"):
            file.unlink()
        check_recovered(job, course, committed)
    check_restores(path, shm_dir / "elsewhere", 3 * STEPS, course)


def fill_up(filler: Path) -> None:
    """To the last page: a short write is no error yet."""
    filler.write_bytes(bytes(os.statvfs(filler.parent).f_bavail * 4096))
    with pytest.raises(OSError, match="No space left"):
        (filler.parent / "one more").write_bytes(b"x")


def test_a_path_through_a_file(
    tmp_path: Path, shm_dir: Path, settings: Any, course: dict[int, str]
) -> None:
    """Not even the directory can be created; only the memory level remains."""
    obstacle = tmp_path / "file"
    obstacle.write_text("in the way")
    path = obstacle / "ckpts"
    with TinyJob(path, **settings) as job:
        job.run(STEPS)
        job.settle()
        failures = job.heard("failed", "local")
        assert failures
        assert all("Not a directory" in e.message and e.behind_since is None for e in failures)
    notices = [e.message for e in job.heard("notice")]
    assert any(f"v{STEPS} is not durable" in n for n in notices)
    with TinyJob(path, seed=99, **settings) as second:
        restored = second.restore()
        assert (int(restored), restored.levels) == (STEPS, {"memory": 1})
        obstacle.unlink()
        second.run(2 * STEPS)
        assert second.fingerprint() == course[2 * STEPS]
    check_restores(path, shm_dir / "elsewhere", 2 * STEPS, course)


def test_a_file_as_path_is_refused(tmp_path: Path, settings: Any) -> None:
    path = tmp_path / "file"
    path.write_text("somebody's")
    with pytest.raises(ConfigError, match=f"path: {path} is a file"):
        TinyJob(path, **settings)
    assert path.read_text() == "somebody's"


@pytest.mark.parametrize("point", ["copy", "seal", "refill"])
def test_a_snapshot_that_fails_costs_one_version(
    point: str, tmp_path: Path, settings: Any, course: dict[int, str]
) -> None:
    with TinyJob(tmp_path / "ckpts", **settings) as job, injected(f"enomem@{point}:version=4"):
        job.run(2 * STEPS)
        job.settle()
        assert job.fingerprint() == course[2 * STEPS]
        failed = [e for e in job.heard("failed", "memory") if e.version == 4]
        assert any("injected" in e.message for e in failed)
        assert {e.version for e in job.heard("failed")} == {4}
        sealed = [e.version for e in job.heard("sealed")]
        assert sealed == [v for v in range(1, 2 * STEPS) if v != 4]


def test_an_agent_that_cannot_be_started_is_a_notice(
    tmp_path: Path,
    settings: Any,
    course: dict[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tierckpt.agent import AgentConnection

    start, calls = AgentConnection._start_process, []

    def fail_at_first(self: AgentConnection) -> None:
        calls.append(1)
        if len(calls) <= 3:
            raise OSError(errno.EAGAIN, "no more processes")
        start(self)

    monkeypatch.setattr(AgentConnection, "_start_process", fail_at_first)
    with TinyJob(tmp_path / "ckpts", agent="process", **settings) as job:
        job.run(STEPS)
        job.settle()
        assert job.fingerprint() == course[STEPS]
        assert any("no more processes" in e.message for e in job.heard("notice"))
        assert job.heard("committed", "local")[-1].version == STEPS


def test_no_place_for_events_costs_their_file_and_not_the_job(
    tmp_path: Path, settings: dict[str, Any], course: dict[int, str]
) -> None:
    (tmp_path / "a file").write_text("")
    with TinyJob(tmp_path / "c", events_dir=str(tmp_path / "a file"), **settings) as job:
        assert job.run(STEPS).fingerprint() == course[STEPS]
    (said,) = [e for e in job.heard("notice") if "events_dir" in e.message]
    assert said.severity == logging.ERROR
    assert "File exists" in said.message


def test_a_missing_memory_folder_is_named_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no/such/tierckpt-\d+: .*No such file.*shm_dir must be"):
        TinyJob(tmp_path / "c", shm_dir=str(tmp_path / "no" / "such"))


def test_a_full_disk_under_the_events_costs_their_file_and_not_the_end_of_the_job(
    tmp_path: Path, small_tmpfs: Path, settings: dict[str, Any], course: dict[int, str]
) -> None:
    file = small_tmpfs / "events-r00000.jsonl"
    with TinyJob(tmp_path / "c", events_dir=str(small_tmpfs), **settings) as job:
        job.run(STEPS)
        fill_up(small_tmpfs / "filler")
        job.run(4 * STEPS)
        assert job.fingerprint() == course[4 * STEPS]
    said = [e for e in job.heard("notice") if "no more events are written" in e.message]
    assert [e.severity for e in said] == [logging.ERROR]
    events = list(filter(None, map(decode, lines_of(file))))
    assert max(event["version"] for event in events) >= STEPS - 1
    (small_tmpfs / "filler").unlink()
    with TinyJob(tmp_path / "c", events_dir=str(small_tmpfs), **settings) as job:
        assert job.restore() == 4 * STEPS
    lines = [*map(decode, lines_of(file))]
    assert lines.count(None) <= 1, "the disk may take half of the last line"
    assert "restored" in [event["name"] for event in lines if event]
