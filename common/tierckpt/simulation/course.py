"""Courses of a simulated job, from its start to the end of its work or of the wall time.

The job trains, fails, restarts, and counts where its time went. `Holdings` knows the newest
version on each level, and the writes that outlive a failure. `Machines` are the nodes, the spares,
and repair. `SharedStore` is the file system or object store of all, which is sometimes slow, or
does not answer.

A replica is one course. `simulate` runs a scenario several times, with means and confidence
intervals. The replica's number and the scenario's seed determine all of its random numbers. So two
scenarios with the same failures meet the same ones, and their difference is less noisy than
either.

The result of a simulation as a document for JSON.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from random import Random
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field, to_builtins
from msgspec.structs import replace

from tierckpt._text import counted, time_text
from tierckpt.errors import ConfigError
from tierckpt.simulation.scenario import Failures, Nodes

from .model import (
    LevelCosts,
    Plan,
    Redundancy,
    Rung,
    Schedule,
    costs_of,
    exposed_seconds,
    kind_rates,
    losses_per_second,
    plan_of,
    protect_seconds,
)
from .scenario import Scenario

if TYPE_CHECKING:
    import simpy

    Steps = Generator[simpy.Event, Any, None]


class Machines:
    """Spare nodes, and which share of all nodes is bad.

    Bad nodes are counted, not named. A node that fails is a bad one with the probability of its
    kind's share of all failures.
    """

    def __init__(self, env: simpy.Environment, nodes: int, settings: Nodes, chance: Random) -> None:
        self._env, self._settings, self._chance = env, settings, chance
        self._returned = env.event()
        spares = 0 if math.isinf(settings.spares) else int(settings.spares)
        self.without_limit = math.isinf(settings.spares)
        self.in_job = nodes
        self.bad_in_job = round(nodes * settings.bad_share)
        self.bad_spares = round(spares * settings.bad_share)
        self.spares = spares
        all_bad = self.bad_in_job + self.bad_spares
        self.most_failure_factor = self._factor(min(all_bad, nodes))
        """Largest possible value of `node_failure_factor`: no good node gets bad."""

    @property
    def node_failure_factor(self) -> float:
        """Failures of all nodes in the job, relative to as many good ones."""
        return self._factor(self.bad_in_job)

    def _factor(self, bad: int) -> float:
        return 1 + bad / self.in_job * (self._settings.bad_factor - 1)

    def lose(self, count: int) -> None:
        """Take failed nodes out of the job, and start their repair."""
        for _ in range(count):
            weight = self.bad_in_job * self._settings.bad_factor
            good = self.in_job - self.bad_in_job
            is_bad = bool(self.bad_in_job) and self._chance.random() * (weight + good) < weight
            self.bad_in_job -= is_bad
            comes_back = not math.isinf(self._settings.repair_seconds)
            if comes_back and (is_bad or not self.without_limit):
                self._env.process(self._repair(is_bad))

    def replace(self, count: int) -> Generator[Any, Any, None]:
        """Wait until so many spares have taken the places of lost nodes."""
        if self.without_limit:
            return
        while self.spares < count:
            yield self._returned
        for _ in range(count):
            takes_bad = self._chance.random() * self.spares < self.bad_spares
            self.spares -= 1
            self.bad_spares -= takes_bad
            self.bad_in_job += takes_bad

    def _repair(self, is_bad: bool) -> Generator[Any, Any, None]:
        settings = self._settings
        rate = 1 / settings.repair_seconds if settings.repair_seconds else math.inf
        yield self._env.timeout(self._chance.expovariate(rate) if rate < math.inf else 0.0)
        still_bad = is_bad and self._chance.random() >= settings.repair_cures
        if self.without_limit:
            self.bad_in_job += still_bad
            return
        self.spares += 1
        self.bad_spares += still_bad
        returned, self._returned = self._returned, self._env.event()
        returned.succeed()


ROUNDING_SECONDS = 1e-5
"""Less than this is not waited for: after years of seconds the clock cannot show 1e-9."""
KEPT = 64
"""Changes of the speed that are remembered, for flushes that started before them."""


class SharedStore:
    """The store's speed, relative to its bandwidth: 1, less while it is slow, 0 while it is out."""

    def __init__(self, env: simpy.Environment, failures: Failures, chance: Random) -> None:
        self._env, self._chance = env, chance
        self._history: list[tuple[float, float]] = [(0.0, 1.0)]
        self._changed = env.event()
        self.outages = 0
        out, slow = failures.store_out_every_seconds, failures.store_slow_every_seconds
        self._rates = 1 / out, 1 / slow
        self._failures = failures
        if any(self._rates):
            env.process(self._life())

    @property
    def speed(self) -> float:
        """The speed now."""
        return self._history[-1][1]

    def transfer(self, seconds: float) -> Steps:
        """Wait as long as a transfer takes that needs `seconds` at full speed."""
        while seconds > ROUNDING_SECONDS:
            speed, start_time, changed = self.speed, self._env.now, self._changed
            if speed:
                yield self._env.timeout(seconds / speed) | changed
            else:
                yield changed
            seconds -= (self._env.now - start_time) * speed

    def is_complete(self, start_time: float, seconds: float) -> bool:
        """True if a transfer from then is complete now."""
        done, now = 0.0, self._env.now
        for number, (since, speed) in enumerate(self._history):
            ends = [*self._history[number + 1 : number + 2], (now, 0.0)][0][0]
            done += max(0.0, min(ends, now) - max(since, start_time)) * speed
        return done >= seconds - ROUNDING_SECONDS

    def _life(self) -> Steps:
        out, slow = self._rates
        while True:
            yield self._env.timeout(self._chance.expovariate(out + slow))
            is_out = self._chance.random() * (out + slow) < out
            self.outages += is_out
            factor = 0.0 if is_out else 1 / self._failures.store_slow_factor
            mean = self._failures.store_out_seconds if is_out else self._failures.store_slow_seconds
            self._set(factor)
            yield self._env.timeout(self._chance.expovariate(1 / mean) if mean else 0.0)
            self._set(1.0)

    def _set(self, speed: float) -> None:
        self._history = [*self._history[-KEPT:], (self._env.now, speed)]
        changed, self._changed = self._changed, self._env.event()
        changed.succeed()


