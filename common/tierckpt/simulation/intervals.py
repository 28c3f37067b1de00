"""Intervals: how often each level takes a version, in steps. Pure.

The formulas are those of `tierckpt interval` (`core/tuning/interval_model`). A level counts the
failures after which it is the first that still has a version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierckpt._text import counted
from tierckpt._units import time_text
from tierckpt.core.tuning.interval_model import (
    LevelModel,
    daly_seconds,
    optimum,
    within_budget,
    young_seconds,
)

from .costs import LevelCosts
from .course.schedule import Rung, Schedule
from .scenario import Failures, Job, Level, Scenario

MOST_STEPS = 10**12


@dataclass(frozen=True)
class Plan:
    """Intervals of all levels."""

    schedule: Schedule
    rates: Mapping[str, float]
    """Failures a second that need the level."""
    best_seconds: Mapping[str, float]
    """The best interval of each level with an interval of its own, by the formula."""
    notes: tuple[str, ...]


def kind_rates(job: Job, failures: Failures) -> dict[str, float]:
    """Failures a second of the whole job, by kind, all nodes being good."""
    units = {
        "process": (job.ranks, failures.process_every_seconds),
        "reboot": (job.nodes, failures.reboot_every_seconds),
        "node": (job.nodes, failures.node_every_seconds),
        "rack": (job.racks, failures.rack_every_seconds),
    }
    rates = {kind: number / every for kind, (number, every) in units.items()}
    rates["process"] += (1 - failures.node_share) / failures.job_every_seconds
    rates["node"] += failures.node_share / failures.job_every_seconds
    return rates


SURVIVORS = {
    "process": ("memory", "local", "peer", "persistent"),
    "reboot": ("local", "peer", "persistent"),
    "node": ("peer", "persistent"),
    "rack": ("peer", "persistent"),
}
"""Levels that still have a version after a failure; peer, if enough members of each group live."""


def level_rates(scenario: Scenario, beyond_per_second: float) -> dict[str, float]:
    """Failures a second that need each level in use. The last level takes what none survives.

    beyond_per_second: those that exceed the redundancy of the peer level.
    """
    names = [level.name for level in scenario.levels]
    found = dict.fromkeys(names, 0.0)
    peer = scenario.level("peer")
    for kind, rate in kind_rates(scenario.job, scenario.failures).items():
        alive = [name for name in SURVIVORS[kind] if name in names]
        if kind == "rack" and peer is not None and peer.domain != "rack":
            alive = [name for name in alive if name != "peer"]
        if names:
            found[alive[0] if alive else names[-1]] += rate
    if "peer" in found and names[-1] != "peer":
        found[names[-1]] += beyond_per_second
    return found


def plan_of(
    scenario: Scenario, costs: Mapping[str, LevelCosts], beyond_per_second: float = 0.0
) -> Plan:
    """Intervals as the scenario says, each a multiple of the one before it, and none shorter than
    the time that a version takes to be complete."""
    step_seconds, rates = scenario.job.step_seconds, level_rates(scenario, beyond_per_second)
    own = [level for level in scenario.levels if level.name != "peer"]
    models = [_model(level, scenario, costs, rates) for level in own]
    best = optimum(models, step_seconds)
    chosen = _chosen(scenario, own, models, best)
    rungs: list[Rung] = []
    notes: list[str] = []
    for level, seconds in zip(own, chosen, strict=True):
        steps = _steps(seconds / step_seconds)
        cost = costs[level.name]
        unit = rungs[-1].every_steps if rungs else 1
        steps = math.ceil(steps / unit) * unit
        least = _least_steps(cost, step_seconds)
        if steps < least:
            fitting = math.ceil(least / unit) * unit
            notes.append(
                f"{level.name}: every {counted(fitting, 'step')} instead of {steps}, since a "
                f"version takes {time_text(cost.flush_seconds or cost.latency_seconds)} to be "
                "complete"
            )
            steps = fitting
        rungs.append(_rung(cost, steps))
    if "peer" in costs:
        local = next(rung for rung in rungs if rung.name == "local")
        at = rungs.index(local) + 1
        spacing = costs["peer"].latency_seconds - local.latency_seconds
        turns = max(1, math.ceil(spacing / (local.every_steps * step_seconds) - 1e-9))
        rungs.insert(at, _rung(costs["peer"], local.every_steps * turns))
    names = [level.name for level in own]
    return Plan(
        Schedule(step_seconds, tuple(rungs)), rates, dict(zip(names, best, strict=True)), (*notes,)
    )


def _rung(cost: LevelCosts, steps: int) -> Rung:
    return Rung(cost.name, steps, cost.stall_seconds, cost.latency_seconds, cost.flush_seconds)


def _steps(ratio: float) -> int:
    return MOST_STEPS if ratio >= MOST_STEPS else max(1, math.ceil(ratio - 1e-9))


def _least_steps(cost: LevelCosts, step_seconds: float) -> int:
    """One version at a time: the next one is not begun before this one is complete."""
    own = cost.flush_seconds or cost.latency_seconds
    return max(1, math.ceil(own / step_seconds - 1e-9))


def _model(
    level: Level,
    scenario: Scenario,
    costs: Mapping[str, LevelCosts],
    rates: Mapping[str, float],
) -> LevelModel:
    rate, cost = rates[level.name], costs[level.name].stall_seconds
    latency = costs[level.name].latency_seconds
    if level.name == "local" and "peer" in costs:  # it needs the local level's versions
        rate, cost = rate + rates["peer"], cost + costs["peer"].stall_seconds
    return LevelModel(level.name, cost, rate, 0.0, latency)


def _chosen(
    scenario: Scenario, own: Sequence[Level], models: Sequence[LevelModel], best: Sequence[float]
) -> list[float]:
    """Seconds between versions of every level."""
    step_seconds = scenario.job.step_seconds
    held = within_budget(models, best, scenario.overhead_budget, least_seconds=step_seconds)
    found = []
    for level, model, free, budgeted in zip(own, models, best, held, strict=True):
        cost, rate = model.cost_seconds, model.failures_per_second
        policies = {
            "young": young_seconds(cost, rate),
            "daly": daly_seconds(cost, rate),
            "best": free,
            "budget": budgeted,
        }
        seconds = policies.get(level.policy, level.every_seconds)
        found.append(level.every_steps * step_seconds if level.every_steps else seconds)
    return found
