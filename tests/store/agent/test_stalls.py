"""A hanging disk, or a stopped agent, costs no version in memory, and is named."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.support import limits
from tierckpt.agent import status
from tierckpt.halt import HaltController
from tierckpt.storage import DirectFile, JobDirectory, LocalStore, SlotPool
from tierckpt.testing import TinyJob

PATIENCE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stall counts at once."""
    limits.SLOT_LATE.set(monkeypatch, 0.0)
    monkeypatch.setattr(status, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(status, "STALL_SECONDS", 0.01)


@pytest.fixture(params=["write", "look"])
def gate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """The agent's writes, or its looks at files, wait for it, as on a disk that hangs. Open at
    first."""
    kind, name = (DirectFile, "write") if request.param == "write" else (LocalStore, "has")
    call, opened = getattr(kind, name), Event()

    def hang(*what: Any) -> Any:
        opened.wait(PATIENCE_SECONDS)
        return call(*what)

    monkeypatch.setattr(kind, name, hang)
    opened.set()
    yield opened
    opened.set()


def job_at(path: Path, shm_dir: Path, **settings: Any) -> TinyJob:
    return TinyJob(path, shm_dir=str(shm_dir), when_busy="skip", **settings)


def begin(job: TinyJob) -> None:
    """Train until the agent has its first versions, and nothing counts as a stall."""
    job.run(1)
    run_until(job, lambda: bool(job.heard("committed")) and not stalls(job))
    job.settle()
    job.events.clear()


def stalls(job: TinyJob) -> dict[str, float]:
    return job.checkpointer._agent.stall_watch.stalls


def run_until(job: TinyJob, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        job.run(job.iteration + 1)


def said(job: TinyJob, text: str) -> bool:
    return any(text in event.message for event in job.events)


def in_memory(job: TinyJob) -> int:
    """The newest version in memory that another process can find."""
    folder: JobDirectory = job.checkpointer._resources.job
    return max(manifest.id.version for _, manifest in folder.sealed())


def in_step(job: TinyJob) -> bool:
    """Whether memory has the version of the last boundary but one."""
    return in_memory(job) >= job.iteration - 1


def follow(job: TinyJob) -> None:
    """Memory has every step, once one more slot is there."""
    run_until(job, lambda: in_step(job))
    for _ in range(6):
        job.run(job.iteration + 1)
        assert in_step(job)


def test_a_stopped_agent_costs_no_version_in_memory(path: Path, shm_dir: Path) -> None:
    with job_at(path, shm_dir) as job:
        begin(job)
        pid = job.checkpointer._agent.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            run_until(job, lambda: said(job, "has not answered since"))
            [notice] = [e for e in job.events if "has not answered since" in e.message]
            assert f"the agent of this node (process {pid})" in notice.message
            assert str(path) in notice.message
            assert "versions in memory continue" in notice.message
            follow(job)
        finally:
            os.kill(pid, signal.SIGCONT)
        run_until(job, lambda: said(job, "the agent of this node answers again, after"))
        expected = job.iteration
        job.settle()
    assert max(event.version for event in job.heard("committed", "local")) == expected


def test_a_disk_that_hangs_costs_no_version_in_memory(
    path: Path, shm_dir: Path, gate: Event
) -> None:
    with job_at(path, shm_dir, agent="inline") as job:
        begin(job)
        gate.clear()
        run_until(job, lambda: said(job, f"{path} hangs: "))
        follow(job)
        gate.set()
        run_until(job, lambda: said(job, f"{path} answers again, after"))


@pytest.mark.parametrize("gate", ["write"], indirect=True)
def test_a_slot_that_was_taken_away_is_not_committed(
    path: Path, shm_dir: Path, gate: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits.SLOT_TAKEN.set(monkeypatch, 0.0)
    monkeypatch.setattr(SlotPool, "_memory_for_more", lambda pool: False)
    with job_at(path, shm_dir, agent="inline") as job:
        begin(job)
        gate.clear()
        follow(job)
        gate.set()
        run_until(job, lambda: bool(job.heard("failed", "local")))
        failed = job.heard("failed", "local")[0]
        assert "was refilled while it was written" in failed.message
        limits.SLOT_LATE.set(monkeypatch, PATIENCE_SECONDS)
        run_until(job, lambda: any(e.version > failed.version for e in job.heard("committed")))
    assert failed.version not in [e.version for e in job.heard("committed")]


def test_an_end_that_a_signal_wants_waits_no_longer_than_that_grants(
    path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_at(path, shm_dir) as job:
        begin(job)
        pid = job.checkpointer._agent.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            job.run(job.iteration + 3)
            monkeypatch.setattr(HaltController, "has_to_end", lambda halt: True)
            job.checkpointer.close()
            assert said(job, f"{path} has not stored it in")
            assert said(job, "has not answered since")
            assert in_memory(job) == job.iteration
        finally:
            os.kill(pid, signal.SIGCONT)
            with os.fdopen(os.pidfd_open(pid)) as ended:
                assert select.select([ended], [], [], PATIENCE_SECONDS)[0]
