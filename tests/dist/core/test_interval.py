"""Automatic intervals in real jobs: measured on each rank, equal on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.training import Attached, Place, attach, crash_after, make_job, rank, train
from tierckpt.core import MEMORY, Cost, CostEstimate

BOTH = {"memory_every_steps": "auto", "local_every_steps": "auto", "slots": 3}


def told(attached: Attached) -> dict[str, Any]:
    changes = [e for e in attached.events if e.name == "interval"]
    return {
        "sealed": attached.versions("sealed", "memory"),
        "changes": [(e.version, e.level, e.message) for e in changes],
        "failed": attached.versions("failed", "local") + attached.versions("failed", "memory"),
    }


def with_given_costs(place: Place) -> dict[str, Any]:
    """The cost of versions on rank 1 is set here; on rank 0 they are nearly free."""
    job = make_job()
    attached = attach(job, place, memory_every_steps="auto")
    meter = attached.ckpt._meter
    assert meter is not None
    costs = iter([60_000] * 45 + [6_000] * 45)

    def figures() -> CostEstimate:
        return CostEstimate(100_000, {MEMORY: Cost(next(costs, 6_000) if rank() == 1 else 1)})

    meter.figures = figures  # type: ignore[method-assign]
    train(job, attached.ckpt, range(90))
    attached.ckpt.abandon()
    return told(attached)


def test_the_dearest_rank_decides_for_all_and_intervals_move_in_both_directions(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    one, other = ranks(2).run(with_given_costs, Place.under(tmp_path, shm_dir))
    assert one == other
    assert [(version, level) for version, level, _ in one["changes"]] == [
        (16, "memory"),
        (48, "memory"),
    ]
    assert [text.split(":")[0] for _, _, text in one["changes"]] == [
        "every 20 steps (was 4)",
        "every 2 steps (was 20)",
    ]
    assert one["sealed"] == [4, 8, 12, 20, 40, *range(48, 91, 2)]


def with_measured_costs(place: Place) -> tuple[dict[str, Any], dict[int, str]]:
    job = make_job()
    attached = attach(job, place, **BOTH)
    course = crash_after(job, attached, 100)
    assert attached.ckpt._meter is not None
    assert attached.ckpt._meter.figures().step_us > 0
    return told(attached), course


def resumed(place: Place) -> tuple[int, str]:
    job = make_job()
    attached = attach(job, place, **BOTH)
    start = attached.ckpt.restore()
    found = job.digest()
    attached.ckpt.close()
    return int(start), found


def test_a_job_with_measured_intervals_comes_back_to_the_bit(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    (one, course), (other, other_course) = ranks(2).run(with_measured_costs, place)
    assert one == other
    assert one["failed"] == []
    assert len(one["sealed"]) >= 3
    (start, found), (_, other_found) = ranks(2).run(resumed, place)
    assert start >= one["sealed"][-2]
    assert found == course[start]
    assert other_found == other_course[start]
