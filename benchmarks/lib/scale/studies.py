"""The simulated studies of scale.py: goodput by ranks, losses by scheme, restarts at one store."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from lib.scale import jobs
from lib.scale.jobs import WAYS
from lib.scale.published import DAY_SECONDS
from lib.terminal import say
from tierckpt.simulation.course import Study, simulate
from tierckpt.simulation.model import (
    Redundancy,
    costs_of,
    exposed_seconds,
    kind_rates,
    losses_per_second,
)
from tierckpt.simulation.scenario import Scenario

SCHEMES = ("partner", "xor", "rs 4+2")
DECADE_SECONDS = 3650 * DAY_SECONDS


def goodput(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Goodput of each way at each number of ranks, at Llama 3's rates and at ten times these."""
    for factor in (1.0, 10.0):
        for ranks in options.ranks:
            for name, way in WAYS.items():
                scenario = way(jobs.base(ranks, factor, options.days, options.replicas))
                study = simulate(scenario)
                row = _row(study, name, factor)
                say(f"{ranks} ranks, failures x {factor:g}: {name}, {100 * row['goodput']:.2f} %")
                yield row


def _row(study: Study, name: str, factor: float) -> dict[str, Any]:
    shares = study.phase_shares
    away = [
        share.mean
        for phase, share in shares.items()
        if phase not in ("training", "checkpoints", "lost")
    ]
    failures = study.estimate(float(sum(o.failures.values())) for o in study.outcomes)
    walls = study.estimate(o.wall_seconds for o in study.outcomes)
    return {
        "way": name,
        "ranks": study.scenario.job.ranks,
        "rate_factor": factor,
        "goodput": study.goodput.mean,
        "goodput_error": study.goodput.error,
        "lost": shares["lost"].mean,
        "stalls": shares["checkpoints"].mean,
        "restarts": math.fsum(away),
        "failures_per_day": failures.mean / walls.mean * DAY_SECONDS,
    }


def redundancy(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Losses beyond each scheme in ten years at Llama 3's rates, by the formula."""
    ranks = options.ranks[-1]
    for scheme in SCHEMES:
        base = jobs.base(ranks, 1.0, options.days, options.replicas)
        scenario = jobs.ours(base, scheme)
        expected = expected_losses(scenario, DECADE_SECONDS)
        say(f"{scheme}: {expected:.2g} in ten years")
        yield {
            "scheme": scheme,
            "ranks": ranks,
            "losses_in_ten_years": expected,
            "probability_of_one": -math.expm1(-expected),
        }


def expected_losses(scenario: Scenario, seconds: float) -> float:
    """By the formula, for the loss of single nodes."""
    peer = scenario.level("peer")
    assert peer is not None
    groups = Redundancy(scenario.job, peer)
    rate = kind_rates(scenario.job, scenario.failures)["node"] / scenario.job.nodes
    window = exposed_seconds(scenario, costs_of(scenario))
    return seconds * losses_per_second(groups, rate, window)


def storm(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds until all ranks have the state again, all of them restarting at once."""
    for ranks in options.ranks:
        scenario = jobs.ours(jobs.base(ranks, 1.0, 1.0, 1))
        found = costs_of(scenario)
        persistent = scenario.levels[-1]
        row: dict[str, Any] = {"ranks": ranks}
        for readers in ("ranks", "nodes", "shards"):
            other = replace(scenario, levels=(replace(persistent, readers=readers),))
            row[f"each_{readers}"] = costs_of(other)["persistent"].restore_seconds
        row["peer"] = found["peer"].restore_seconds
        yield row
