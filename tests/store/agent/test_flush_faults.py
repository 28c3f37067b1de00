"""A real job's flushes meet a killed agent, a full device, and a store that hangs, fails, forbids.

The training continues each time, only the version in progress is lost, and events report it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.storage.test_full_and_read_only import fill_up
from tests.support import limits
from tests.support.s3_server import KEY, SECRET, Proxy
from tierckpt import _faults
from tierckpt.events import Event
from tierckpt.format import ShardKey
from tierckpt.storage import CommitTimes, LocalStore
from tierckpt.storage.persistent import PersistentStore
from tierckpt.testing import TinyJob

FLUSHED = 3
NEVER = 1_000_000_000
PATIENCE_SECONDS = 60.0

MANIFEST_WRITTEN = "op=fsync,hit=6"
"""By the agent's file operations: the first ones of each kind are of the commit to local."""


class Job(TinyJob):
    """A job with the local and the persistent level, and versions on demand only."""

    def __init__(self, path: Path, shared: str, shm_dir: Path, **settings: Any) -> None:
        self.shared = shared
        super().__init__(
            path,
            shm_dir=str(shm_dir),
            persistent_path=shared,
            persistent_every_seconds=0,
            **{"persistent_every_steps": NEVER, "local_every_steps": NEVER, **settings},
        )

    def flush(self) -> None:
        """Order a flush of the current version, without waiting."""
        self.checkpointer.save(now=True)

    def run_until(self, true: Callable[[], Any]) -> None:
        """Train on; the agent's messages arrive only at boundaries."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not true():
            assert time.monotonic() < deadline, [e.text() for e in self.events[-20:]]
            time.sleep(0.01)  # the agent needs the time more
            self.run(self.iteration + 1)

    def versions(self, level: str) -> list[int]:
        """Versions that were committed there."""
        return [e.version for e in self.heard("committed", level)]

    def flushed(self) -> list[int]:
        return self.versions("persistent")

    def flush_failures(self) -> list[str]:
        return [e.message for e in self.heard("failed", "persistent")]


def undisturbed(steps: int) -> str:
    return TinyJob(None).run(steps).fingerprint()


def check_restores(shared: str, version: int, tmp_path: Path, shm_dir: Path) -> None:
    """Restores from the persistent level alone, to the bit."""
    shm = shm_dir / "elsewhere"
    shm.mkdir()
    with Job(tmp_path / "elsewhere", shared, shm, seed=99) as job:
        restored = job.restore()
        assert (int(restored), restored.levels) == (version, {"persistent": 1})
        assert job.fingerprint() == undisturbed(version)
        job.checkpointer.abandon()


# --- the agent -----------------------------------------------------------------------------------


def test_a_killed_agent_leaves_the_flush_to_the_next(
    tmp_path: Path, shm_dir: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = str(tmp_path / "shared")
    monkeypatch.setenv(_faults.FAULTS_VARIABLE, f"kill@file:{MANIFEST_WRITTEN}")
    monkeypatch.setenv(_faults.FIRED_VARIABLE, str(marks))
    with Job(tmp_path / "ckpts", shared, shm_dir) as job:
        job.run(FLUSHED)
        job.flush()
        job.run_until(lambda: list(marks.iterdir()))
        assert PersistentStore(shared).versions() == []
        job.run_until(job.flushed)
        assert any("agent ended unexpectedly" in e.message for e in job.heard("notice"))
        assert (job.flushed(), job.flush_failures()) == ([FLUSHED], [])
        job.checkpointer.abandon()
    check_restores(shared, FLUSHED, tmp_path, shm_dir)


def test_a_shard_that_rotted_on_the_disk_is_not_passed_on(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the persistent level it would count as sound, and a sound older version would go for
    it."""
    commit, shared = LocalStore.commit, str(tmp_path / "shared")

    def commit_and_rot(store: LocalStore, key: ShardKey, *rest: Any) -> CommitTimes:
        times = commit(store, key, *rest)
        with (store.directory / f"{key.stem}.safetensors").open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        return times

    monkeypatch.setattr(LocalStore, "commit", commit_and_rot)
    with Job(tmp_path / "ckpts", shared, shm_dir, agent="inline") as job:
        job.run(FLUSHED)
        job.flush()
        job.run_until(job.flush_failures)
        assert "differ from their checksum" in job.flush_failures()[0]
        assert PersistentStore(shared).versions() == []
        job.checkpointer.abandon()


# --- the place -----------------------------------------------------------------------------------


def test_a_full_persistent_device_lags_and_catches_up(
    small_tmpfs: Path, tmp_path: Path, shm_dir: Path
) -> None:
    shared, filler = str(small_tmpfs / "shared"), small_tmpfs / "somebody else's"
    with Job(tmp_path / "ckpts", shared, shm_dir) as job:
        job.run(FLUSHED)
        job.flush()
        job.run_until(job.flushed)
        fill_up(filler)
        behind = job.iteration
        job.flush()
        job.run_until(job.flush_failures)
        (message,) = job.flush_failures()
        assert "No space left on device" in message
        assert f"training continues, without this version in {shared}" in message
        (failed,) = job.heard("failed", "persistent")
        assert failed.behind_since == FLUSHED
        assert behind in job.versions("local"), "the levels before it do not suffer"
        for file in (filler, small_tmpfs / "one more"):
            file.unlink()
        assert [name.id.version for name in PersistentStore(shared).versions()] == [FLUSHED]
        newest = job.iteration
        job.flush()
        job.run_until(lambda: newest in job.flushed())
        job.checkpointer.abandon()
    check_restores(shared, newest, tmp_path, shm_dir)


