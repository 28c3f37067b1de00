"""Killed repeatedly: during a restore, all ranks at once, while an earlier run's agent writes."""

from __future__ import annotations

import pytest

from tests.support.crash.launcher import Job, Process
from tests.support.crash.scenario import STEPS

LOADING = {
    "before looking": "kill@call:what=take_inventory",
    "before verifying": "kill@call:what=verify",
    "before loading": "kill@call:what=load_shard",
    "half loaded": "kill@call:what=load_shard,hit=2",
    "before the generators are loaded": "kill@call:what=finish_load",
    "when all is loaded": "kill@call:what=after_load",
}


@pytest.mark.parametrize("when", LOADING)
def test_killed_while_restoring(when: str, job: Job) -> None:
    rank = list(LOADING).index(when) % 2
    first = job.live({1: "kill@seal:version=12"})
    job.live({rank: LOADING[when]})
    assert job.fired(rank, LOADING[when])
    assert first.promised() <= job.live().start <= 11
    job.ended_as_undisturbed()


def test_killed_three_times_in_a_row(job: Job) -> None:
    first = job.live({1: "kill@seal:version=12"})
    second = job.live({0: "kill@barrier"})  # the first snapshot of this run
    third = job.live({1: "kill@script:step=14,phase=optimizer"})
    assert job.fired(1, "kill@seal:version=12")
    assert job.fired(0, "kill@barrier")
    assert job.fired(1, "kill@script:step=14,phase=optimizer")
    last = job.live()
    assert first.promised() <= second.start <= 11
    assert second.promised() <= third.start <= 12
    assert third.promised() <= last.start <= 14
    job.ended_as_undisturbed()


def test_both_killed_at_the_same_point(job: Job) -> None:
    rule = "kill@seal:version=12"
    life = job.start({0: rule, 1: rule})
    for rank, process in enumerate(life.processes):
        job.wait_for(process.ended, "the end")
        assert job.fired(rank, rule)
    assert job.live().start == 11
    job.ended_as_undisturbed()


def test_killed_in_the_last_moment(job: Job) -> None:
    """The final version is durable on all ranks; one removed its slots, the other is killed."""
    rule = "stop@call:what=remove_slots"
    life = job.start({1: rule})
    job.wait_fired(1, rule)
    job.wait_for(lambda: [x for x in job.journal(0) if "done" in x], "the end of rank 0")
    life.kill()
    resumed = job.live()
    assert resumed.start == STEPS
    assert resumed.resumed()["levels"] == {"memory": 1, "local": 1}
    job.ended_as_undisturbed()


def test_an_agent_of_the_previous_run_still_writes(job: Job) -> None:
    """The agent holds v8 while the new run resumes from it; both write their versions to disk."""
    job.settings.update(local_keep_last=9)
    old = stopped_agent(job, "stop@file:op=write,hit=2")
    life = job.start(gates={"stand": 17, "end": STEPS}, patient=True).waiting("stand")
    assert life.start >= 8
    assert 8 not in on_disk(job, 0)
    assert 8 in on_disk(job, 1)
    old.wake()
    job.wait_for(lambda: 8 in on_disk(job, 0), "v8 of the run before")
    life.open("stand").waiting("end")
    job.wait_for(lambda: job.both_have(lambda r: on_disk(job, r)) >= 12, "a new version on disk")
    job.reboot()
    resumed = job.live()
    assert resumed.start >= 12
    assert resumed.resumed()["rejected"] == []
    job.ended_as_undisturbed()


def test_an_agent_of_the_previous_run_comes_too_late_for_its_slot(job: Job) -> None:
    """It was stopped before it could pin v8; the new run has reused that slot."""
    old = stopped_agent(job, "stop@agent:version=8")
    life = job.start(gates={"stand": 17}).waiting("stand")
    assert 8 not in job.in_memory_of(0)
    old.wake()
    # It then finds the successor's work, or another agent has that, and it ends.
    job.wait_for(lambda: 12 in on_disk(job, 0), "v12 of the new run")
    assert 8 not in on_disk(job, 0)
    life.open("stand").until_over()
    job.ended_as_undisturbed()
    assert 8 not in on_disk(job, 0)


def stopped_agent(job: Job, rule: str) -> Process:
    """Rank 0's files, in the middle of v8, after all ranks were killed."""
    life = job.start({0: rule}, settings={"when_busy": "wait"})
    job.wait_fired(0, rule)
    job.wait_for(lambda: 8 in on_disk(job, 1), "v8 of rank 1")
    life.kill()
    (agent,) = job.agents(0)
    return agent


def on_disk(job: Job, rank: int) -> list[int]:
    return [k.id.version for k in job.on_disk(rank)]