WRITES_CONTINUE = {"process": ("local", "peer", "persistent")}
"""Levels with agents that complete a write after such a failure. A copy to memory ends with its
process."""


class Holdings:
    """What a restart can read. A level without a version is absent."""

    def __init__(self, schedule: Schedule, store: SharedStore) -> None:
        self._schedule, self._store = schedule, store
        self.newest: dict[str, int] = {}
        self._pending: dict[str, tuple[float, int]] = {}
        """By level, the start of a write that outlived its run, and its version."""

    def advance(self, start_time: float, from_position: float, position: float, kind: str) -> None:
        """Add the versions of a run from `start_time` on, up to its end at `position`."""
        for rung in self._schedule.rungs:
            found, started = self._newest(rung, start_time, from_position, position)
            if found and self._is_new(found, from_position):
                self.newest[rung.name] = max(found, self.newest.get(rung.name, 0))
                self._pending.pop(rung.name, None)
            if started > found and self._is_new(started, from_position):
                wall = start_time + self._schedule.position(started) - from_position
                if rung.name in WRITES_CONTINUE.get(kind, ()):
                    self._pending[rung.name] = wall, started

    def _is_new(self, version: int, from_position: float) -> bool:
        """True for versions of this run, not of those before it."""
        return self._schedule.position(version) > from_position

    def _newest(
        self, rung: Rung, start_time: float, from_position: float, position: float
    ) -> tuple[int, int]:
        """The newest complete version, and the newest started one."""
        every = rung.every_steps
        started = self._schedule.newest(position, every)
        complete = self._schedule.newest(position - rung.latency_seconds, every)
        if rung.flush_seconds:
            lead = rung.latency_seconds - rung.flush_seconds
            while complete > 0 and self._is_new(complete, from_position):
                wall = start_time + self._schedule.position(complete) - from_position + lead
                if self._store.is_complete(wall, rung.flush_seconds):
                    break
                complete -= every
        return complete, started

    def settle(self, now: float) -> None:
        """Count writes that agents have completed since their run failed."""
        for rung in self._schedule.rungs:
            if rung.name not in self._pending:
                continue
            start_time, version = self._pending[rung.name]
            lead = rung.latency_seconds - rung.flush_seconds
            done = start_time + rung.latency_seconds <= now
            if rung.flush_seconds:
                done = self._store.is_complete(start_time + lead, rung.flush_seconds)
            if done:
                self.newest[rung.name] = max(version, self.newest.get(rung.name, 0))
                del self._pending[rung.name]

    def lose(self, levels: Iterable[str]) -> None:
        """Forget the versions of these levels, and writes to them that are under way."""
        for level in levels:
            self.newest.pop(level, None)
            self._pending.pop(level, None)

    def best(self) -> tuple[str, int]:
        """The level that a restart reads, and the version: the newest one, from the cheapest level.
        `scratch` and 0 if there is none."""
        found = [
            (-version, number, rung.name)
            for number, rung in enumerate(self._schedule.rungs)
            if (version := self.newest.get(rung.name, 0))
        ]
        if not found:
            return "scratch", 0
        version, _, level = min(found)
        return level, -version

    def resume(self, level: str, version: int) -> None:
        """Start a run from this version: later ones are of a lineage that ended."""
        if level == "peer":
            self.newest["local"] = version  # rebuilt
        self.newest = {name: min(v, version) for name, v in self.newest.items()}
        self._pending = {n: (at, v) for n, (at, v) in self._pending.items() if v <= version}


