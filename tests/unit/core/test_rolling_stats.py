"""Windows of noisy values, and the intervals that are decided from them."""

from __future__ import annotations

import random
import statistics

import pytest

from tests.unit.core.test_autotune import STEP_SECONDS, tuner
from tierckpt.core import LOOK_STEPS, Change, Hysteresis, RollingStats, StepTimer, Tuner

# --- windows -------------------------------------------------------------------------------------


def filled(values: list[float], most: int = 512, fresh: int = 8) -> RollingStats:
    window = RollingStats(most, fresh)
    for value in values:
        window.append(value)
    return window


@pytest.mark.parametrize("count", [1, 2, 7, 63, 64, 65, 500])
def test_the_median_of_the_newest_that_there_is_room_for(count: int) -> None:
    chance = random.Random(count)
    values = [chance.gauss(10, 1) for _ in range(count)]
    window = filled(values, most=64)
    assert len(window) == min(count, 64)
    assert window.median == statistics.median(values[-64:])


def test_an_empty_window_says_nothing() -> None:
    window = RollingStats(8, 2)
    assert (len(window), window.median, window.spread, window.error()) == (0, 0.0, 0.0, 0.0)


def test_the_error_is_that_of_the_median() -> None:
    chance = random.Random(1)
    windows = [filled([chance.gauss(10, 2) for _ in range(256)]) for _ in range(200)]
    true = statistics.stdev(window.median for window in windows)
    assert statistics.mean(window.error() for window in windows) == pytest.approx(true, rel=0.2)


@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0])
def test_samples_before_and_after_a_change_are_not_mixed(noise: float) -> None:
    chance = random.Random(2)
    window = filled([10 + noise * chance.gauss(0, 1) for _ in range(300)])
    for _ in range(16):  # twice the needed number: the check runs every eight values
        window.append(20 + noise * chance.gauss(0, 1))
    assert len(window) < 30
    assert window.median == pytest.approx(20, abs=max(1e-9, 2 * noise))


def test_noise_and_outliers_shorten_no_window() -> None:
    chance = random.Random(3)
    values = [chance.gauss(10, 2) if chance.random() < 0.95 else 30.0 for _ in range(500)]
    assert len(filled(values)) == 500


def test_an_estimate_stays_while_noise_explains_the_difference() -> None:
    steady = Hysteresis()
    assert steady.follow(10.0, error=2.0) == 10.0
    for estimate in (12.0, 6.0, 12.9, 5.1):
        assert steady.follow(estimate, error=2.0) == 10.0
    assert steady.follow(13.1, error=2.0) == 13.1
    assert steady.follow(7.9, error=2.0) == 7.9
    assert steady.follow(8.0, error=0.0) == 8.0


# --- intervals -----------------------------------------------------------------------------------


class Noisy:
    """A training of varying steps, with its clock, its timer, and the resulting intervals."""

    WRITING_STEPS = 3

    def __init__(self, made: Tuner, noise: float, seed: int) -> None:
        self.tuner, self.meter, self.noise = made, StepTimer(), noise
        self.chance = random.Random(seed)
        self.last = dict.fromkeys(made.every_steps, 0)
        self.version, self.now, self.left = 0, 0.0, 0

    def step_seconds(self) -> float:
        """One of twenty steps is much longer."""
        often = self.chance.random() < 0.95
        return STEP_SECONDS * (1 + self.noise * (self.chance.gauss(0, 1) if often else 5))

    def run(self, steps: int, memory: float, local: float) -> tuple[list[list[Change]], float]:
        """Return the changes of each look, and the share of time that checkpoints took."""
        looks, spent = [], 0.0
        for _ in range(steps):
            self.version += 1
            busy = self.left > 0
            take = [n for n, last in self.last.items() if self.tuner.due(n, last, self.version)]
            take = [name for name in take if not (busy and name == "local")]
            self.last |= dict.fromkeys(take, self.version)
            self.left = self.WRITING_STEPS if "local" in take else self.left
            self.meter.boundary(self.now, self.version, take, busy)
            changes = self.tuner.heed(self.version, self.version - 1, self.meter.figures())
            if self.version % LOOK_STEPS == 0:
                looks.append(list(changes))
            extra = memory * bool(take) + local / self.WRITING_STEPS * (self.left > 0)
            self.left = max(0, self.left - 1)
            self.now += self.step_seconds() + extra
            spent += extra
        return looks, spent / (steps * STEP_SECONDS)


@pytest.mark.parametrize("seed", range(1, 3))
@pytest.mark.parametrize(("noise", "most_changes"), [(0.05, 12), (0.2, 8), (0.3, 14)])
def test_noise_moves_no_interval_back_and_forth(noise: float, most_changes: int, seed: int) -> None:
    """With 20 %, a version costs a tenth of the noise of steps; 3000 of them are 187 looks."""
    looks, share = Noisy(tuner(), noise, seed).run(3000, memory=0.002, local=0.008)
    assert sum(map(bool, looks)) <= most_changes
    assert share <= 0.033


@pytest.mark.parametrize("seed", range(1, 3))
@pytest.mark.parametrize(
    ("before", "after", "most_looks"),
    [(0.02, 0.06, 16), (0.06, 0.02, 32)],
    ids=["dearer", "cheaper"],
)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_cost_three_times_as_high_or_low_is_followed(
    noise: float, before: float, after: float, most_looks: int, seed: int
) -> None:
    """Upwards sooner: where versions are rarer, fewer values are seen."""
    training = Noisy(tuner(local_every_steps=0, local_every_seconds=0.0), noise, seed)
    training.run(2000, before, 0.0)
    wanted = after / STEP_SECONDS / 0.03
    training.run(most_looks * LOOK_STEPS, after, 0.0)
    assert 0.6 * wanted <= training.tuner.every_steps["memory"] <= 1.7 * wanted
