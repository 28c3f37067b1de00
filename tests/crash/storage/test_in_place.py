"""SIGKILL in a commit without a copy: slots are files of a local level on tmpfs.

As in the sweep over copies: no more is lost than promised, no committed byte has changed, and the
run's state is the undisturbed one.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crash.launcher import Job
from tests.support.crash.scenario import RANKS
from tests.support.thorough import points
from tierckpt.agent import sound_image
from tierckpt.format import Manifest
from tierckpt.storage import LocalStore

# The first three creations fill the pool. v4 and v8 are committed, and their slots' next versions
# need other files: the fourth and the fifth creation; only the fifth finds a retired file.
FILLING_THE_REUSED_IMAGE = "kill@copy:version=11,hit=4"
BETWEEN_REUSED_IMAGE_AND_SLOT = "kill@call:what=create_slot,hit=5"

# At the second commit, which is that of v8, and when v4 is retired after it.
AGENT_POINTS = {
    "linked": "kill@file:op=open,hit=2",
    "renamed": "kill@file:op=fsync_directory,hit=3",
    "before the manifest's rename": "kill@file:op=rename,hit=4",
    "v4 is retired": "kill@file:op=fsync_directory,hit=5",
}


@pytest.fixture
def job(job: Job, shm_root: Path) -> Iterator[Job]:
    """A job with a disk in memory, which survives the changes of `Job.reboot` to its slots."""
    disk = shm_root / uuid.uuid4().hex[:8]
    disk.mkdir()
    job.store = LocalStore(disk / "ckpts")
    job.settings.update(path=str(job.store.directory), local_keep=1, when_busy="wait")
    yield job
    job.kill_everything()
    shutil.rmtree(disk)


def check_store(job: Job) -> None:
    """Every committed byte is as it was sealed; no other files are left. The job has ended."""
    for key in (key for rank in range(RANKS) for key in job.on_disk(rank)):
        with sound_image(job.store, Manifest.decode(job.store.read_manifest(key))):
            pass
        assert job.store._data(key).stat().st_nlink == 1
    assert not list(job.store.directory.glob(".*"))


def check_that_it_was_in_place(job: Job, life: int) -> None:
    said = [job.journal(rank, life, event="notice") for rank in range(RANKS)]
    assert all(any("without a copy" in x["message"] for x in lines) for lines in said)


def test_a_trainer_is_killed(job: Job) -> None:
    rank, rule = 0, FILLING_THE_REUSED_IMAGE
    killed = job.live({rank: rule})
    assert job.fired(rank, rule)
    check_that_it_was_in_place(job, 1)
    resumed = job.live()
    assert killed.promised() <= resumed.start
    assert resumed.resumed()["levels"] == {"memory": 2}
    job.ended_as_undisturbed()
    check_store(job)


def test_the_machine_dies_when_a_trainer_does(job: Job) -> None:
    """The committed version is sound at this very moment, and persistent memory keeps it."""
    rank, rule = 1, BETWEEN_REUSED_IMAGE_AND_SLOT
    job.live({rank: rule})
    assert job.fired(rank, rule)
    job.agents_end()  # they finish the versions they were given
    job.reboot()
    on_disk = job.both_have(lambda r: [k.id.version for k in job.on_disk(r)])
    assert on_disk >= job.both_have(lambda r: job.committed(r, 1))
    resumed = job.live()
    assert resumed.start == on_disk
    assert resumed.resumed()["rejected"] == []
    job.ended_as_undisturbed()
    check_store(job)


@pytest.mark.parametrize(
    "point",
    points(AGENT_POINTS, "renamed", "v4 is retired"),
)
def test_the_machine_dies_when_an_agent_does(point: str, job: Job) -> None:
    rank = list(AGENT_POINTS).index(point) % RANKS
    rule = AGENT_POINTS[point]
    life = job.start({rank: rule}, gates={"end": 25})
    job.wait_fired(rank, rule)
    job.reboot()
    on_disk = job.both_have(lambda r: [k.id.version for k in job.on_disk(r)])
    assert on_disk >= max(job.both_have(lambda r: job.committed(r, life.number)), 4)
    resumed = job.live()
    assert resumed.resumed()["levels"] == {"local": 2}
    assert resumed.resumed()["rejected"] == []
    assert resumed.start == on_disk
    job.ended_as_undisturbed()
    check_store(job)
