"""Reuse of version numbers after a restart: shards of an earlier run are never mixed with the new
run's.

The middle run trains with another weight decay, so a mix would show. On disk, and with agents of
forgotten runs, such histories are the simulator's.
"""

from __future__ import annotations

from tests.support.crash.launcher import Job

OTHER = {"decay": 0.5}


def test_a_stale_version_is_not_combined_with_a_new_one_of_the_same_number(job: Job) -> None:
    """Rank 0 has v12 of the first run, rank 1 that of the second: v11 is the newest complete
    version."""
    job.settings.update(slots=2, local_every_steps=0, release="forward")
    hold = "stop@seal:version=12"
    life = job.start({1: hold})
    job.wait_fired(1, hold)
    job.wait_for(lambda: 12 in job.in_memory_of(0), "v12 of rank 0")
    life.kill()
    assert 12 not in job.in_memory_of(1)

    keep, hold = "stop@call:what=choose_slot", "stop@sealed:version=12"
    life = job.start({0: keep, 1: hold}, **OTHER)
    job.wait_fired(0, keep)
    job.wait_fired(1, hold)
    assert life.start == 11
    life.kill()
    assert job.in_memory_of(0)[12] == 1, "the stale one is still there"
    assert job.in_memory_of(1)[12] == 2

    resumed = job.live()
    assert (resumed.start, resumed.resumed()["generation"]) == (11, 1)
    job.ended_as_undisturbed()
