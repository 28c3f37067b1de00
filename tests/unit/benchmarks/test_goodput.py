"""benchmarks/goodput.py's own bookkeeping: which steps count, and what a failure cost."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def modules(benchmark_module: Callable[[str], Any]) -> argparse.Namespace:
    """The benchmark's modules."""
    names = ("runs", "course", "jobs")
    return argparse.Namespace(**{n: benchmark_module(f"lib.goodput.{n}") for n in names})


def course(modules: argparse.Namespace, *lines: tuple[int, int, float, bool], **more: Any) -> Any:
    steps = [modules.course.Step(*line) for line in lines]
    return modules.course.Course(110.0, steps, **more)


def test_steps_that_were_made_again_count_once(modules: argparse.Namespace) -> None:
    """Killed after the third step, back from the first."""
    found = course(
        modules,
        (0, 0, 100.0, True),
        (0, 1, 101.0, False),
        (0, 2, 102.0, False),
        (0, 3, 103.0, False),
        (1, 1, 105.5, True),
        (1, 2, 106.5, False),
        kills=[102.5],
    )
    assert (found.wall_seconds, found.useful, found.made) == (10.0, 2, 4)
    assert found.back_seconds == [4.0], "the third step had been complete already"
    assert found.last_run() == [106.5]


def test_a_job_that_never_came_back(modules: argparse.Namespace) -> None:
    found = course(modules, (0, 0, 100.0, True), (0, 1, 101.0, False), kills=[101.5])
    assert found.back_seconds == []
    nothing = course(modules)
    assert (nothing.wall_seconds, nothing.useful) == (0.0, 0)


def test_failures_are_the_same_for_every_method_and_as_many_as_asked_for(
    modules: argparse.Namespace,
) -> None:
    arrivals = modules.runs.arrivals
    assert arrivals(1000, 100, seed=3) == arrivals(1000, 100, seed=3)
    assert arrivals(1000, 100, seed=3) != arrivals(1000, 100, seed=4)
    found = arrivals(100_000, 10_000, seed=1)
    assert len(found) == 10_000
    gaps = [b - a for a, b in pairwise(found)]
    assert min(gaps) >= 0
    assert sum(gap < 10 for gap in gaps) / len(gaps) == pytest.approx(1 - 1 / math.e, abs=0.02)


def test_methods_with_a_launcher_are_launched(modules: argparse.Namespace) -> None:
    plan = modules.jobs.Plan

    def starter(method: str) -> str:
        return str(modules.jobs.starter_of(plan("toy", method, 2, 1, 1, "", "")).__name__)

    assert starter("ours-run") == "Launched"
    assert [starter(name) for name in ("ours", "torch-save", "nothing")] == ["Forks"] * 3
    assert starter("hvd-elastic") == "Relayed"


def test_the_log_of_a_killed_job_gives_its_steps(
    modules: argparse.Namespace, tmp_path: Path
) -> None:
    """The second start goes on from the first step."""
    plan = modules.jobs.Plan("toy", "ours", 2, 9, 1, str(tmp_path), "")
    lines = [
        {"begun": 1.0, "restored": 2.0, "resumed_from": 0},
        {"step": 1, "end": 3.0},
        {"step": 2, "end": 4.0},
        {"begun": 5.0, "restored": 6.0, "resumed_from": 1},
        {"step": 2, "end": 7.0},
        {"stall": 0.25},
    ]
    plan.log_of(0).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"st')
    step = modules.course.Step
    assert modules.course.steps_of(plan) == [
        step(0, 0, 2.0, True),
        step(0, 1, 3.0),
        step(0, 2, 4.0),
        step(1, 1, 6.0, True),
        step(1, 2, 7.0),
    ]
    assert modules.course.stall_of(plan) == 0.25


def test_goodput_is_useful_steps_at_the_undisturbed_pace(modules: argparse.Namespace) -> None:
    row = modules.runs.Result("ours", "", 60.0, 3, 0.01, 0.1, wall_seconds=100.0, useful_steps=960)
    assert row.goodput == pytest.approx(0.96)


@pytest.mark.parametrize(
    ("costs", "asked", "found"),
    [
        ({5: 1.0}, [5], 1.0),  # ten seconds apart, by Daly: farther than it was measured at
        ({5: 0.001, 1: 0.03}, [5, 1], 0.03),
        ({5: 0.001, 1: 0.0005}, [5, 1], 0.001),
    ],
)
def test_a_cost_that_has_versions_come_closer_is_measured_there_too(
    costs: dict[int, float],
    asked: list[int],
    found: float,
    modules: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, at = modules.runs, []

    def measured(bench: Any, method: str, every: int) -> Any:
        at.append(every)
        return runs.Cost(costs[every], 0.0)

    monkeypatch.setattr(runs.Bench, "_cost_at", measured)
    monkeypatch.setattr(runs.Bench, "plain", lambda bench, method: 0.25)
    bench = runs.Bench(argparse.Namespace(mtbf=[10.0, 60.0]), None, None)
    assert bench.cost("ours").seconds == found
    assert at == asked
