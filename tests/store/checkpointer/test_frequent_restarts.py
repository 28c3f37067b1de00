"""A job killed again and again before an interval is over still stores versions on its levels."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierckpt.testing import TinyJob

LONG_SECONDS = 1e6
PATIENCE_SECONDS = 60.0
STEPS = 4
Start = Callable[..., TinyJob]


@pytest.fixture
def start(tmp_path: Path, shm_dir: Path) -> Start:
    def start(**settings: Any) -> TinyJob:
        given = {"shm_dir": str(shm_dir), "agent": "inline", "local_every_steps": 0}
        return TinyJob(tmp_path / "job", **{**given, **settings})

    return start


def on_disk(job: TinyJob) -> set[int]:
    assert job.checkpointer.wait(60.0)
    return {event.version for event in job.heard("committed", "local")}


def live_on(start: Start, **settings: Any) -> tuple[int, set[int]]:
    """A killed run: the version at its start, and the versions that it brought to disk."""
    job = start(**settings)
    with job:
        started = int(job.restore())
        job.run(started + STEPS)
        told = started, on_disk(job)
        job.checkpointer.abandon()
    return told


def test_an_interval_continues_from_the_end_of_the_previous_run(start: Start) -> None:
    """No version was ever on disk: one is due at once. Then the interval starts."""
    timed = {"local_every_seconds": LONG_SECONDS}
    assert live_on(start, **timed) == (0, set())
    started, written = live_on(start, **timed)
    assert (started, len(written)) == (STEPS, 1)
    started, more = live_on(start, **timed)
    assert (started, more) == (2 * STEPS, set())


def test_the_persistent_level_too(start: Start, tmp_path: Path) -> None:
    timed = {"local_every_steps": 1, "persistent_every_seconds": LONG_SECONDS}
    timed["persistent_path"] = str(tmp_path / "shared")
    live_on(start, **timed)
    with start(**timed) as job:
        assert job.restore() == STEPS
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not job.heard("committed", "persistent"):  # only a boundary reads it
            assert time.monotonic() < deadline
            time.sleep(0.01)
            job.run(job.iteration + 1)
        job.checkpointer.abandon()
