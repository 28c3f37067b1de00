"""Rollback: the job goes back to an older version once, and never to a version that was given up.

The run that goes back trains with another weight decay, so that a version of the old line shows.
"""

from __future__ import annotations

import pytest

from tests.support.crash.launcher import Job, Life
from tierckpt import load
from tierckpt.cli import run_command

OTHER = {"decay": 0.5}


def diverged(job: Job) -> None:
    """A run with v4, v8, v12 and v16 on disk, and v18 in memory, that was killed."""
    job.settings.update(local_every_steps=4, local_keep=9, when_busy="wait")
    life = job.start(gates={"stand": 18}).waiting("stand")
    job.wait_for(lambda: job.both_have(lambda r: on_disk(job, r)) == 16, "v16 on disk")
    job.wait_for(lambda: job.both_have(job.in_memory_of) == 18, "v18 in memory")
    life.kill()


def on_disk(job: Job, rank: int, generation: int = 1) -> list[int]:
    keys = job.on_disk(rank)
    return [k.id.version for k in keys if k.id.generation == generation]


def messages(job: Job, life: Life, event: str = "notice") -> str:
    return "\n".join(x["message"] for x in job.journal(0, life.number, event=event))


def test_the_job_goes_back_once_and_then_on_in_the_new_line(job: Job) -> None:
    """By the setting; the simulator's people use the command."""
    diverged(job)
    path = str(job.store.directory)
    job.settings["rollback_to"] = 8
    # Killed before it had a version of its own: memory and disk have newer ones of the old line.
    back = job.live({1: "kill@script:step=8,phase=begin"}, **OTHER)
    assert back.start == 8
    assert "the job went back to v8" in messages(job, back)
    assert 18 in job.in_memory_of(0), "nothing is deleted"
    assert on_disk(job, 0) == [4, 8, 12, 16]
    again = job.start(gates={"stand": 11}, **OTHER).waiting("stand")
    assert again.start == 8
    assert "went back to v8, as" not in messages(job, again)
    job.wait_for(lambda: job.both_have(job.in_memory_of) == 11, "v11 of the new line")
    again.kill()
    assert 16 in on_disk(job, 0), "older than nothing that is complete in the new line"
    assert load(path, version=16).version == 16, "it can be read"

    new = job.start(gates={"stand": 14}, **OTHER).waiting("stand")
    assert new.start == 11
    generation = new.resumed()["generation"] + 1
    job.wait_for(lambda: all(12 in on_disk(job, r, generation) for r in (0, 1)), "the new v12")
    new.kill()
    job.agents_end()
    job.reboot()
    assert job.live(**OTHER).start == 12
    final = [[x["done"] for x in job.journal(rank) if "done" in x] for rank in (0, 1)]

    assert final[0][0] != job.expected[0][1], "trained with another decay"  # type: ignore[index]


def test_a_version_that_does_not_exist_ends_the_start_and_names_the_nearest(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    diverged(job)
    refused = job.live(settings={"rollback_to": 9})
    assert "The nearest complete ones are v4, v8, v12, v16" in job.output()
    assert "TIERCKPT_ROLLBACK_TO=9" in job.output()
    assert not refused.survived
    path = str(job.store.directory)
    assert run_command(["rollback", path, "9"]) == 1
    assert "The nearest complete versions here are v4, v8, v12, v16" in capsys.readouterr().err
    assert job.live(settings={"rollback_to": 0}).start == 18
    job.ended_as_undisturbed()


def test_a_request_can_be_taken_back(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    diverged(job)
    path = str(job.store.directory)
    assert run_command(["rollback", path, "--cancel"]) == 1
    assert "there is no request to go back" in capsys.readouterr().err
    assert run_command(["rollback", path, "4"]) == 0
    assert "the next start goes back to v4, on all ranks" in capsys.readouterr().out
    assert run_command(["list", path]) == 0
    assert "the next start goes back to v4" in capsys.readouterr().out
    assert run_command(["rollback", path, "--cancel"]) == 0
    assert "v4 is taken back" in capsys.readouterr().out
    assert job.live({1: "kill@script:step=18,phase=begin"}).start == 18
    # Carried out, but without a version yet: the way forward is another rollback.
    assert run_command(["rollback", path, "4"]) == 0
    assert job.live({0: "kill@script:step=4,phase=begin"}).start == 4
    assert run_command(["rollback", path, "--cancel"]) == 1
    assert "went back to v4 already" in capsys.readouterr().err
    assert run_command(["rollback", path, "16"]) == 0
    assert job.live().start == 16
    job.ended_as_undisturbed()
