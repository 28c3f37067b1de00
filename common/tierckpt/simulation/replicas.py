"""Replicas: a scenario simulated several times, with means and confidence intervals.

The replica's number and the scenario's seed determine all of its random numbers. So two scenarios
with the same failures meet the same ones, and their difference is less noisy than either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import NormalDist, fmean, stdev

from tierckpt._text import counted
from tierckpt._units import time_text
from tierckpt.errors import ConfigError

from .costs import LevelCosts, costs_of, exposed_seconds, protect_seconds
from .course.job import Outcome, SimulatedJob
from .course.schedule import Schedule
from .intervals import Plan, kind_rates, plan_of
from .redundancy import Redundancy, losses_per_second
from .scenario import Scenario

CONFIDENCE = 0.95
MOST_FAILURES = 10_000_000
"""More take ten minutes or so."""


@dataclass(frozen=True)
class Estimate:
    """A mean over replicas; the true mean is within `error` of it, with 95 % confidence. NaN: one
    replica has no error."""

    mean: float
    error: float

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        """By Student's t distribution."""
        n = len(values)
        if n < 2:
            return Estimate(fmean(values), math.nan)
        return Estimate(fmean(values), student(n - 1) * stdev(values) / math.sqrt(n))


def student(freedom: int) -> float:
    """The factor for 95 % confidence, by its expansion (Abramowitz and Stegun, 26.7.5); 2 % too
    small for 2 degrees of freedom, exact to 0.2 % from 5 on."""
    if freedom == 1:
        return 12.706
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    v = freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


WAITING_SHARE = 0.05
"""Share of the time without enough nodes from which a note names the spares."""