@pytest.fixture
def bucket(proxy: Proxy, tmp_path: Path, served: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a place on a server that misbehaves on request; for agents, too."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    return f"s3://{tmp_path.relative_to(served)}/bucket"


def hanging_uploads() -> tuple[threading.Event, threading.Event, Callable[[str, str, int], None]]:
    """A rule of the proxy: the first event is set when an agent's upload arrives, and setting the
    second lets it continue."""
    come, resume = threading.Event(), threading.Event()

    def hang(method: str, path: str, number: int) -> None:
        if method == "PUT" and "/runs/" not in path:  # not the record of the run
            come.set()
            resume.wait(PATIENCE_SECONDS)

    return come, resume, hang


NO_PATIENCE = 0.5


def test_a_store_that_hangs_does_not_keep_the_job_from_ending(
    bucket: str, proxy: Proxy, tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent continues without the job."""
    limits.QUIET_LEVEL.set(monkeypatch, NO_PATIENCE)
    limits.FINAL_NOTICE.set(monkeypatch, 0.1)
    come, resume, hang = hanging_uploads()
    try:
        with Job(tmp_path / "ckpts", bucket, shm_dir) as job:
            job.run(FLUSHED)
            proxy.rule = hang
            job.flush()
            job.run_until(come.is_set)
        hangs, failed = job.heard("failed")
        pid = int(job.checkpointer._agent.settings.place().lock.read_text())
        assert (hangs.level, hangs.version) == ("persistent", FLUSHED)
        assert (failed.level, failed.version) == ("persistent", job.iteration)
        assert f"nothing has moved to {bucket} for" in failed.message
        assert f"stays in {tmp_path / 'ckpts'}" in failed.message
        assert f"(process {pid}) continues as long as it runs" in failed.message
        assert job.iteration in job.versions("local")
        assert job.heard("closed"), "and it was an end like others"
    finally:
        resume.set()
    os.waitpid(pid, 0)
    check_restores(bucket, job.iteration, tmp_path, shm_dir)


def test_a_failure_during_the_final_wait_is_reported_at_once(
    bucket: str, proxy: Proxy, tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last version's flush hangs until the failure of the one before was reported."""
    limits.FINAL_NOTICE.set(monkeypatch, 0.1)
    limits.LOOKS_FOR_ANSWERS.set(monkeypatch, 0.1)
    come, waits, heard = threading.Event(), threading.Event(), threading.Event()
    answers: list[bool] = []

    def listen(event: Event) -> None:
        if "waiting until all versions are stored on" in event.message:
            waits.set()
        if event.name == "failed":
            heard.set()

    def hang(method: str, path: str, number: int) -> int | None:
        if method != "PUT" or "/lease." not in path:
            return None
        come.set()
        answers.append((heard if answers else waits).wait(PATIENCE_SECONDS))
        return None if answers[1:] else 403

    try:
        with Job(tmp_path / "ckpts", bucket, shm_dir) as job:
            job.checkpointer._log.add_callback(listen)
            job.run(FLUSHED)
            proxy.rule = hang
            job.flush()
            job.run_until(come.is_set)
        assert answers[1:]
        assert all(answers)
        assert [event.version for event in job.heard("failed")] == [FLUSHED]
        assert job.flushed() == [job.iteration]
    finally:
        waits.set()
        heard.set()


def test_a_signal_that_comes_to_the_end_makes_it_short(
    bucket: str, proxy: Proxy, tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store hangs, and the launcher grants no time; the agent has it."""
    limits.FINAL_NOTICE.set(monkeypatch, 0.1)
    limits.LOOKS_FOR_ANSWERS.set(monkeypatch, 0.1)
    come, resume, hang = hanging_uploads()

    def heard(event: Event) -> None:
        if "waiting until all versions are stored on" in event.message:
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    try:
        with Job(tmp_path / "ckpts", bucket, shm_dir, halt_grace_seconds=0) as job:
            job.checkpointer._log.add_callback(heard)
            job.run(FLUSHED)
            proxy.rule = hang
            job.flush()
            job.run_until(come.is_set)
        pid = int(job.checkpointer._agent.settings.place().lock.read_text())
        failed = job.heard("failed", "persistent")
        assert [event.version for event in failed] == [FLUSHED, job.iteration]
        assert f"not all versions are stored on {bucket} yet" in failed[1].message
        assert f"(process {pid}) continues as long as it runs" in failed[1].message
        assert job.heard("closed")
    finally:
        signal.signal(signal.SIGUSR1, before)
        resume.set()
    os.waitpid(pid, 0)
    check_restores(bucket, job.iteration, tmp_path, shm_dir)


def test_a_forbidding_store_costs_the_version_and_a_busy_one_nothing(
    bucket: str, proxy: Proxy, tmp_path: Path, shm_dir: Path
) -> None:
    with Job(tmp_path / "ckpts", bucket, shm_dir) as job:
        job.run(FLUSHED)
        proxy.rule = lambda method, path, number: 403 if method == "PUT" else None
        job.flush()
        job.run_until(job.flush_failures)
        (message,) = job.flush_failures()
        assert "check the credentials" in message
        assert f"without this version in {bucket}" in message
        used_up = (403, "QuotaExceeded")
        proxy.rule = lambda method, path, number: used_up if method == "PUT" else None
        job.flush()
        job.run_until(lambda: len(job.flush_failures()) == 2)
        assert "the quota is used up: free space" in job.flush_failures()[-1]
        refused = iter([503] * 3)
        proxy.rule = lambda method, path, number: next(refused, None) if method == "PUT" else None
        newest = job.iteration
        job.flush()
        job.run_until(job.flushed)
        assert next(refused, None) is None
        assert (job.flushed(), len(job.flush_failures())) == ([newest], 2)
        job.checkpointer.abandon()
    check_restores(bucket, newest, tmp_path, shm_dir)
