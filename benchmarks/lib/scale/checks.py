"""The simulator beside published figures, facts with their sources: LightCheck's hours, AIReSim's
case, Llama 3's 54 days."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

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

HOUR_SECONDS = 3600.0
DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class Point:
    """Hours of a training, and the figures that they follow from."""

    figure: str
    model: str
    method: str
    undisturbed_hours: float
    overhead_share: float
    recovery_seconds: float
    mtbf_hours: float
    """Infinite: without failures and checkpoints."""
    hours: float

    @property
    def first_order_hours(self) -> float:
        """Training, with checkpoints, and one recovery for each failure of the *training* time."""
        shares = 1 + self.recovery_seconds / (self.mtbf_hours * HOUR_SECONDS)
        return self.undisturbed_hours * (1 + self.overhead_share) * shares


METHODS = ("LightCheck", "CheckFreq", "torch.save")
# LightCheck (ICCD 2023), github.com/LighT-chenml/LightCheck, "Source data/Figure_3.xlsx" and
# "Figure_5.xlsx": overhead % (3b), recovery s (3c), and hours without failures and at one failure
# an hour (5a). LightCheck's overhead is that of its column D, for BERT of G.
MODELS = {
    "ResNet-18": ((2, 4, 3.7), (0.2, 2.5, 11.7), 10.7, (10.9, 11.1, 11.2)),
    "VGG-16": ((3.2, 5.9, 4.4), (2.4, 40.1, 164.5), 67.5, (69.7, 72.3, 73.7)),
    "Inception-V3": ((4, 5.2, 6.4), (3.4, 8.7, 25.4), 79.7, (83, 84.1, 85.4)),
    "AlexNet": ((2.1, 4.5, 6), (1, 17.5, 70.5), 6.0, (6.1, 6.3, 6.5)),
    "GPT-2": ((1.8, 4.9, 5.1), (2, 31, 204.6), 161.7, (164.6, 171.1, 179.7)),
    "BERT": ((2.5, 4.4, 4.4), (7, 97, 517), 501.3, (514.8, 537.5, 598.6)),
}
# 5b: BERT's hours by hours between failures, in the order of METHODS.
BERT = {
    0.167: (519.8, 608, 974.4),
    0.333: (516.8, 565.7, 748.9),
    0.5: (515.8, 551.6, 673.7),
    1.0: (514.8, 537.5, 598.6),
    2.0: (514.3, 530.5, 561),
    6.0: (514, 525.8, 535.9),
}
THIRDS = {0.167: 1 / 6, 0.333: 1 / 3}
"""Hours as they were computed with: 10 and 20 minutes."""


def lightcheck() -> list[Point]:
    """All points of 5a and 5b, each once: 6 without failures, and 33 with."""
    found = []
    for model, (overheads, recoveries, undisturbed, hours) in MODELS.items():
        found.append(
            Point("5a", model, "no failure", undisturbed, 0.0, 0.0, float("inf"), undisturbed)
        )
        for number, method in enumerate(METHODS):
            figures = undisturbed, overheads[number] / 100, float(recoveries[number])
            if model != "BERT":
                found.append(Point("5a", model, method, *figures, 1.0, hours[number]))
                continue
            for mtbf, row in BERT.items():
                exact = THIRDS.get(mtbf, mtbf)
                found.append(Point("5b", model, method, *figures, exact, row[number]))
    return found


# AIReSim, github.com/karthikp-ubc/airesim at 7b139c7: config.yaml, docs/SIMULATION_REPORT.md, mean
# of 30 runs. A bad server fails 1 + 5 times as often; 76 % of repairs cure (automatic repairs of
# 2 h, 80 % of which go on to manual ones of 48 h; 40 % and 20 % of them fail).
AIRESIM_ETR = 0.6228
AIRESIM_FAILURES, AIRESIM_FAILURES_ERROR = 11_145.6, 100.3 * 2.045 / 30**0.5
"""Mean, and its 95 % confidence from their standard deviation."""
AIRESIM_OTHER_HOURS = 2.15 + 4.62
"""Host selection and preemption, which are not simulated here."""

# Llama 3 (A. Dubey et al., 2024, section 3.3.4): 16,384 GPUs, 54 days.
LLAMA3_RANKS, LLAMA3_DAYS = 16_384, 54
LLAMA3_INTERRUPTIONS = 419
LLAMA3_NODE_PARTS = 148 + 72 + 19 + 17 + 2
"""Interruptions by GPUs, their memory, processors: a node has to be replaced."""
LLAMA3_LEAST_EFFECTIVE = 0.90


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
