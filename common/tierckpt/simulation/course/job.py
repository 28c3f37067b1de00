"""The simulated job: it trains, fails, restarts, and counts where its time went."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from tierckpt.errors import ConfigError
from tierckpt.simulation.costs import LevelCosts
from tierckpt.simulation.intervals import kind_rates
from tierckpt.simulation.redundancy import Redundancy
from tierckpt.simulation.scenario import Scenario

from .holdings import Holdings
from .machines import Machines
from .schedule import Schedule
from .shared_store import SharedStore

if TYPE_CHECKING:
    import simpy

    Steps = Generator[simpy.Event, Any, None]

MOST_WITHOUT_PROGRESS = 100_000
"""Failures after which a job without a limit of its wall time, which got no further since, counts
as one that never ends."""

KINDS = ("process", "reboot", "node", "rack")

NO_PROGRESS = (
    "the job does not get done: {count:,} failures in a row, and no version after {done:.3g} s of "
    "its training. Failures are too frequent for its restarts and intervals; give [job] length to "
    "simulate that time nevertheless"
)


@dataclass
class Outcome:
    """One course of the job. `seconds` by phase: start, training, noticed, nodes, restart,
    `load LEVEL`; recovery, where it is a constant."""

    wall_seconds: float = 0.0
    position_seconds: float = 0.0
    """Undisturbed training, with its stalls, that counts in the end."""
    version: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    failures: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    """Restarts by the level that they read."""
    lost_by_source: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    beyond_redundancy: int = 0
    """Failures after which too many members of a group were lost."""
    outages: int = 0
    done: bool = False


class SimulatedJob:
    """One course, from an empty start. `run` may be called once."""

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        schedule: Schedule,
        costs: dict[str, LevelCosts],
        redundancy: Redundancy | None,
        protect_seconds: float,
        chance: Random,
    ) -> None:
        self._env, self._scenario, self._schedule = env, scenario, schedule
        self._costs, self._redundancy, self._chance = costs, redundancy, chance
        self._protect_seconds = protect_seconds
        streams = [Random(chance.getrandbits(64)) for _ in range(3)]
        self._arrivals = streams[0]
        self._machines = Machines(env, scenario.job.nodes, scenario.nodes, streams[1])
        self._store = SharedStore(env, scenario.failures, streams[2])
        self._holdings = Holdings(schedule, self._store)
        self._rates = kind_rates(scenario.job, scenario.failures)
        self._outcome = Outcome()
        self._position = 0.0
        """Where the training is, or where it resumes from."""
        self._reached = 0.0
        """Where it was when it failed."""
        self._farthest, self._in_vain = 0.0, 0
        """The farthest position that the training began from, and the failures since."""
        self._missing = 0
        self._exposed: set[int] = set()
        """Nodes whose shards only the other members of their groups have, until `_protected_at`."""
        self._protected_at = math.inf
        self._only_processes = True
        self._phase, self._since = "start", 0.0

    def run(self) -> Outcome:
        """Simulate up to the end of the work, or of the wall time."""
        import simpy

        job = self._env.process(self._life())
        self._env.process(self._fail(job))
        self._env.process(self._fail_again(job))
        length = self._scenario.job.length_seconds
        ended: simpy.Event = job
        if length < math.inf:
            ended = job | self._env.timeout(length)
        self._env.run(until=ended)
        self._enter("ended")
        outcome = self._outcome
        outcome.wall_seconds = self._env.now
        outcome.position_seconds = self._position
        outcome.version = self._schedule.newest(self._position)
        outcome.outages = self._store.outages
        assert isinstance(job, simpy.Process)
        outcome.done = not job.is_alive
        return outcome

    def _enter(self, phase: str) -> None:
        """End the present phase. A training that goes on at the end counts."""
        now = self._env.now
        self._outcome.seconds[self._phase] += now - self._since
        if self._phase == "training":
            self._position += now - self._since
        self._phase, self._since = phase, now

    # --- failures --------------------------------------------------------------------------------

    def _fail(self, job: simpy.Process) -> Steps:
        """All failures of all ranks, nodes and racks, as one Poisson process. Its rate is that of
        the beginning, with the most bad nodes; the others are thinned out."""
        factors = {"node": self._machines.most_failure_factor}
        bounds = {kind: rate * factors.get(kind, 1.0) for kind, rate in self._rates.items()}
        total = sum(bounds.values())
        kinds, weights = list(bounds), list(bounds.values())
        while total and job.is_alive:
            yield self._env.timeout(self._arrivals.expovariate(total))
            (kind,) = self._arrivals.choices(kinds, weights)
            real = self._rates[kind]
            if kind == "node":
                real *= self._machines.node_failure_factor
            if self._arrivals.random() * bounds[kind] >= real or not job.is_alive:
                continue
            if self._phase != "training" and not self._scenario.failures.during_restart:
                continue
            job.interrupt(kind)

    def _fail_again(self, job: simpy.Process) -> Steps:
        """The failures whose times are given."""
        for at in sorted(self._scenario.failures.at_seconds):
            yield self._env.timeout(at - self._env.now)
            if not job.is_alive:
                return
            if self._phase == "training" or self._scenario.failures.during_restart:
                job.interrupt("process")

    def _damage(self, kind: str) -> None:
        """Take away what a failure takes."""
        self._outcome.failures[kind] += 1
        self._in_vain += 1
        endless = math.isinf(self._scenario.job.length_seconds)
        if endless and self._in_vain > MOST_WITHOUT_PROGRESS:
            raise ConfigError(NO_PROGRESS.format(count=self._in_vain, done=self._farthest))
        if kind == "process":
            return
        self._only_processes = False
        self._holdings.lose(["memory"])
        if kind == "reboot":
            return
        lost = self._lost_nodes(kind)
        self._missing += len(lost)
        self._machines.lose(len(lost))
        self._holdings.lose(["local"])
        if self._env.now >= self._protected_at:
            self._exposed.clear()
        self._protected_at = math.inf
        self._exposed.update(lost)
        if self._redundancy is not None and not self._redundancy.survives(self._exposed):
            self._outcome.beyond_redundancy += 1
            self._exposed.clear()
            self._holdings.lose(["peer"])

    def _lost_nodes(self, kind: str) -> list[int]:
        job = self._scenario.job
        if kind == "node":
            return [self._chance.randrange(job.nodes)]
        first = self._chance.randrange(job.racks) * job.nodes_per_rack
        return list(range(first, min(first + job.nodes_per_rack, job.nodes)))

    # --- the course ------------------------------------------------------------------------------

    def _life(self) -> Steps:
        import simpy

        end = self._end_position()
        interrupted: simpy.Interrupt | None = None
        while True:
            try:
                if interrupted is None:
                    yield self._env.timeout(self._first_start_seconds())
                else:
                    yield from self._restart()
                interrupted = None
                self._enter("training")
                begin, start = self._env.now, self._position
                if start > self._farthest:
                    self._farthest, self._in_vain = start, 0
                yield self._env.timeout(end - start)
                self._enter("ended")
                return
            except simpy.Interrupt as failure:
                was_training = self._phase == "training"
                kind = str(failure.cause)
                self._enter("noticed")
                if was_training:
                    self._reached = self._position
                    if self._scenario.constant is None:
                        self._holdings.advance(begin, start, self._position, kind)
                    self._only_processes = True
                self._damage(kind)
                interrupted = failure

    def _first_start_seconds(self) -> float:
        restart = self._scenario.restart
        first = restart.first_start_seconds
        return restart.start_seconds if first is None else first

    def _end_position(self) -> float:
        """Where the work is done; far away if only the wall time ends the job."""
        job = self._scenario.job
        if math.isinf(job.work_seconds):
            return 10 * job.length_seconds + 1.0
        if self._scenario.constant is not None:
            return job.work_seconds * (1 + self._scenario.constant.overhead_share)
        return self._schedule.position(math.ceil(job.work_seconds / job.step_seconds))

    def _restart(self) -> Steps:
        """From a failure to the first step after it."""
        env, restart, constant = self._env, self._scenario.restart, self._scenario.constant
        if constant is not None:
            self._enter("recovery")
            yield env.timeout(constant.recovery_seconds)
            yield from self._find_nodes()
            self._outcome.sources["constant"] += 1
            return
        yield env.timeout(restart.notice_seconds)
        yield from self._find_nodes()
        self._enter("restart")
        warm = restart.warm_start_seconds
        is_warm = warm is not None and self._only_processes
        yield env.timeout(warm if is_warm and warm is not None else restart.start_seconds)
        self._holdings.settle(env.now)
        level, version = self._holdings.best()
        yield from self._load(level)
        self._outcome.sources[level] += 1
        if level in ("persistent", "scratch"):
            self._holdings.lose(["memory", "local", "peer"])
        self._holdings.resume(level, version)
        self._position = self._schedule.position(version)
        self._outcome.lost_by_source[level] += self._reached - self._position
        self._protected_at = env.now + self._protect_seconds

    def _find_nodes(self) -> Steps:
        if self._missing:
            self._enter("nodes")
            yield from self._machines.replace(self._missing)
            self._missing = 0
            if self._scenario.constant is None:
                yield self._env.timeout(self._scenario.restart.node_seconds)

    def _load(self, level: str) -> Steps:
        self._enter(f"load {level}")
        if level == "scratch":
            return
        seconds = self._costs[level].restore_seconds
        if level == "persistent":
            yield from self._store.transfer(seconds)
        else:
            yield self._env.timeout(seconds)
