"""The journal of gradients: kills and reboots between two versions, and damaged journals.

The job takes a version at its first step and after every twenty, to memory and disk. The journal
leads from there to the step of the kill, except for a few records that were not yet on disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crash.launcher import Job, Life
from tierckpt.cli import run_command
from tierckpt.journal import BOUNDARY, FOLDER, HEAD_BYTES, MAX_WAITING, STEP, FrameHead, names_in

KILLED = {1: "kill@script:step=12,phase=backward"}
JOURNAL_KILLS = [f"kill@journal:version=9,kind={kind}" for kind in (STEP, BOUNDARY)]


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


def heads_of(path: Path) -> list[tuple[int, FrameHead]]:
    """Places and heads of the frames of a file."""
    data, low, found = path.read_bytes(), 0, []
    while low + HEAD_BYTES <= len(data):
        head = FrameHead.decode(data[low : low + HEAD_BYTES])
        found.append((low, head))
        low += head.frame_bytes
    return found


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


@pytest.mark.parametrize("reboot", [False, True])
def test_a_restart_makes_the_steps_again(
    journaled: Job, reboot: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_after(journaled, 1, KILLED, "first", 2)
    if reboot:
        journaled.reboot()
        assert run_command(["list", str(journaled.store.directory)]) == 0
    rule = {0: "kill@script:step=17,phase=forward"}
    second = journaled.start(rule, gates={"second": 15}).waiting("second")
    assert 12 - MAX_WAITING <= second.start <= 12
    if reboot:
        listed = f"the journal leads on to v{second.start}: a restart with local_journal_steps "
        assert f"{listed}makes {second.start - 1} steps after v1 again" in capsys.readouterr().out
    assert "iteration(s) after it from the journal" in "".join(
        x["message"] for x in journaled.journal(0, second.number, event="restored")
    )
    (journaled.folder / "second").touch()
    second.until_over()
    if reboot:
        journaled.reboot()
    third = journaled.live()
    assert third.start >= 17 - MAX_WAITING, "through the second run, whatever is on disk of it"
    journaled.ended_as_undisturbed()
    assert [files_of(journaled, rank) for rank in (0, 1)] == [[], []]


@pytest.mark.parametrize("kill", JOURNAL_KILLS)
def test_a_torn_record_does_not_count(journaled: Job, kill: str) -> None:
    journaled.live({1: kill})
    assert journaled.fired(1, kill)
    resumed = journaled.live()
    assert resumed.start == 8
    journaled.ended_as_undisturbed()


def test_a_damaged_record_ends_the_journal_there(journaled: Job) -> None:
    journaled.live(KILLED)
    (path,) = files_of(journaled, 0)
    boundaries = [low for low, head in heads_of(path) if head.kind == BOUNDARY]
    data = bytearray(path.read_bytes())
    data[boundaries[4] - 5000] ^= 1  # in the gradients of the fifth record: that of v6
    path.write_bytes(data)
    resumed = journaled.live()
    assert resumed.start == 5
    assert f"a part of the journal is not used: {path}" in notices(journaled, resumed)
    assert "rank 0 has the journal only up to v5" in notices(journaled, resumed)
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
