"""A node is lost with its disk and its journal: the copy on another node leads as far."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.crash.launcher import Job, Life
from tests.support.crash.scenario import RANKS
from tierckpt.cli import run_command
from tierckpt.journal import FOLDER, ITSELF, MAX_WAITING, names_in
from tierckpt.storage import LocalStore

LAST = 12
STORED, PROTECTED = "stored", "protected"


@pytest.fixture
def job(job: Job) -> Job:
    """Two nodes with a disk each, protected by each other; v1 on disk, then the journal."""
    job.settings.update(
        path=str(job.folder / "{node}" / "ckpts"),
        memory_every_steps=0,
        local_every_steps=0,
        local_journal_steps=50,
        peer_redundancy="partner",
        peer_interface="lo",
        when_busy="wait",
    )
    return job


def killed(job: Job) -> Life:
    """A run killed in step 12, when v1 is protected: the nodes learn at the boundaries
    between two gates that it is on both disks."""
    rule = {1: f"kill@script:step={LAST},phase=backward"}
    life = job.start(rule, gates={STORED: 2, PROTECTED: 7}).waiting(STORED)
    disks = [LocalStore(job.folder / f"node{rank}" / "ckpts") for rank in range(RANKS)]
    job.wait_for(lambda: all(disk.keys() for disk in disks), "v1 on both disks")
    life.open(STORED).waiting(PROTECTED)
    job.wait_for(lambda: all(disk.parities() for disk in disks), "parity of v1 on both nodes")
    return life.open(PROTECTED).until_over()


def folder_of(job: Job, rank: int) -> Path:
    return job.folder / f"node{rank}" / "ckpts" / FOLDER


def lose(job: Job, node: int) -> None:
    """Remove the node's disk, and the memory of all, as if all machines were switched off."""
    job.reboot()
    shutil.rmtree(job.folder / f"node{node}")


def notices(job: Job, life: Life, rank: int = 0) -> str:
    return "\n".join(x["message"] for x in job.journal(rank, life.number, event="notice"))


def test_the_steps_are_made_again_from_the_copy(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    killed(job)
    lose(job, 0)
    assert run_command(["list", str(folder_of(job, 1).parent)]) == 0
    listed = capsys.readouterr().out
    resumed = job.live()
    assert LAST - 1 - MAX_WAITING <= resumed.start <= LAST
    assert f"leads on to v{resumed.start}" in listed
    assert "the journal of rank 0 comes from a copy" in notices(job, resumed)
    assert "ends at" not in "".join(
        x["message"] for r in range(RANKS) for x in job.journal(r, event="notice")
    )
    job.ended_as_undisturbed()
    assert [names_in(folder_of(job, rank)) for rank in range(RANKS)] == [[], []]


def test_a_damaged_copy_ends_the_journal_there(job: Job) -> None:
    killed(job)
    lose(job, 1)
    folder = folder_of(job, 0)
    (name,) = (n for n in names_in(folder) if n.keeper != ITSELF)
    path = folder / str(name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    resumed = job.live()
    assert 1 < resumed.start < LAST - 1 - MAX_WAITING
    assert f"a part of the journal is not used: {path}" in notices(job, resumed)
    assert "rank 1 has the journal only up to" in notices(job, resumed)
    job.ended_as_undisturbed()
