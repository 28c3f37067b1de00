"""The dangerous instant of two slots (docs/internals/agreement.md).

Rank 0 has sealed v12, has finished the next step, and would fill the slot of v11 with v13. Rank 1
gave its gradients, so rank 0 could continue, but has not sealed v12. Whichever rank is killed now,
v11 must still be on both.
"""

from __future__ import annotations

from tests.support.crash.launcher import Job, Life

TIGHT = {"slots": 2, "local_every_steps": 0, "release": "backward"}

HOLD = "stop@seal:version=12"
REUSE = "stop@refill:version=13"


def ahead(job: Job, **changes: object) -> Life:
    """Rank 0 is about to take the slot of v11, rank 1 is just before its seal of v12."""
    # Released at the barrier: when rank 1 stops there, all its gradients are on their way.
    life = job.start({0: REUSE, 1: HOLD}, settings=TIGHT, late_release={"1": 12}, **changes)
    job.wait_fired(1, HOLD)
    return life


def test_a_slot_is_not_reused_before_all_ranks_sealed_the_next_version(job: Job) -> None:
    life = ahead(job)
    job.wait_for(lambda: job.journal(0, refused=12), "rank 0 to be refused the slot of v11")
    assert life.passed(0) == 13
    assert not job.fired(0, REUSE)
    life.kill(1)
    life.kill(0)
    assert job.live(settings=TIGHT).start == 11
    job.ended_as_undisturbed()


def test_without_that_protection_the_version_is_lost(job: Job) -> None:
    life = ahead(job, unprotected=True)
    job.wait_fired(0, REUSE)
    life.kill(1)
    life.kill(0)
    assert job.live(settings=TIGHT).start == 0, "no version is left that both have"
    job.ended_as_undisturbed()


def test_a_rank_that_runs_on_when_the_other_is_killed_there_overwrites_nothing(job: Job) -> None:
    rule = "kill@seal:version=12"
    life = job.start({1: rule}, settings=TIGHT, late_release={"1": 12})
    job.wait_fired(1, rule)
    job.wait_for(lambda: life.processes[0].ended(), "rank 0 to fail by itself")
    assert job.live(settings=TIGHT).start == 11
    job.ended_as_undisturbed()


def test_a_version_restored_from_memory_and_disk_is_protected_like_any_other(job: Job) -> None:
    """v12 is in the memory of rank 0 and on the disk of rank 1 only, as after the loss of one
    node's memory. It is the last version that all can restore, until both have sealed v13."""
    settings = {"slots": 2, "local_every_steps": 6, "when_busy": "wait", "release": "backward"}
    crash = "kill@file:op=write,hit=2"
    life = job.start({0: crash}, settings=settings, gates={"stand": 13})
    life.waiting("stand")
    job.wait_fired(0, crash)
    job.wait_for(lambda: 12 in [k.id.version for k in job.on_disk(1)], "v12 on rank 1's disk")
    job.kill_everything()
    for segment in job.shm_dir.rglob("r00001.*"):
        segment.unlink()

    hold, reuse = "stop@seal:version=13", "stop@refill:version=14"
    life = job.start({0: reuse, 1: hold}, settings=settings, late_release={"1": 13})
    job.wait_fired(1, hold)
    assert life.resumed()["version"] == 12
    assert life.resumed()["levels"] == {"memory": 1, "local": 1}
    job.wait_for(
        lambda: job.fired(0, reuse) or job.journal(0, life=2, refused=13),
        "rank 0 to want the slot of v12",
    )
    job.kill_everything()
    assert job.live(settings=settings).start == 12
    job.ended_as_undisturbed()
