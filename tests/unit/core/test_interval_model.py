"""Interval model: the formulas against a simulated job, failure by failure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.core import (
    SHARES,
    LevelModel,
    daly_seconds,
    optimum,
    overhead,
    rates,
    whole_steps,
    within_budget,
    young_seconds,
)


def exact_time(interval: float, cost: float, rate: float) -> float:
    """Expected wall time for a second of training, one level, no restarts: Daly's integral."""
    return math.expm1(rate * (interval + cost)) / (rate * interval)


class Simulation:
    """A job with levels, run until a number of failures; it uses no formula."""

    def __init__(self, levels: Sequence[LevelModel], segment: float, every: Sequence[int]) -> None:
        """`every`: a version goes to a level after this many segments of `segment` seconds."""
        self.levels, self.segment, self.every = levels, segment, every

    def goodput(self, failures: int, seed: int) -> float:
        chance = random.Random(seed)
        total = sum(level.failures_per_second for level in self.levels)
        weights = [level.failures_per_second for level in self.levels]
        now, at = 0.0, 0
        have: list[list[tuple[float, int]]] = [[(0.0, 0)] for _ in self.levels]
        for _ in range(failures):
            fails = now + chance.expovariate(total)
            broken = chance.choices(range(len(self.levels)), weights)[0]
            while True:
                due = [i for i, k in enumerate(self.every) if (at + 1) % k == 0]
                end = now + self.segment
                after = end + sum(self.levels[i].cost_seconds for i in due)
                if after > fails:
                    break
                now, at = after, at + 1
                for i in due:
                    have[i].append((end + self.levels[i].latency_seconds, at))
            at = self.goes_back(have, broken, fails)
            now = fails
            restart = self.levels[broken].restart_seconds
            while restart:  # failures also come during a restart, which then starts again
                again = chance.expovariate(total)
                if again > restart:
                    now += restart
                    break
                now += again
        return at * self.segment / now

    @staticmethod
    def goes_back(have: list[list[tuple[float, int]]], broken: int, now: float) -> int:
        """Return the newest version complete on a surviving level."""
        left = [at for level in have[broken:] for ready, at in level if ready <= now]
        best = max(left, default=0)
        for i, level in enumerate(have):
            level[:] = [(0.0, 0), (0.0, best)] if i >= broken else [(0.0, 0)]
        return best


rates_of = st.floats(1e-5, 1e-3)
costs = st.floats(1e-3, 30.0)


@given(costs, rates_of)
def test_young_balances_the_paid_and_the_lost_time(cost: float, rate: float) -> None:
    interval = young_seconds(cost, rate)
    assert cost / interval == pytest.approx(rate * interval / 2)


@given(st.floats(1e-4, 0.5))
def test_dalys_interval_is_the_best_by_brute_force(cost: float) -> None:
    """In units of the mean time between failures: compared with the best of a fine grid."""
    here = exact_time(daly_seconds(cost, 1.0), cost, 1.0)
    grid = [10 ** (k / 200) for k in range(-1000, 300)]
    best = min(exact_time(interval, cost, 1.0) for interval in grid if interval < 20)
    assert here - 1 <= (best - 1) * 1.003
    young = exact_time(young_seconds(cost, 1.0), cost, 1.0)
    assert here <= young * (1 + 1e-9)


def test_a_checkpoint_longer_than_failures_are_apart() -> None:
    assert daly_seconds(5.0, 1.0) == 1.0
    assert daly_seconds(5.0, 0.0) == math.inf
    assert daly_seconds(0.0, 1.0) == 0.0


def test_the_overhead_is_that_of_the_simulated_job() -> None:
    memory = LevelModel("memory", 0.2, 1 / 400, restart_seconds=3.0, latency_seconds=8.0)
    local = LevelModel("local", 1.5, 1 / 4000, restart_seconds=20.0, latency_seconds=40.0)
    levels, every = [memory, local], [1, 6]
    expected = overhead(levels, [11.0, 66.0])
    simulated = Simulation(levels, 11.0, every).goodput(10_000, seed=1)
    assert expected.goodput == pytest.approx(simulated, abs=0.006)
    without = overhead([memory, LevelModel("local", 1.5, 0.0)], [11.0, 66.0])
    assert abs(without.goodput - simulated) > 0.01, "the second level counts"


def test_the_time_that_a_checkpoint_takes_is_lost_with_its_interval() -> None:
    level = LevelModel("local", 2.0, 1 / 1000, restart_seconds=10.0, latency_seconds=5.0)
    cost = overhead([level], [8.0])
    assert cost.checkpoints == pytest.approx(2 / 8)
    assert cost.lost == pytest.approx(((8 + 2) / 2 + 5) / 1000)
    assert cost.restarts == pytest.approx(10 / 1000)