@dataclass(frozen=True)
class Study:
    """A scenario and its outcomes."""

    scenario: Scenario
    plan: Plan
    costs: dict[str, LevelCosts]
    outcomes: tuple[Outcome, ...]
    redundancy: Redundancy | None

    def estimate(self, values: Iterable[float]) -> Estimate:
        """The mean of one value per replica."""
        return Estimate.of(list(values))

    @property
    def goodput(self) -> Estimate:
        """Share of the wall time that was training that counted."""
        return self.estimate(self.useful_seconds(o) / o.wall_seconds for o in self.outcomes)

    def useful_seconds(self, outcome: Outcome) -> float:
        """Training that counted, without its stalls."""
        constant = self.scenario.constant
        if constant is not None:
            return outcome.position_seconds / (1 + constant.overhead_share)
        return outcome.position_seconds - self.plan.schedule.stalls_seconds(outcome.version)

    def phases(self, outcome: Outcome) -> dict[str, float]:
        """Seconds by use; their sum is the wall time."""
        seconds = dict(outcome.seconds)
        seconds.pop("ended", None)
        trained, useful = seconds.pop("training", 0.0), self.useful_seconds(outcome)
        stalls = outcome.position_seconds - useful
        lost = max(0.0, trained - outcome.position_seconds)
        return {"training": useful, "checkpoints": stalls, "lost": lost} | seconds

    @property
    def phase_shares(self) -> dict[str, Estimate]:
        """Share of the wall time by phase."""
        each = [(self.phases(o), o.wall_seconds) for o in self.outcomes]
        names = dict.fromkeys(name for phases, _ in each for name in phases)
        return {
            name: self.estimate(phases.get(name, 0.0) / wall for phases, wall in each)
            for name in names
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about intervals, failures and spares that the user should change."""
        notes = [*self.plan.notes, *self._beyond_the_run(), *self._too_frequent()]
        nodes, waits = self.scenario.nodes, self.phase_shares.get("nodes")
        if waits and waits.mean >= WAITING_SHARE and not math.isinf(nodes.spares):
            notes.append(
                f"for {100 * waits.mean:.0f} % of the time the job waits for nodes, with "
                f"{counted(int(nodes.spares), 'spare')} (repair: "
                f"{time_text(nodes.repair_seconds)}); raise spares in [nodes]"
            )
        return (*notes,)

    def _beyond_the_run(self) -> Iterator[str]:
        """A step, or a level's first version, that the run ends before."""
        job = self.scenario.job
        run = min(job.length_seconds, job.work_seconds)
        if job.step_seconds > run:
            yield (
                f"a step of {time_text(job.step_seconds)} is longer than the run of "
                f"{time_text(run)}; check the unit of step in [job], or give a longer length"
            )
            return
        for rung in self.plan.schedule.rungs:
            every = rung.every_steps * self.plan.schedule.pace_seconds
            if run < every and self.plan.rates[rung.name]:
                yield (
                    f"{rung.name}: the first version would come after {time_text(every)}, and the "
                    f"run ends after {time_text(run)}, so this level takes none; give a shorter "
                    "interval, or a longer length"
                )

    def _too_frequent(self) -> Iterator[str]:
        """Failures that come more often than the job can restart."""
        parts, rates = self.scenario.restart, kind_rates(self.scenario.job, self.scenario.failures)
        constant, rate = self.scenario.constant, math.fsum(rates.values())
        starts = [parts.start_seconds, parts.warm_start_seconds]
        restart = parts.notice_seconds + min(each for each in starts if each is not None)
        if constant is not None:
            restart = constant.recovery_seconds
        if rate and 1 / rate < restart:
            yield (
                f"a failure comes every {time_text(1 / rate)} on average, and a restart takes "
                f"{time_text(restart)} or more, so the job hardly trains; check the units in "
                "[failures] and [restart]"
            )

    def versions(self, outcome: Outcome) -> dict[str, float]:
        """Versions taken by level, those of lost work included."""
        trained = outcome.seconds.get("training", 0.0)
        steps = trained / self.plan.schedule.pace_seconds
        return {rung.name: steps / rung.every_steps for rung in self.plan.schedule.rungs}

    @property
    def expected_losses(self) -> float | None:
        """Expected number of losses beyond the redundancy in the simulated wall time, by the
        formula; None without a peer level."""
        if self.redundancy is None:
            return None
        wall = fmean(o.wall_seconds for o in self.outcomes)
        return wall * _beyond_per_second(self.scenario, self.costs, self.redundancy)


def _beyond_per_second(
    scenario: Scenario, costs: dict[str, LevelCosts], redundancy: Redundancy | None
) -> float:
    """Rate of losses of nodes that exceed the redundancy."""
    if redundancy is None:
        return 0.0
    job = scenario.job
    rate = kind_rates(job, scenario.failures)["node"] / job.nodes
    return losses_per_second(redundancy, rate, exposed_seconds(scenario, costs))


def simulate(scenario: Scenario) -> Study:
    """Run all replicas. Raises ConfigError if SimPy is missing, or the ranks cannot be grouped."""
    try:
        import simpy
    except ImportError as error:
        raise ConfigError(
            "the simulator needs SimPy, which is not installed: pip install 'tierckpt[simulate]'"
        ) from error
    _check_size(scenario)
    peer = scenario.level("peer")
    try:
        redundancy = None if peer is None else Redundancy(scenario.job, peer)
    except ConfigError as error:
        ranks = f"[job] {counted(scenario.job.ranks, 'rank')}, {scenario.job.ranks_per_node} a node"
        raise ConfigError(f"[levels.peer] does not fit {ranks}: {error}") from error
    costs = costs_of(scenario)
    if scenario.constant is None:
        plan = plan_of(scenario, costs, _beyond_per_second(scenario, costs, redundancy))
    else:
        plan = Plan(Schedule(scenario.job.step_seconds, ()), {}, {}, ())
    protect = 0.0 if peer is None else protect_seconds(scenario, peer)
    outcomes = []
    for number in range(scenario.replicas):
        chance = Random(f"{scenario.seed}/{number}")
        job = SimulatedJob(
            simpy.Environment(), scenario, plan.schedule, costs, redundancy, protect, chance
        )
        outcomes.append(job.run())
    return Study(scenario, plan, costs, tuple(outcomes), redundancy)


def _check_size(scenario: Scenario) -> None:
    """Refuse a scenario that would take long, such as one with wrong units."""
    rate = math.fsum(kind_rates(scenario.job, scenario.failures).values())
    rate *= 1 + scenario.nodes.bad_share * (scenario.nodes.bad_factor - 1)
    rate += _store_changes_per_second(scenario)
    seconds = min(scenario.job.length_seconds, scenario.job.work_seconds)
    count = rate * seconds * scenario.replicas
    if count > MOST_FAILURES:
        raise ConfigError(
            f"some {count:.1e} failures would be simulated (those of the store count), one every "
            f"{time_text(1 / rate)} in {time_text(seconds)}, {scenario.replicas} times; give "
            f"a shorter length, fewer replicas, or rarer failures ({MOST_FAILURES:.0e} are "
            "possible)"
        )


def _store_changes_per_second(scenario: Scenario) -> float:
    """The rate at which the store gets slow or goes out: it does neither while it is either."""
    failures = scenario.failures
    out, slow = 1 / failures.store_out_every_seconds, 1 / failures.store_slow_every_seconds
    lasting = out * failures.store_out_seconds + slow * failures.store_slow_seconds
    return (out + slow) / (1 + lasting)


def with_best_intervals(scenario: Scenario) -> Scenario:
    """The scenario with the best interval of each level, by the formula."""
    levels = [
        level
        if level.name == "peer"
        else replace(level, every_steps=0, every_seconds=0.0, policy="best")
        for level in scenario.levels
    ]
    return replace(scenario, levels=tuple(levels))
