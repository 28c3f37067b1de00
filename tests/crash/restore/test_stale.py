"""Reuse of version numbers after a restart: shards of an earlier run are never mixed with the new
run's.

The middle run trains with another weight decay, so a mix would show.
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


def test_a_run_that_was_overtaken_on_disk_is_not_an_ancestor_of_its_successor(job: Job) -> None:
    """v12 and v16 of the first run are on disk; the job goes back to v9, and is killed at v14."""
    job.settings.update(local_every_steps=4, local_keep_last=9, when_busy="wait")
    life = job.start(gates={"stand": 18}).waiting("stand")
    job.wait_for(lambda: job.both_have(lambda r: versions(job, r)) == 16, "v16 on disk")
    life.kill()
    job.agents_end()
    job.reboot()
    for rank in (0, 1):  # the newest is lost, and with it v12 on one rank
        for key in job.on_disk(rank):
            if key.id.version == 16 or (key.id.version, rank) == (12, 1):
                job.store.retire(key)
    life = job.start(
        {1: "stop@file:op=write"}, gates={"stand": 14}, settings={"when_busy": "skip"}, **OTHER
    )
    life.waiting("stand")
    assert life.start == 8
    job.wait_for(lambda: (12, 2) in generations(job, 0), "the new v12 of rank 0")
    job.reboot()
    assert job.live().start == 8
    job.ended_as_undisturbed()


def test_files_written_by_an_agent_of_a_forgotten_run_are_not_taken_for_new(job: Job) -> None:
    """Slots did not survive (no space in shared memory), and the agent of the second run is slow:
    when the third starts, nothing shows that there was a second."""
    volatile = "enospc@call:what=create_slot"
    job.settings.update(local_every_steps=4, when_busy="wait")
    rules = {0: f"{volatile};kill@script:step=9,phase=begin", 1: volatile}
    job.live(rules)
    job.agents_end()
    assert job.both_have(lambda r: versions(job, r)) == 8

    volatile += ",hit=1"  # each rule fires once
    slow = "stop@file:op=write"
    life = job.start({0: f"{volatile};{slow}", 1: f"{volatile};kill@file:op=write"}, **OTHER)
    job.wait_fired(0, slow)
    job.wait_fired(1, "kill@file:op=write")
    assert life.start == 8
    life.kill()
    (old,) = job.agents(0)

    slow = "stop@agent:version=12"
    life = job.start({0: slow})
    job.wait_fired(0, slow)
    job.wait_for(lambda: 12 in versions(job, 1), "v12 of rank 1")
    assert life.start == 8
    old.wake()
    assert old.ended(60), job.output()
    job.reboot()
    resumed = job.live()
    assert resumed.start == 8, "v12 is half of the second run, half of the third"
    job.ended_as_undisturbed()


def versions(job: Job, rank: int) -> list[int]:
    """The versions on disk."""
    return [k.id.version for k in job.on_disk(rank)]


def generations(job: Job, rank: int) -> set[tuple[int, int]]:
    return {(k.id.version, k.id.generation) for k in job.on_disk(rank)}
