"""benchmarks/goodput.py's own bookkeeping: which steps count, and what a failure cost."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest


@pytest.fixture
def modules(benchmark_module: Callable[[str], Any]) -> argparse.Namespace:
    """The benchmark's modules."""
    names = ("report", "runs", "killed_job")
    return argparse.Namespace(**{n: benchmark_module(f"lib.goodput.{n}") for n in names})


def course(modules: argparse.Namespace, *lines: tuple[int, int, float, bool], **more: Any) -> Any:
    steps = [modules.killed_job.Step(*line) for line in lines]
    return modules.killed_job.Course(110.0, steps, **more)


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


def result(modules: argparse.Namespace, method: str, mtbf: float, useful: int) -> Any:
    return modules.runs.Result(
        method, method, mtbf, 3, 0.01, step_seconds=0.1, wall_seconds=100.0, useful_steps=useful
    )


def test_the_targets_are_judged_rate_by_rate(modules: argparse.Namespace) -> None:
    rows = [
        result(modules, "ours", 60.0, 960),
        result(modules, "torch-save", 60.0, 500),
        result(modules, "ours", 10.0, 700),
        result(modules, "torch-save", 10.0, 710),
    ]
    assert rows[0].goodput == pytest.approx(0.96)
    said = modules.report.verdicts(rows)
    titles = ["MISSED", "met", "met", "not measured", "not measured"]
    assert [line.split(":")[0] for line in said] == titles
    assert "10 s (70.0 %, the next best 71.0 %)" in said[0]
    rows[0].useful_steps = 940
    target = "Tierckpt, memory and local: 95 % at a failure every 60 s"
    assert f"MISSED: {target} (94.0 %)" in modules.report.verdicts(rows)
    assert f"not measured: {target} (--mtbf 60)" in modules.report.verdicts(rows[2:])


def test_the_shim_has_targets_of_its_own(modules: argparse.Namespace) -> None:
    """It is no other method that Tierckpt must be better than, either."""
    rows = [
        result(modules, "ours", 10.0, 700),
        result(modules, "ours-run", 10.0, 960),
        result(modules, "ours-run", 60.0, 994),
    ]
    said = modules.report.verdicts(rows)
    assert said[1:] == [
        "met: Tierckpt, tierckpt run: 95 % at a failure every 10 s (96.0 %)",
        "MISSED: Tierckpt, tierckpt run: 99.5 % at a failure every 60 s (99.4 %)",
    ]


def test_methods_with_a_launcher_are_launched(modules: argparse.Namespace) -> None:
    runners = {name: modules.runs.runner(name).__module__ for name in modules.runs.RESUMABLE}
    launched = [name for name, module in runners.items() if module.endswith("launched_job")]
    assert launched == ["ours-torchrun", "ours-run"]


def test_more_than_the_reference_is_noise_and_judges_nothing(modules: argparse.Namespace) -> None:
    """A kill makes no training faster: the machine's pace was another one meanwhile."""
    rows = [
        result(modules, "ours", 60.0, 1110),
        result(modules, "torch-save", 60.0, 900),
        result(modules, "ours", 10.0, 700),
        result(modules, "torch-save", 10.0, 1010),
        result(modules, "ours", 30.0, 900),
        result(modules, "torch-save", 30.0, 800),
    ]
    noise = modules.report.NOISE
    said = modules.report.verdicts(rows)
    assert [line.split(":")[0] for line in said] == [
        *("not judged", "met", "not judged", "not judged"),
        *["not measured"] * 2,
    ]
    assert "every 10 s: torch-save" in said[0]
    assert said[3] == f"{noise} (Tierckpt, memory and local: 95 % at a failure every 60 s)"
    shown = modules.report.table(rows)
    assert shown.count(noise) == 2
    assert "111.0 %" not in shown


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
    bench = runs.Bench(argparse.Namespace(every=5, mtbf=[10.0, 60.0]), None, None)
    assert bench.cost("ours").seconds == found
    assert at == asked
