"""The journal of gradients: kills and reboots between two versions, and damaged journals.

The job takes a version at its first step and after every twenty, to memory and disk. The journal
leads from there to the step of the kill, except for a few records that were not yet on disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crash.launcher import Job, Life
from tierckpt.cli import run_command
from tierckpt.journal import BOUNDARY, FOLDER, MAX_WAITING, STEP, names_in

KILLED = {1: "kill@script:step=12,phase=backward"}
JOURNAL_KILL = f"kill@journal:version=9,kind={STEP}"


@pytest.fixture
def journaled(job: Job) -> Job:
    job.settings.update(
        memory_every_steps=0, local_every_steps=0, local_journal_steps=20, when_busy="wait"
    )
    return job


def files_of(job: Job, rank: int) -> list[Path]:
    """The journal files of a rank, in order."""
    folder = Path(job.store.directory) / FOLDER
    return [folder / str(name) for name in names_in(folder) if name.base.shard == rank]


def killed_after(job: Job, version: int, rule: dict[int, str], gate: str, step: int) -> Life:
    """Play a run killed by `rule`, once the version is on the disks of both ranks: the
    ranks wait for that before `step`."""
    life = job.start(rule, gates={gate: step}).waiting(gate)
    job.wait_for(
        lambda: job.both_have(lambda r: [k.id.version for k in job.on_disk(r)]) == version,
        f"v{version} on both disks",
    )
    (job.folder / gate).touch()
    return life.until_over()


def notices(job: Job, life: Life, rank: int = 0) -> str:
    return "\n".join(x["message"] for x in job.journal(rank, life.number, event="notice"))


def test_a_restart_makes_the_steps_again(
    journaled: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_after(journaled, 1, KILLED, "first", 2)
    journaled.reboot()
    assert run_command(["list", str(journaled.store.directory)]) == 0
    rule = {0: "kill@script:step=17,phase=forward"}
    second = journaled.start(rule, gates={"second": 15}).waiting("second")
    assert 12 - MAX_WAITING <= second.start <= 12
    listed = f"the journal leads on to v{second.start}: a restart with local_journal_steps "
    assert f"{listed}makes {second.start - 1} steps after v1 again" in capsys.readouterr().out
    assert "iteration(s) after it from the journal" in "".join(
        x["message"] for x in journaled.journal(0, second.number, event="restored")
    )
    (journaled.folder / "second").touch()
    second.until_over()
    journaled.reboot()
    third = journaled.live()
    assert third.start >= 17 - MAX_WAITING, "through the second run, whatever is on disk of it"
    journaled.ended_as_undisturbed()
    assert [files_of(journaled, rank) for rank in (0, 1)] == [[], []]


def test_a_torn_record_does_not_count(journaled: Job) -> None:
    """A damaged one is in the golden directories."""
    journaled.live({1: JOURNAL_KILL})
    assert journaled.fired(1, JOURNAL_KILL)
    resumed = journaled.live()
    assert resumed.start == 8
    journaled.ended_as_undisturbed()


def test_a_full_disk_ends_the_journal_until_the_next_version(journaled: Job) -> None:
    journaled.settings["local_journal_steps"] = 10
    full = f"enospc@journal:version=6,kind={BOUNDARY}"
    first = journaled.live({1: f"{full};kill@script:step=17,phase=forward"})
    assert journaled.fired(1, full)
    assert "the journal ends at v5" in notices(journaled, first, rank=1)
    assert "No space left on device" in notices(journaled, first, rank=1)
    resumed = journaled.live()
    assert resumed.start >= 17 - MAX_WAITING, "it began again with v11"
    journaled.ended_as_undisturbed()
