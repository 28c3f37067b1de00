"""The memory file system is cleaned up under a running job (by a scheduler's epilogue, say)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tierckpt.testing import TinyJob

STEPS, REMOVED = 8, 4


def everything(job: TinyJob) -> None:
    shutil.rmtree(job.checkpointer._resources.job.root)


def one_slot(job: TinyJob) -> None:
    job.checkpointer._resources.job.segments()[0].unlink()


@pytest.mark.parametrize(("remove", "agent"), [(everything, "process"), (one_slot, "inline")])
def test_slots_are_made_again_and_the_end_is_durable(
    remove: Callable[[TinyJob], None], agent: str, path: Path, shm_dir: Path
) -> None:
    settings = {"shm_dir": str(shm_dir), "agent": agent, "local_every_steps": 1}
    with TinyJob(path, **settings) as job:
        job.run(REMOVED).settle()
        remove(job)
        job.run(STEPS).settle()
        committed = [e.version for e in job.heard("committed", "local")]
    assert [v for v in committed if v > REMOVED + 2] == [REMOVED + 3, STEPS]
    assert any("it is made again" in event.message for event in job.heard("notice"))
    with TinyJob(path, seed=1, **settings) as again:
        assert again.restore() == STEPS
        assert again.fingerprint() == job.fingerprint()


def test_a_version_sealed_afterwards_survives_a_kill(path: Path, shm_dir: Path) -> None:
    settings = {"shm_dir": str(shm_dir), "agent": "inline", "local_every_steps": 100}
    job = TinyJob(path, **settings).run(REMOVED)
    everything(job)
    job.run(STEPS).checkpointer.complete()
    job.checkpointer.abandon()
    with TinyJob(path, seed=1, **settings) as again:
        assert again.restore().levels == {"memory": 1}
        assert again.iteration == STEPS
        assert again.fingerprint() == job.fingerprint()


def test_the_newest_is_taken_again_at_the_end(path: Path, shm_dir: Path) -> None:
    """It was in memory alone, and nowhere when the job ended."""
    settings = {"shm_dir": str(shm_dir), "agent": "inline", "local_every_steps": 100}
    with TinyJob(path, **settings) as job:
        job.run(STEPS).settle()
        everything(job)
    with TinyJob(path, seed=1, **settings) as again:
        assert again.restore() == STEPS
        assert again.fingerprint() == job.fingerprint()
