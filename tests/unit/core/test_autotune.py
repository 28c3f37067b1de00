"""Automatic intervals: measured on a simulated training, decided alike on all ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tierckpt.config import load_config
from tierckpt.core import (
    INTERVALS,
    LOCAL,
    LOOK_STEPS,
    MEMORY,
    MIN_STEPS,
    PERSISTENT,
    Change,
    Cost,
    CostEstimate,
    LevelVote,
    Schedule,
    StepTimer,
    Tuner,
    Vote,
)

STEP_SECONDS = 0.1


def tuner(**arguments: Any) -> Tuner:
    settings = {"memory_every_steps": "auto", "local_every_steps": "auto", **arguments}
    return Tuner(load_config(settings, {}))


def heed(made: Tuner, **figures: int) -> tuple[Change, ...]:
    return made.heed(LOOK_STEPS, LOOK_STEPS - 1, estimate(**figures))


def estimate(step_us: int, **costs: int) -> CostEstimate:
    """Make an estimate from costs by names such as `memory_us` and `local_steps`."""
    get = costs.pop
    levels = {n: Cost(get(f"{n}_us", 0), get(f"{n}_steps", 0)) for n in INTERVALS}
    assert not costs
    return CostEstimate(step_us, levels)


# --- the setting ---------------------------------------------------------------------------------


def test_auto_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "tierckpt.toml"
    file.write_text('[memory]\nevery_steps = "auto"\n')
    for config in (
        load_config({"memory_every_steps": "auto"}, {}),
        load_config({}, {"TIERCKPT_MEMORY_EVERY_STEPS": "auto"}),
        load_config({}, {}, file),
    ):
        assert config.memory.every_steps == "auto"
        assert config.uses("memory")
    far = {"persistent_path": str(tmp_path), "persistent_every_seconds": 0}
    assert load_config({"persistent_every_steps": "auto", **far}, {}).uses("persistent")
    off = load_config({"local_every_steps": "auto", "local_every_seconds": 0}, {})
    assert off.uses("local")


# --- the meter -----------------------------------------------------------------------------------


class Training:
    """The steps of one rank, by its own clock."""

    def __init__(
        self,
        memory: float,
        local: float = 0.0,
        writing: int = 1,
        flush: float = 0.0,
        flushing: int = 1,
        times_flushes: bool = True,
    ) -> None:
        """Seconds that a version adds: to memory, to local over `writing` steps, and by a flush
        over `flushing` steps."""
        self.meter, self.chance = StepTimer(times_flushes), random.Random(1)
        self.memory, self.local, self.writing = memory, local, writing
        self.flush, self.flushing = flush, flushing
        self.now, self.version, self.left, self.flush_left = 100.0, 0, 0, 0

    def run(
        self,
        steps: int,
        memory_every: int,
        local_every: int = 0,
        noise: float = 0.0,
        flush_every: int = 0,
    ) -> float:
        """Return the time of the checkpoints as a share of the steps' own time."""
        spent = 0.0
        for _ in range(steps):
            self.version += 1
            busy, take = self.left > 0, ["memory"] * (self.version % memory_every == 0)
            if local_every and self.version % local_every == 0 and not busy:
                self.left, take = self.writing, ["memory", "local"]
            if flush_every and self.version % flush_every == 0 and not self.flush_left:
                self.flush_left = self.flushing
            self.meter.boundary(self.now, self.version, take, busy, self.flush_left > 0)
            extra = self.memory * bool(take) + (self.local / self.writing if self.left else 0.0)
            extra += self.flush / self.flushing if self.flush_left else 0.0
            self.left, self.flush_left = max(0, self.left - 1), max(0, self.flush_left - 1)
            self.now += STEP_SECONDS * (1 + noise * self.chance.random()) + extra
            spent += extra
        return spent / (steps * STEP_SECONDS)


def test_nothing_is_reported_before_enough_samples() -> None:
    training = Training(memory=0.01)
    training.run(MIN_STEPS - 1, memory_every=1000)
    assert training.meter.figures() == CostEstimate()
    training.run(2, memory_every=1000)
    assert training.meter.figures().step_us == pytest.approx(1e6 * STEP_SECONDS, rel=1e-3)
    assert training.meter.figures().of(MEMORY).us == 0, "not known is not free"


def test_the_cost_of_each_level_is_separated() -> None:
    training = Training(memory=0.01, local=0.06, writing=3)
    training.run(200, memory_every=2, local_every=12)
    found = training.meter.figures()
    assert found.step_us == pytest.approx(100_000, abs=10)
    assert found.of(MEMORY).us == pytest.approx(10_000, abs=10)
    assert found.of(LOCAL).us == pytest.approx(60_000, abs=10)
    assert found.of(LOCAL).steps == 3


