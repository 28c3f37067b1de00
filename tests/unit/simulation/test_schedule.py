"""Versions without events: the newest one at a moment, compared with a count step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.simulation import Rung, Schedule

STALLS = st.sampled_from([0.0, 0.001, 0.3, 7.5])


def walked(schedule: Schedule, position: float, every: int) -> int:
    """The newest version with its stall over, found by walking."""
    at, newest, version = 0.0, 0, 0
    while True:
        version += 1
        at += schedule.step_seconds
        due = [rung for rung in schedule.rungs if version % rung.every_steps == 0]
        at += sum(rung.stall_seconds for rung in due)
        if at > position + 1e-9:
            return newest
        if version % every == 0:
            newest = version


@given(
    st.sampled_from([0.01, 1.0, 5.0]),
    st.integers(1, 4),
    st.integers(1, 5),
    STALLS,
    STALLS,
    st.floats(0, 200),
)
def test_the_newest_version_is_that_of_a_walk(
    step: float, first: int, times: int, stall: float, other: float, steps: float
) -> None:
    second = first * times
    rungs = Rung("memory", first, stall, 0.0), Rung("persistent", second, other, 0.0)
    schedule = Schedule(step, rungs)
    position = steps * step + 1e-6
    for every in (1, first, second):
        assert schedule.newest(position, every) == walked(schedule, position, every)


def test_a_version_exists_when_its_stall_is_over() -> None:
    schedule = Schedule(1.0, (Rung("persistent", 10, 5.0, 0.0),))
    assert schedule.position(10) == 15.0
    assert schedule.newest(14.9, 10) == 0
    assert schedule.newest(15.0, 10) == 10
    assert schedule.newest(1e12, 10) == pytest.approx(1e12 / 1.5, rel=1e-6)
