"""The simulator beside published figures, and beside this project's own measurements."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierckpt.simulation import (
    EXAMPLES,
    Estimate,
    Scenario,
    Study,
    merge_trees,
    scenario_of,
    simulate,
)

HOUR, DAY = 3600.0, 86400.0
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.fixture
def published(benchmark_module: Callable[[str], Any]) -> Any:
    return benchmark_module("lib.scale.checks")


def example(name: str, **changes: Any) -> Scenario:
    return scenario_of(merge_trees(tomllib.loads(EXAMPLES[name]), changes), name)


# --- LightCheck's figures 5a and 5b ---------------------------------------------------------------


@pytest.fixture
def hours(benchmark_module: Callable[[str], Any]) -> Callable[..., Estimate]:
    """Simulate a point."""
    found: Callable[..., Estimate] = benchmark_module("lib.scale.checks").hours
    return found


def test_lightchecks_hours_come_out(published: Any, hours: Any) -> None:
    """Their formula is T (1 + overhead) (1 + recovery / MTBF): failures count only while the job
    trains."""
    points = published.lightcheck()
    assert len(points) == 39
    for point in points:
        rounding = 0.05 / point.hours  # they are given with one decimal
        found = hours(point, during_restart=False).mean
        assert found == pytest.approx(point.hours, rel=0.01 + rounding), point


def test_with_failures_during_restarts_the_hours_agree_from_an_hour_on(
    published: Any, hours: Any
) -> None:
    for point in published.lightcheck():
        if point.mtbf_hours >= 1:
            found = hours(point, during_restart=True, error=0.001)
            slack = 0.01 + 0.05 / point.hours
            assert found.mean == pytest.approx(point.hours, rel=slack), point


def test_at_ten_minutes_failures_of_restarts_make_the_difference(
    published: Any, hours: Any
) -> None:
    """A recovery of 517 s that failures hit as well takes M (exp(R / M) - 1): the total is longer
    by exp(R / M) / (1 + R / M), 27 % at 10 minutes, and 1 % at an hour."""
    (point,) = [
        p
        for p in published.lightcheck()
        if p.method == "torch.save" and p.model == "BERT" and p.mtbf_hours == 1 / 6
    ]
    x = point.recovery_seconds / (HOUR * point.mtbf_hours)
    exact = point.undisturbed_hours * (1 + point.overhead_share) * math.exp(x)
    assert exact / point.first_order_hours == pytest.approx(1.271, abs=0.001)
    found = hours(point, during_restart=True)
    assert abs(found.mean - exact) < 2 * found.error
    assert found.mean == pytest.approx(exact, rel=0.02)


# --- AIReSim, Llama 3 -----------------------------------------------------------------------------


def failures_of(study: Study) -> Estimate:
    return study.estimate(float(sum(o.failures.values())) for o in study.outcomes)


def test_airesims_case_comes_out(published: Any) -> None:
    study = simulate(example("constant", replicas=3))
    effective, failures = study.goodput, failures_of(study)
    assert all(outcome.done for outcome in study.outcomes)
    # Theirs includes seven hours of 9,866 that are not simulated.
    hours = study.estimate(o.wall_seconds / HOUR for o in study.outcomes).mean
    assert 256 * 24 / (hours + published.AIRESIM_OTHER_HOURS) == pytest.approx(
        published.AIRESIM_ETR, abs=0.003
    )
    assert effective.mean == pytest.approx(0.623, abs=0.003)
    slack = failures.error + published.AIRESIM_FAILURES_ERROR
    assert abs(failures.mean - published.AIRESIM_FAILURES) < slack
    assert failures.mean == pytest.approx(published.AIRESIM_FAILURES, rel=0.01)


def test_the_bad_servers_of_airesim_are_cured(published: Any) -> None:
    """6,144 h x 4,096 servers give 10,486 failures of good ones; each bad one adds 1.1 before a
    repair cures it."""
    study = simulate(example("constant", replicas=1, nodes={"bad_share": 0.0}))
    failures = failures_of(study).mean
    assert failures == pytest.approx(4096 * 256 / 100, rel=0.02)
    with_bad = 4096 * 256 / 100 + 0.15 * (4096 + 64) * (5 / 6) / 0.76
    assert with_bad == pytest.approx(published.AIRESIM_FAILURES, rel=0.005)


def test_llama_3_is_over_ninety_percent_effective(published: Any) -> None:
    """With its failures and 54 days. Its checkpoints and restarts are not published in full: a
    version every 10 minutes that stalls for 10 s, and 10 minutes for a restart, are pessimistic."""
    assert published.LLAMA3_NODE_PARTS == 258
    theirs: dict[str, Any] = {
        "levels": {"persistent": {"every": "10m", "cost": "10s"}},
        "restart": {"notice": "1m", "start": "8m", "node": "1m"},
    }
    scenario = example("llama3", replicas=20)
    ours = simulate(scenario)
    failures = failures_of(ours)
    assert abs(failures.mean - published.LLAMA3_INTERRUPTIONS) < failures.error
    assert failures.mean == pytest.approx(published.LLAMA3_INTERRUPTIONS, rel=0.03)
    tree = tomllib.loads(EXAMPLES["llama3"])
    del tree["levels"], tree["failures"]["store_out_every"]
    persistent_only = simulate(scenario_of(merge_trees(tree, theirs), "theirs"))
    least = published.LLAMA3_LEAST_EFFECTIVE
    assert least - 0.01 < persistent_only.goodput.mean < ours.goodput.mean
    assert ours.goodput.mean > 0.96


# --- our own measurements -------------------------------------------------------------------------


@pytest.fixture
def rows(benchmark_module: Callable[[str], Any]) -> list[Any]:
    measured = benchmark_module("lib.scale.measured")
    files = sorted(RESULTS.glob("*goodput*.json"))
    return [row for path in files for row in measured.rows(path)]


def test_measured_goodput_comes_out(rows: list[Any]) -> None:
    """The same kills, at the same times, with the costs that each file has.

    A version more or less decides about `resolution_points`, in runs of 40 s up to 6 points.
    """
    assert len(rows) >= 26
    close = [row for row in rows if abs(row.points) <= 3]
    assert len(close) >= 0.8 * len(rows)
    for row in rows:
        assert abs(row.points) <= 3 + row.resolution_points, row
    fine = [row for row in rows if row.resolution_points <= 1]
    assert len(fine) >= 5
    assert all(abs(row.points) <= 3 for row in fine)
    assert abs(sum(row.points for row in rows)) / len(rows) < 1, "no bias"