def test_the_cost_of_local_is_separated_where_every_step_has_a_version_to_memory() -> None:
    training = Training(memory=0.01, local=0.06, writing=3)
    for _ in range(200):
        training.run(1, memory_every=1, local_every=12)
        training.meter.stalled(0.01)
    assert training.meter.figures().of(LOCAL).us == pytest.approx(60_000, abs=10)


def test_an_always_busy_disk_is_seen() -> None:
    """Versions to local follow each other without a pause."""
    training = Training(memory=0.01, local=0.06, writing=10)
    training.run(100, memory_every=4, local_every=1000)
    training.run(100, memory_every=4, local_every=10)
    found = training.meter.figures()
    assert found.of(LOCAL).us == pytest.approx(60_000, rel=0.2)
    assert found.of(LOCAL).steps == 10


@pytest.mark.parametrize("memory_every", [1, 2, 1000])
def test_the_cost_of_a_flush_is_separated(memory_every: int) -> None:
    training = Training(memory=0.01, local=0.06, writing=3, flush=0.4, flushing=20)
    training.run(600, memory_every, local_every=10, flush_every=50)
    found = training.meter.figures()
    assert found.of(PERSISTENT).us == pytest.approx(400_000, rel=1e-3)
    assert found.of(PERSISTENT).steps == 20
    with_memory = memory_every == 1  # then no step without a version is ever seen
    assert found.step_us == pytest.approx(110_000 if with_memory else 100_000, abs=10)


def test_a_store_fast_again_is_believed_at_once() -> None:
    """The next flush comes an interval later: if several were needed to shorten the interval, a
    store that was slow for a while would keep it long for days."""
    for flushes in (1, 9):
        training = Training(memory=0.01, flush=6.0, flushing=600)
        training.run(1000 * flushes + 800, memory_every=2, flush_every=1000)
        slow = training.meter.figures()
        assert (slow.of(PERSISTENT).us, slow.of(PERSISTENT).steps) == (
            pytest.approx(6e6, rel=1e-3),
            600,
        )
        training.flush, training.flushing = 0.2, 20
        training.run(500, memory_every=2, flush_every=400)
        fast = training.meter.figures()
        assert (fast.of(PERSISTENT).us, fast.of(PERSISTENT).steps) == (
            pytest.approx(2e5, rel=1e-3),
            20,
        )


def test_a_flush_of_which_nobody_asks_is_a_part_of_all_steps() -> None:
    """Otherwise no cost would be known where a slow store always has a flush under way."""
    training = Training(memory=0.01, flush=1.0, flushing=100, times_flushes=False)
    training.run(300, memory_every=2, flush_every=1)
    found = training.meter.figures()
    assert (found.of(PERSISTENT).us, found.of(PERSISTENT).steps) == (0, 0)
    assert found.step_us == pytest.approx(110_000, abs=10)
    assert found.of(MEMORY).us == pytest.approx(10_000, abs=10)


def test_slow_steps_now_and_then_are_no_cost() -> None:
    """An evaluation between two steps, once in twenty steps."""
    training = Training(memory=0.01)
    for _ in range(10):
        training.run(19, memory_every=4)
        training.now += 30.0
    assert training.meter.figures().of(MEMORY).us == pytest.approx(10_000, abs=10)


def test_a_stall_is_the_least_that_a_version_costs() -> None:
    """Also where steps vary by more than the cost, or every step has a version."""
    training = Training(memory=0.0)
    training.run(100, memory_every=1)
    for _ in range(10):
        training.meter.stalled(0.004)
    assert training.meter.figures().of(MEMORY).us == 4000


def test_several_steps_between_two_boundaries_share_the_time() -> None:
    meter, now = StepTimer(), 0.0
    for boundary in range(40):
        meter.boundary(now, 4 * boundary, ["memory"] * (boundary % 2 == 0), False)
        now += 4 * STEP_SECONDS + 0.01 * (boundary % 2 == 0)
    assert meter.figures().step_us == pytest.approx(100_000, abs=10)
    assert meter.figures().of(MEMORY).us == pytest.approx(10_000, abs=10)


# --- the tuner -----------------------------------------------------------------------------------


def test_the_budget_alone_decides_where_failures_are_unknown() -> None:
    made = tuner(local_every_steps=0, local_every_seconds=0.0)
    (change,) = heed(made, step_us=100_000, memory_us=30_000)
    assert (change.level, change.every_steps, change.before_steps) == ("memory", 10, 4)
    assert made.every_steps == {"memory": 10}
    assert "every 10 steps (was 4)" in change.text()
    heed(made, step_us=1_000, memory_us=600)
    assert made.every_steps == {"memory": 20}, "all of it is used, also where versions are cheap"


