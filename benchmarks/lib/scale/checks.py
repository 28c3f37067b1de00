"""The simulator beside published figures: LightCheck's hours, AIReSim's case, Llama 3's 54 days."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from lib.scale.published import (
    AIRESIM_ETR,
    AIRESIM_FAILURES,
    HOUR_SECONDS,
    LLAMA3_INTERRUPTIONS,
    LLAMA3_LEAST_EFFECTIVE,
    Point,
    lightcheck,
)
from tierckpt.simulation.course import Estimate, Study, simulate
from tierckpt.simulation.scenario import (
    EXAMPLES,
    Constant,
    Failures,
    Job,
    Restart,
    Scenario,
    scenario_of,
)


def hours(point: Point, during_restart: bool, error: float = 0.004) -> Estimate:
    """A point of LightCheck's, simulated, with enough replicas for this standard error."""
    replicas = 1
    if point.mtbf_hours < math.inf:
        failures = (point.recovery_seconds / (HOUR_SECONDS * point.mtbf_hours) / error) ** 2
        replicas = max(3, math.ceil(failures * point.mtbf_hours / point.undisturbed_hours))
    study = simulate(
        Scenario(
            job=Job(length_seconds=math.inf, work_seconds=HOUR_SECONDS * point.undisturbed_hours),
            failures=Failures(
                job_every_seconds=HOUR_SECONDS * point.mtbf_hours, during_restart=during_restart
            ),
            restart=Restart(start_seconds=0.0),
            constant=Constant(point.recovery_seconds, point.overhead_share),
            replicas=replicas,
        )
    )
    assert all(outcome.done for outcome in study.outcomes)
    return study.estimate(outcome.wall_seconds / HOUR_SECONDS for outcome in study.outcomes)


def lightcheck_rows(toy: bool) -> Iterator[dict[str, Any]]:
    """All 39 points: theirs, and simulated without and with failures during restarts."""
    for point in lightcheck():
        if toy and point.mtbf_hours < 1:
            continue
        yield {
            "figure": point.figure,
            "model": point.model,
            "method": point.method,
            "mtbf_hours": point.mtbf_hours if point.mtbf_hours < math.inf else None,
            "published_hours": point.hours,
            "simulated_hours": hours(point, during_restart=False).mean,
            "with_failures_of_restarts_hours": hours(point, during_restart=True).mean,
        }


def example(name: str, replicas: int) -> Study:
    """An example of `tierckpt simulate`, simulated."""
    return simulate(replace(scenario_of(tomllib.loads(EXAMPLES[name]), name), replicas=replicas))


def others(toy: bool) -> Iterator[dict[str, Any]]:
    """AIReSim and Llama 3."""
    study = example("constant", 1 if toy else 10)
    yield _row("AIReSim, effective time", AIRESIM_ETR, study.goodput)
    yield _row("AIReSim, failures", AIRESIM_FAILURES, failures_of(study))
    study = example("llama3", 3 if toy else 30)
    yield _row("Llama 3, interruptions", LLAMA3_INTERRUPTIONS, failures_of(study))
    yield _row("Llama 3, effective time: more than", LLAMA3_LEAST_EFFECTIVE, study.goodput)


def failures_of(study: Study) -> Estimate:
    """Failures of one replica."""
    return study.estimate(float(sum(o.failures.values())) for o in study.outcomes)


def _row(name: str, published: float, found: Estimate) -> dict[str, Any]:
    error = None if math.isnan(found.error) else found.error
    return {"figure": name, "published": published, "simulated": found.mean, "error": error}
