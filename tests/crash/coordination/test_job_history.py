"""Killed repeatedly, also during a restore; the simulator has such a kill at each system call."""

from __future__ import annotations

from tests.support.crash.launcher import Job

HALF_LOADED = "kill@call:what=load_shard,hit=2"


def test_killed_while_restoring(job: Job) -> None:
    first = job.live({1: "kill@seal:version=12"})
    job.live({1: HALF_LOADED})
    assert job.fired(1, HALF_LOADED)
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