MAX_WITHOUT_PROGRESS = 100_000
"""Failures after which a job without a limit of its wall time, which got no further since, counts
as one that never ends."""

KINDS = ("process", "reboot", "node", "rack")

NO_PROGRESS = (
    "the job does not get done: {count:,} failures in a row, and no version after {done:.3g} s of "
    "its training. Failures are too frequent for its restarts and intervals; give [job] length to "
    "simulate that time nevertheless"
)


class Outcome(Struct):
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
        self._farthest, self._fruitless = 0.0, 0
        """The farthest position that the training started from, and the failures since."""
        self._missing = 0
        self._exposed: set[int] = set()
        """Nodes with shards that only other members of their groups have, until `_protected_at`."""
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
        """End the present phase. A training still under way at the end counts."""
        now = self._env.now
        self._outcome.seconds[self._phase] += now - self._since
        if self._phase == "training":
            self._position += now - self._since
        self._phase, self._since = phase, now

    # --- failures --------------------------------------------------------------------------------

    def _fail(self, job: simpy.Process) -> Steps:
        """All failures of all ranks, nodes and racks, as one Poisson process. Its rate is that of
        the start, with the most bad nodes; the others are thinned out."""
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
        """The failures at given times."""
        for at in sorted(self._scenario.failures.at_seconds):
            yield self._env.timeout(at - self._env.now)
            if not job.is_alive:
                return
            if self._phase == "training" or self._scenario.failures.during_restart:
                job.interrupt("process")

    def _damage(self, kind: str) -> None:
        """Take away what a failure takes."""
        self._outcome.failures[kind] += 1
        self._fruitless += 1
        endless = math.isinf(self._scenario.job.length_seconds)
        if endless and self._fruitless > MAX_WITHOUT_PROGRESS:
            raise ConfigError(NO_PROGRESS.format(count=self._fruitless, done=self._farthest))
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
                start_time, start = self._env.now, self._position
                if start > self._farthest:
                    self._farthest, self._fruitless = start, 0
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
                        self._holdings.advance(start_time, start, self._position, kind)
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


CONFIDENCE = 0.95
MAX_FAILURES = 10_000_000
"""More take ten minutes or so."""


class Estimate(Struct, frozen=True):
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