def test_it_moves_in_both_directions() -> None:
    made = tuner(local_every_steps=0)
    for cost, expected in ((60_000, 20), (6_000, 2), (300, 1), (600_000, 200), (3_000, 1)):
        heed(made, step_us=100_000, memory_us=cost)
        assert made.every_steps["memory"] == expected


def test_a_small_difference_changes_nothing() -> None:
    made = tuner(local_every_steps=0)
    heed(made, step_us=100_000, memory_us=60_000)
    for cost in (63_000, 57_000, 46_000, 65_000):
        assert heed(made, step_us=100_000, memory_us=cost) == ()
    assert [c.every_steps for c in heed(made, step_us=100_000, memory_us=80_000)] == [27]


@pytest.mark.parametrize("persistent_us", range(37_000, 100_000, 7_000))
def test_nor_where_an_interval_is_a_multiple_that_nobody_wants(
    persistent_us: int, tmp_path: Path
) -> None:
    """Flushes alone would be somewhat rarer than versions to local; they come with every second."""
    made = tuner(persistent_every_steps="auto", persistent_path=str(tmp_path))
    others = {"local_us": 80_000, "persistent_us": persistent_us}
    lasting = {"local_steps": 2, "persistent_steps": 2}
    heed(made, step_us=100_000, memory_us=2_000, **others, **lasting)
    for memory_us in (2_200, 1_700, 2_100, 2_000):
        assert heed(made, step_us=100_000, memory_us=memory_us, **others, **lasting) == ()


def test_all_levels_share_the_budget(tmp_path: Path) -> None:
    made = tuner(persistent_every_steps="auto", persistent_path=str(tmp_path))
    assert made.every_steps == {"memory": 4, "local": 32, "persistent": 256}
    costs = {"memory_us": 2_000, "local_us": 80_000, "persistent_us": 900_000}
    (*_, last) = heed(made, step_us=100_000, local_steps=2, persistent_steps=40, **costs)
    assert last.level == "persistent"
    memory, local, persistent = made.every_steps.values()
    assert local % memory == 0
    assert persistent % local == 0
    spent = 0.02 / memory + 0.8 / local + 9 / persistent
    assert 0.015 < spent <= 0.03


def test_flushes_take_half_of_the_time_at_most(tmp_path: Path) -> None:
    fixed = {"memory_every_steps": 1, "local_every_steps": 0}
    made = tuner(persistent_every_steps="auto", persistent_path=str(tmp_path), **fixed)
    heed(made, step_us=100_000, persistent_us=1, persistent_steps=300)
    assert made.every_steps == {"persistent": 600}


def test_a_slow_store_is_no_reason_to_flush_seldom(tmp_path: Path) -> None:
    """A flush of ten minutes that costs almost nothing: it starts again as soon as possible, and
    the other levels get the rest of its budget."""
    made = tuner(persistent_every_steps="auto", persistent_path=str(tmp_path))
    costs = {"memory_us": 2_000, "local_us": 200_000, "persistent_us": 20_000}
    heed(made, step_us=100_000, local_steps=10, persistent_steps=6_000, **costs)
    memory, local, persistent = made.every_steps.values()
    assert 12_000 <= persistent < 12_000 + local
    assert 0.025 < 0.02 / memory + 2 / local + 0.2 / persistent <= 0.03


def test_a_level_of_unknown_cost_waits() -> None:
    made = tuner()
    heed(made, step_us=100_000, memory_us=60_000)
    assert made.every_steps == {"memory": 20, "local": 32}


def test_changes_come_at_certain_versions_only() -> None:
    made, figures = tuner(local_every_steps=0), estimate(step_us=100_000, memory_us=60_000)
    assert made.heed(LOOK_STEPS - 1, 1, figures) == ()
    assert made.heed(LOOK_STEPS + 5, LOOK_STEPS, figures) == ()
    assert made.heed(LOOK_STEPS + 5, LOOK_STEPS - 3, figures) != (), "also when jumped over"


# --- both, in a schedule -------------------------------------------------------------------------


def test_some_steps_are_left_out_as_samples() -> None:
    made = tuner(local_every_steps=0)
    heed(made, step_us=100_000, memory_us=10)
    due = [v for v in range(1, 65) if made.due(MEMORY, v - 1, v)]
    assert len(due) == 60


def test_without_auto_nothing_is_tuned() -> None:
    schedule = Schedule(load_config({"memory_every_steps": 3}, {}))
    costs = {**Vote().levels, MEMORY: LevelVote(less_us=-90_000)}
    vote = Vote(costs, less_step_us=-100_000)
    taken = [v for v in range(1, 40) if schedule.decide(v, vote).take]
    assert taken == list(range(3, 40, 3))