@pytest.mark.parametrize(("cheap", "dear", "share"), [(2.0, 20.0, 0.1), (8.0, 5.0, 0.5)])
def test_no_other_intervals_are_better_in_the_simulation(
    cheap: float, dear: float, share: float
) -> None:
    """Two levels; intervals much shorter and longer than the best ones, in all combinations."""
    rate = 1 / 1000
    levels = [
        LevelModel("memory", cheap, rate * (1 - share)),
        LevelModel("local", dear, rate * share),
    ]
    first, second = optimum(levels)
    assert first <= second
    every = max(1, round(second / first))
    best = Simulation(levels, first, [1, every]).goodput(2500, seed=3)
    for factor in (0.4, 1.0, 2.5):
        for ratio in {every, max(1, every // 3), 3 * every}:
            other = Simulation(levels, factor * first, [1, ratio]).goodput(2500, seed=3)
            assert other <= best + 0.003, (factor, ratio)


levels_of = st.lists(st.tuples(costs, rates_of), min_size=1, max_size=4).map(
    lambda pairs: [LevelModel(str(i), cost, rate) for i, (cost, rate) in enumerate(pairs)]
)


def first_order(levels: Sequence[LevelModel], intervals: Sequence[float]) -> float:
    pairs = zip(levels, intervals, strict=True)
    return sum(x.cost_seconds / t + x.failures_per_second * t / 2 for x, t in pairs)


@given(levels_of, st.integers(0, 2**32))
def test_levels_come_in_order_and_no_other_order_is_better(
    levels: list[LevelModel], seed: int
) -> None:
    """Intervals that rise from level to level: none of many random ones has less overhead."""
    found = optimum(levels)
    assert found == sorted(found)
    least = first_order(levels, found)
    # Daly's refinement moves an interval from the first-order optimum to `moved` of it; the more a
    # version costs, the farther.
    dear, often = (
        sum(column)
        for column in zip(*((e.cost_seconds, e.failures_per_second) for e in levels), strict=True)
    )
    x = dear * often / 2
    moved = 1 - 2 / 3 * x**0.5 + x / 9
    more = (moved + 1 / moved) / 2
    chance = random.Random(seed)
    for _ in range(200):
        wide = chance.choice([1.05, 2.0, 10.0])
        other = sorted(t * wide ** chance.uniform(-1, 1) for t in found)
        assert first_order(levels, other) * more >= least * (1 - 1e-9)


@given(levels_of, st.floats(1.0, 100.0))
def test_no_interval_is_shorter_than_a_step_or_a_latency(
    levels: list[LevelModel], step: float
) -> None:
    slow = [LevelModel(x.name, x.cost_seconds, x.failures_per_second, 0.0, 50.0) for x in levels]
    assert min(optimum(levels, step)) >= step
    assert min(optimum(slow)) >= 50.0


@given(levels_of, st.floats(1e-4, 0.3))
def test_the_budget_is_held_and_nothing_better_holds_it(
    levels: list[LevelModel], budget: float
) -> None:
    free = optimum(levels)
    held = within_budget(levels, free, budget)
    spent = overhead(levels, held).checkpoints
    assert spent <= budget * (1 + 1e-9)
    assert held == free or spent == pytest.approx(budget)
    all_spent = within_budget(levels, free, budget, use_all=True)
    assert overhead(levels, all_spent).checkpoints == pytest.approx(budget)
    if held != free:
        # Move cost from one level to another with the same sum: the overhead grows.
        for i, j in permutations(range(len(levels)), 2):
            shift = 0.3 * min(levels[k].cost_seconds / held[k] for k in (i, j))
            other = [x.cost_seconds / t for x, t in zip(levels, held, strict=True)]
            other[i], other[j] = other[i] - shift, other[j] + shift
            moved = [x.cost_seconds / share for x, share in zip(levels, other, strict=True)]
            if moved == sorted(moved):
                assert first_order(levels, moved) >= first_order(levels, held) * 0.97


slow_levels_of = st.lists(
    st.tuples(costs, rates_of, st.floats(0.0, 1e4)), min_size=1, max_size=4
).map(
    lambda told: [LevelModel(str(i), c, rate, 0.0, late) for i, (c, rate, late) in enumerate(told)]
)


@given(slow_levels_of, st.floats(1e-4, 0.3), st.floats(0.0, 100.0), st.booleans())
def test_time_that_a_slow_level_may_not_spend_goes_to_the_others(
    levels: list[LevelModel], budget: float, least: float, use_all: bool
) -> None:
    """A level is at its latency, or stretched by the factor of all others; no budget is left that
    another level could use."""
    free = [daly_seconds(x.cost_seconds, x.failures_per_second) for x in levels]
    held = within_budget(levels, free, budget, use_all, least)
    floors = [max(least, x.latency_seconds) for x in levels]
    assert all(t >= floor for t, floor in zip(held, floors, strict=True))
    spent = overhead(levels, held).checkpoints
    assert spent <= budget * (1 + 1e-9)
    moved = [t / f for t, f, floor in zip(held, free, floors, strict=True) if t > floor]
    assert moved == pytest.approx(moved[:1] * len(moved)), "alike"
    assert not moved or spent == pytest.approx(budget) or (not use_all and min(moved) <= 1)


def test_a_missing_level_leaves_its_failures_to_the_next() -> None:
    assert sum(SHARES.values()) == pytest.approx(1.0)
    assert rates(["memory", "local", "persistent"], 2.0) == pytest.approx([1.6, 0.3, 0.1])
    assert rates(["local", "persistent"], 1.0) == pytest.approx([0.95, 0.05])
    assert rates(["memory"], 1.0) == pytest.approx([1.0])


def test_whole_steps_are_multiples_of_each_other() -> None:
    assert whole_steps([2.1, 10.0, math.inf], 1.0, 1000) == [3, 12, 1000]
    assert whole_steps([0.0, 3.0], 1.0, 1000) == [1, 3]
    assert whole_steps([0.3], 0.1, 1000) == [3]


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=3), st.floats(1e-3, 10.0))
def test_whole_steps_never_cost_more(intervals: list[float], step: float) -> None:
    intervals = sorted(intervals)
    steps = whole_steps(intervals, step, 10**9)
    assert all(n * step >= t * (1 - 1e-6) for n, t in zip(steps, intervals, strict=True))
    assert all(n >= 1 for n in steps)