class Study(Struct, frozen=True):
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
    if count > MAX_FAILURES:
        raise ConfigError(
            f"some {count:.1e} failures would be simulated (those of the store count), one every "
            f"{time_text(1 / rate)} in {time_text(seconds)}, {scenario.replicas} times; give "
            f"a shorter length, fewer replicas, or rarer failures ({MAX_FAILURES:.0e} are "
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


DAY_SECONDS = 86400.0


def document(study: Study) -> dict[str, Any]:
    """All results. Infinite and unknown values are null; an estimate has `mean` and `error`.

    - `simulated`: true; `scenario`: all values, in seconds and bytes; `notes`: sentences
    - `goodput`, `wall_seconds`, `useful_seconds`, `failures`, `beyond_redundancy`: estimates
    - `work_done`: the work was done in all replicas
    - `failures_by_kind`, `mean_seconds_between_failures`, `store_outages`: means
    - `phases`: an estimate of the share of each use of time
    - `sources`: for each level that restarts read, `restarts`, `load_seconds`, `lost_seconds`
    - `levels`: for each level `every_steps`, `every_seconds`, `best_seconds`, `stall_seconds`,
      `failures_per_second` that need it, `latency_seconds`, `restore_seconds`, `versions`,
      `written_bytes_per_day`, `network_bytes_per_day`, `restart_bytes`, `files_per_version`,
      `files_per_day`
    - `expected_beyond_redundancy`: by the formula
    """
    outcomes = study.outcomes
    walls = [outcome.wall_seconds for outcome in outcomes]
    failures = [float(sum(outcome.failures.values())) for outcome in outcomes]
    every = [wall / max(1.0, count) for wall, count in zip(walls, failures, strict=True)]
    found: dict[str, Any] = _plain(
        {
            "simulated": True,
            "scenario": to_builtins(study.scenario),
            "goodput": _estimate(study.goodput),
            "wall_seconds": _estimate(study.estimate(walls)),
            "useful_seconds": _estimate(study.estimate(map(study.useful_seconds, outcomes))),
            "work_done": all(outcome.done for outcome in outcomes),
            "failures": _estimate(study.estimate(failures)),
            "mean_seconds_between_failures": fmean(every) if any(failures) else None,
            "failures_by_kind": _means(study, "failures"),
            "phases": {name: _estimate(share) for name, share in study.phase_shares.items()},
            "sources": sources(study),
            "levels": levels(study),
            "beyond_redundancy": _estimate(
                study.estimate(float(o.beyond_redundancy) for o in outcomes)
            ),
            "expected_beyond_redundancy": study.expected_losses,
            "store_outages": fmean(o.outages for o in outcomes),
            "notes": list(study.notes),
        }
    )
    return found


def sources(study: Study) -> dict[str, dict[str, float]]:
    """Restarts by the level that they read: how many, how long, and how much work was lost."""
    found = {}
    names = dict.fromkeys(name for outcome in study.outcomes for name in outcome.sources)
    for name in names:
        count = sum(o.sources[name] for o in study.outcomes)
        lost = math.fsum(o.lost_by_source.get(name, 0.0) for o in study.outcomes)
        load = math.fsum(o.seconds.get(f"load {name}", 0.0) for o in study.outcomes)
        found[name] = {
            "restarts": count / len(study.outcomes),
            "load_seconds": load / count,
            "lost_seconds": lost / count,
        }
    return found


def levels(study: Study) -> dict[str, dict[str, Any]]:
    """Intervals, costs, traffic and files by level. Traffic is that of all nodes together."""
    found = {}
    days = fmean(o.wall_seconds for o in study.outcomes) / DAY_SECONDS
    for rung in study.plan.schedule.rungs:
        cost = study.costs[rung.name]
        versions = fmean(study.versions(o)[rung.name] for o in study.outcomes)
        found[rung.name] = {
            "every_steps": rung.every_steps,
            "every_seconds": rung.every_steps * study.plan.schedule.pace_seconds,
            "best_seconds": study.plan.best_seconds.get(rung.name),
            "failures_per_second": study.plan.rates[rung.name],
            "stall_seconds": rung.stall_seconds,
            "latency_seconds": rung.latency_seconds,
            "restore_seconds": cost.restore_seconds,
            "versions": versions,
            "written_bytes_per_day": versions * cost.written_bytes / days,
            "network_bytes_per_day": versions * cost.network_bytes / days,
            "restart_bytes": cost.read_bytes,
            "files_per_version": cost.files,
            "files_per_day": versions * cost.files / days,
        }
    return found


def _means(study: Study, name: str) -> dict[str, float]:
    counters = [getattr(outcome, name) for outcome in study.outcomes]
    names = dict.fromkeys(key for counter in counters for key in counter)
    return {key: fmean(counter[key] for counter in counters) for key in names}


def _estimate(found: Estimate) -> dict[str, float]:
    return {"mean": found.mean, "error": found.error}


def _plain(value: Any) -> Any:
    """The value without numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
