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
from tests.support.processes import end, python
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

# By the agent's file operations: the first ones of each kind are of the commit to local.
PHASES = {
    "lease written": "op=fsync,hit=2",
    "lease about to be taken": "op=rename,hit=3",
    "folder about to be made": "op=mkdir",
    "shard written": "op=fsync,hit=3",
    "shard's record written": "op=fsync,hit=4",
    "group's record written": "op=fsync,hit=5",
    "group's record about to be there": "op=rename,hit=4",
    "manifest written": "op=fsync,hit=6",
    "manifest about to be there": "op=rename,hit=5",
    "manifest there": "op=fsync_directory,hit=8",
}


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


@pytest.mark.parametrize("phase", PHASES)
def test_an_agent_killed_in_any_phase_leaves_the_flush_to_the_next(
    phase: str, tmp_path: Path, shm_dir: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = str(tmp_path / "shared")
    monkeypatch.setenv(_faults.FAULTS_VARIABLE, f"kill@file:{PHASES[phase]}")
    monkeypatch.setenv(_faults.FIRED_VARIABLE, str(marks))
    with Job(tmp_path / "ckpts", shared, shm_dir) as job:
        job.run(FLUSHED)
        job.flush()
        job.run_until(lambda: list(marks.iterdir()))
        there = [name.id.version for name in PersistentStore(shared).versions()]
        assert there == ([FLUSHED] if phase == "manifest there" else [])
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


def test_a_transient_error_costs_nothing_and_is_reported(
    tmp_path: Path, shm_dir: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_faults.FAULTS_VARIABLE, f"eio@file:{PHASES['shard written']}")
    monkeypatch.setenv(_faults.FIRED_VARIABLE, str(marks))
    with Job(tmp_path / "ckpts", str(tmp_path / "shared"), shm_dir) as job:
        job.run(FLUSHED)
        job.flush()
        job.run_until(job.flushed)
        assert list(marks.iterdir())
        assert (job.flushed(), job.flush_failures()) == ([FLUSHED], [])
        told = [e for e in job.heard("notice") if "; try 2 in " in e.message]
        assert [e.message[:22] for e in told] == [f"persistent level: v{FLUSHED}: "]
        job.checkpointer.abandon()


FLUSH_AND_STAND = """
import sys
from tierckpt.testing import TinyJob
path, shared, memory = sys.argv[1:]
far = {"persistent_path": shared, "persistent_every_steps": 1, "agent_linger_seconds": 1e6}
with TinyJob(path, shm_dir=memory, **far) as job:
    job.run(2)
    job.checkpointer.save(now=True)
    job.checkpointer._agent.wait(None, everything=True)
    print(job.checkpointer._agent.pid, flush=True)
    sys.stdin.read()
"""


def test_a_killed_job_no_longer_has_the_place_though_its_agent_lives(
    tmp_path: Path, shm_dir: Path
) -> None:
    path, shared = tmp_path / "ckpts", tmp_path / "shared"
    killed = python(FLUSH_AND_STAND, path, shared, shm_dir)
    assert killed.stdout is not None
    agent = int(killed.stdout.readline())
    assert list(shared.glob("lease.*"))
    killed.kill()
    end(killed)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while list(shared.glob("lease.*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert b"tierckpt.agent.process" in Path(f"/proc/{agent}/cmdline").read_bytes()
    with Job(path, str(shared), shm_dir) as job:
        job.restore()
        assert job.checkpointer._agent.pid in (None, agent), "and ends with its successor"


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


def test_a_device_too_small_for_one_more_version_has_room_again_when_fewer_are_kept(
    small_tmpfs: Path, tmp_path: Path, shm_dir: Path
) -> None:
    """The error advises to keep fewer versions; no version needs to be committed first."""
    shared = str(small_tmpfs / "shared")

    def left() -> int:
        return os.statvfs(small_tmpfs).f_bavail * 4096

    with Job(tmp_path / "ckpts", shared, shm_dir, persistent_keep_last=2) as job:
        before = left()
        job.run(FLUSHED)
        job.flush()
        job.run_until(job.flushed)
        size = before - left()
        (small_tmpfs / "somebody else's").write_bytes(bytes(left() - 3 * size // 2))
        job.flush()
        job.run_until(lambda: len(job.flushed()) == 2)
        first, second = job.flushed()
        for failures in (1, 2):
            job.flush()
            job.run_until(lambda: len(job.flush_failures()) == failures)  # noqa: B023
        assert "one more than persistent_keep_last must fit" in job.flush_failures()[0]
        assert [n.id.version for n in PersistentStore(shared).versions()] == [first, second]
        job.checkpointer.abandon()
    with Job(tmp_path / "ckpts", shared, shm_dir, persistent_keep_last=1) as job:
        job.restore()
        job.run(job.iteration + 1)
        job.flush()
        job.run_until(job.flush_failures)
        assert [n.id.version for n in PersistentStore(shared).versions()] == [second]
        newest = job.iteration
        job.flush()
        job.run_until(lambda: newest in job.flushed())
        assert len(job.flush_failures()) == 1
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


def test_a_store_that_hangs_is_waited_for_by_nobody(
    bucket: str, proxy: Proxy, tmp_path: Path, shm_dir: Path
) -> None:
    come, resume, hang = hanging_uploads()

    try:
        with Job(tmp_path / "ckpts", bucket, shm_dir, local_every_steps=1) as job:
            job.run(FLUSHED)
            proxy.rule = hang
            job.flush()
            job.run_until(come.is_set)
            until = job.iteration + 10
            job.run(until)
            assert job.flushed() == []
            job.settle()
            assert until in job.versions("local"), "a dozen versions later"
            resume.set()
            job.run_until(job.flushed)
            assert (job.flushed(), job.flush_failures()) == ([FLUSHED], [])
            job.checkpointer.abandon()
        check_restores(bucket, FLUSHED, tmp_path, shm_dir)
    finally:
        resume.set()


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


def test_a_slow_store_does(
    bucket: str, proxy: Proxy, tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits.FINAL_NOTICE.set(monkeypatch, 0.1)
    come, resume, hang = hanging_uploads()

    def heard(event: Event) -> None:
        if "waiting until all versions are stored on" in event.message:
            resume.set()

    try:
        with Job(tmp_path / "ckpts", bucket, shm_dir) as job:
            job.checkpointer._log._callbacks.append(heard)
            job.run(FLUSHED)
            proxy.rule = hang
            job.flush()
            job.run_until(come.is_set)
        assert resume.is_set()
        assert job.iteration in job.flushed()
        assert job.heard("failed") == []
    finally:
        resume.set()


def test_a_slow_store_costs_versions_there_and_no_room_here(
    bucket: str, proxy: Proxy, tmp_path: Path, shm_dir: Path
) -> None:
    """One is flushed, the newest waits; the versions dropped between them hold no slot."""
    come, resume, hang = hanging_uploads()

    with Job(tmp_path / "ckpts", bucket, shm_dir, when_busy="skip", local_keep_last=1) as job:
        try:
            proxy.rule = hang
            due = []
            while len(due) < 4:
                job.run(job.iteration + 2)
                due.append(job.iteration)
                job.flush()
                job.run_until(come.is_set)
            first, *dropped, newest = due
            passed_over = job.heard("skipped", "persistent")
            assert [e.version for e in passed_over] == dropped
            assert f"v{first} is still being flushed" in passed_over[0].message
            job.run(job.iteration + 1)
            job.checkpointer._levels.promotion.retire()
            job.run_until(lambda: local_versions(tmp_path / "ckpts") == [first, newest])
        finally:
            resume.set()
        job.run_until(lambda: newest in job.flushed())
        assert (job.flushed(), job.flush_failures()) == ([first, newest], [])
        job.checkpointer.abandon()
    check_restores(bucket, newest, tmp_path, shm_dir)


def local_versions(directory: Path) -> list[int]:
    return sorted({key.id.version for key in LocalStore(directory).keys()})  # noqa: SIM118


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
