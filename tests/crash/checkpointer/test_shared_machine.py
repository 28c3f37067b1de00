"""The job's resources on a machine that other users share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.crash.launcher import PATIENCE_SECONDS, Job
from tests.support.crash.scenario import RANKS
from tierckpt.storage import job_directory

KILL = "kill@seal:version=12"


def test_memory_of_a_dead_job_is_removed_by_another_after_it_lingered(
    make_job: Callable[[str], Job],
) -> None:
    dead, other, later = make_job("dead"), make_job("other"), make_job("later")
    dead.live({1: KILL}, settings={"agent_linger_seconds": 2})
    assert dead.fired(1, KILL)
    dead.agents_end()
    left = dead.segments()
    assert len(left) >= 2 * RANKS
    other.live()
    assert dead.segments() == left, "within the hour its successor may come"
    seen_dead_long_ago(dead)
    later.live()
    later.ended_as_undisturbed()
    assert dead.segments() == []


def test_memory_of_a_living_job_is_never_removed(make_job: Callable[[str], Job]) -> None:
    living, other = make_job("living"), make_job("other")
    life = living.start(gates={"stand": 12}).waiting("stand")
    held = living.segments()
    seen_dead_long_ago(living)
    other.live()
    assert other.journal(0, start=0)
    assert living.segments() == held
    life.kill()
    resumed = living.live()
    assert life.promised() <= resumed.start <= 12
    assert resumed.resumed()["levels"] == {"memory": 2}
    living.ended_as_undisturbed()


def test_memory_of_a_job_with_a_writing_agent_is_not_removed(
    make_job: Callable[[str], Job],
) -> None:
    dead, other, later = make_job("dead"), make_job("other"), make_job("later")
    slow = "stop@file:op=write,hit=2"
    life = dead.start({0: slow}, settings={"when_busy": "wait"})
    dead.wait_fired(0, slow)
    life.kill()
    held = segments_of(dead, 0)
    seen_dead_long_ago(dead)
    other.live()
    assert segments_of(dead, 0) == held
    (agent,) = dead.agents(0)
    agent.wake()
    assert agent.ended(PATIENCE_SECONDS), dead.output()
    assert 8 in [k.id.version for k in dead.on_disk(0)]
    dead.agents_end()
    seen_dead_long_ago(dead)
    later.live()
    assert dead.segments() == []


def seen_dead_long_ago(job: Job) -> None:
    """Another job has found no process of this job for longer than its memory is kept."""
    seen_seconds = time.clock_gettime(time.CLOCK_MONOTONIC) - 3601
    mark = json.dumps({"clock": job_directory._clock(), "monotonic_seconds": seen_seconds})
    for folder in {path.parent for path in job.segments()}:
        (folder / job_directory.DEAD_MARK).write_text(mark)


def segments_of(job: Job, rank: int) -> list[Path]:
    """The memory of the rank's own node; the node of the other rank has no agent any more."""
    return [p for p in job.segments() if p.name.startswith(f"r{rank:05d}.")]
