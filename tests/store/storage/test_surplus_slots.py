"""Slots of earlier runs that this one does not use: removed once all ranks have a newer version."""

from __future__ import annotations

import math
import os
import signal
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.support import limits
from tierckpt.storage import JobDirectory, Slot, close_lock, lock_shared, take_lock
from tierckpt.testing import TinyJob

PATIENCE_SECONDS = 60.0


@pytest.fixture
def settings(tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """No slot is one more because an agent has read another one for long."""
    limits.SLOT_LATE.set(monkeypatch, math.inf)
    return {"path": tmp_path / "ckpts", "shm_dir": str(shm_dir), "local_every_steps": 1000}


def segments(job: TinyJob) -> list[str]:
    return [p.name for p in folder(job).segments()]


def folder(job: TinyJob) -> JobDirectory:
    return job.checkpointer._resources.job


def with_three_slots(settings: dict[str, Any]) -> int:
    """A run that ends with its newest version in the third slot; returns that version."""
    job = TinyJob(**settings, slots=3)
    job.checkpointer.restore()
    while True:
        job.run(job.iteration + 1)
        job.checkpointer.wait()
        third = job.checkpointer._pool.slots[2]
        manifest = third.manifest() if third is not None else None
        if manifest is not None and manifest.id.version == job.checkpointer.version:
            break
    job.checkpointer.abandon()
    return manifest.id.version


def test_a_successor_with_fewer_slots_comes_back_from_and_then_removes_them(
    settings: dict[str, Any],
) -> None:
    newest = with_three_slots(settings)
    with TinyJob(**settings, slots=2) as job:
        restored = job.restore()
        assert (restored.version, restored.levels) == (newest, {"memory": 1})
        assert segments(job) == ["r00000.0", "r00000.1", "r00000.2"]
        job.run(newest + 2)
        assert "r00000.2" in segments(job)  # the only one that all ranks are known to have
        while "r00000.2" in segments(job):  # as soon as a vote knows a newer one
            job.checkpointer.wait()
            job.run(job.iteration + 1)
        assert segments(job) == ["r00000.0", "r00000.1"]


def test_slots_of_ranks_that_are_not_here_any_more(settings: dict[str, Any]) -> None:
    with TinyJob(**settings) as job:
        place = folder(job)
        Slot.create(place.slot_path(1, 0), "r00001.0", 4096, 4096).close()
        Slot.create(place.slot_path(2, 0), "r00002.0", 4096, 4096).close()
        other = take_lock(place.lock_path(2))
        assert other is not None
        close_lock(other)
        job.run(3)
        assert segments(job) == ["r00000.0", "r00000.1", "r00000.2"]


def held(path: Path, is_lock: bool, told: Connection) -> None:
    """Another process: a living trainer, or an agent with a slot in use."""
    if is_lock:
        assert take_lock(path) is not None
    else:
        lock_shared(os.open(path, os.O_RDWR))
    told.send("held")
    signal.pause()


@pytest.mark.parametrize("by", ["its trainer", "an agent"])
def test_a_slot_stays_as_long_as_it_is_in_use(
    settings: dict[str, Any], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierckpt.checkpointer.loop.LOOK_SECONDS", 0.0)
    with TinyJob(**settings) as job:
        place = folder(job)
        path = place.slot_path(1, 0)
        Slot.create(path, path.name, 4096, 4096).close()
        ours, theirs = get_context("fork").Pipe()
        lock = by == "its trainer"
        what = place.lock_path(1) if lock else path
        process = get_context("fork").Process(target=held, args=(what, lock, theirs))
        process.start()
        try:
            assert ours.poll(PATIENCE_SECONDS)
            job.run(4)
            assert path.name in segments(job)
        finally:
            process.kill()
            process.join()
            process.close()
            ours.close()
            theirs.close()
        job.run(5)
        assert (path.name in segments(job)) == lock  # looked at once; the end looks again
    assert not path.exists()
