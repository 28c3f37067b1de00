"""The dangerous instant of two slots (docs/internals/agreement.md).

Rank 0 has sealed v12, has finished the next step, and would fill the slot of v11 with v13. Rank 1
gave its gradients, so rank 0 could continue, but has not sealed v12. Whichever rank is killed now,
v11 must still be on both. `tests.simulator --plant` proves that a lost protection is noticed.
"""

from __future__ import annotations

from tests.support.crash.launcher import Job, Life

TIGHT = {"slots": 2, "local_every_steps": 0, "release": "backward"}

HOLD = "stop@seal:version=12"
REUSE = "stop@refill:version=13"


def ahead(job: Job) -> Life:
    """Rank 0 is about to take the slot of v11, rank 1 is just before its seal of v12."""
    # Released at the barrier: when rank 1 stops there, all its gradients are on their way.
    life = job.start({0: REUSE, 1: HOLD}, settings=TIGHT, late_release={"1": 12})
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
