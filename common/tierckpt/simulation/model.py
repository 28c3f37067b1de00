"""The formulas of the model: costs, losses beyond the redundancy, positions, intervals. Pure.

Costs are durations, bytes and files of a version, by level, from bandwidths. A version has S bytes
on N nodes. Its shards are of equal size, S / N on each node. After a restart each node receives
the state that it needs once, whatever the source: all S bytes in a data-parallel job.

Redundancy of the peer level: does a set of lost nodes cost a version? The groups are those of a
real job (`erasure/groups`), and a group's codes decide. The formulas give the expected number of
losses; the simulation is compared with them.

The schedule says which versions exist at a moment, without an event for each. A *position* is the
wall time that an undisturbed job needs to get there from its start, stalls included. Versions are
taken at multiples of their level's interval, as in a job: so the position of a version, and the
newest version at a position, do not depend on the course of the job.

The formulas of intervals, in steps, are those of `tierckpt interval` (`core.tuning`). A
level counts the failures after which it is the first that still has a version.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache, cached_property

from msgspec import Struct

from tierckpt._text import counted, time_text
from tierckpt.core.tuning import LevelModel, daly_seconds, optimum, within_budget, young_seconds
from tierckpt.erasure.codes import Code
from tierckpt.erasure.groups import Scheme, plan_groups

from .scenario import Failures, Job, Level, Scenario


class Rung(Struct, frozen=True):
    """The versions of one level."""

    name: str
    every_steps: int
    stall_seconds: float
    latency_seconds: float
    flush_seconds: float = 0.0
    """The last part of the latency, in which the shared store takes part."""


class Schedule(Struct, frozen=True, dict=True):
    """Versions of all levels."""

    step_seconds: float
    rungs: tuple[Rung, ...]

    @cached_property
    def pace_seconds(self) -> float:
        """Average duration of a step, with its share of the stalls."""
        stalls = (rung.stall_seconds / rung.every_steps for rung in self.rungs)
        return self.step_seconds + sum(stalls)

    @cached_property
    def _most_stall_seconds(self) -> float:
        return sum(rung.stall_seconds for rung in self.rungs)

    def stalls_seconds(self, version: int) -> float:
        """All stalls up to the version's own."""
        return sum(r.stall_seconds * (version // r.every_steps) for r in self.rungs)

    def position(self, version: int) -> float:
        """The moment at which the version's own stall is over."""
        return version * self.step_seconds + self.stalls_seconds(version)

    def newest(self, position: float, every_steps: int = 1) -> int:
        """The newest multiple of `every_steps` at this position; 0 if there is none."""
        if position <= 0:
            return 0
        # position(v) lies between v * pace - all stalls and v * pace.
        low = int(position / self.pace_seconds) // every_steps
        high = int((position + self._most_stall_seconds) / self.pace_seconds) // every_steps + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.position(middle * every_steps) <= position:
                low = middle
            else:
                high = middle
        while low > 0 and self.position(low * every_steps) > position:  # rounding
            low -= 1
        return low * every_steps


class LevelCosts(Struct, frozen=True):
    """One level, per version; seconds and bytes."""

    name: str
    stall_seconds: float
    """Time that a version adds to the training."""
    latency_seconds: float
    """From the end of the stall until the version is complete here."""
    flush_seconds: float
    """The part of the latency that the store's state changes."""
    restore_seconds: float
    written_bytes: float
    network_bytes: float
    read_bytes: float
    """Bytes that a restart reads from here."""
    files: int


def costs_of(scenario: Scenario) -> dict[str, LevelCosts]:
    """The costs of every level in use. Levels below local are written from there."""
    found: dict[str, LevelCosts] = {}
    for level in scenario.levels:
        source = found.get("local") if level.name in ("peer", "persistent") else None
        found[level.name] = _one(scenario, level, 0.0 if source is None else source.latency_seconds)
    return found


def _one(scenario: Scenario, level: Level, before_seconds: float) -> LevelCosts:
    own = write_seconds(scenario, level) if level.write_seconds is None else level.write_seconds
    read = restore_seconds(scenario, level)
    state, job = scenario.job.state_bytes, scenario.job
    stall = level.cost_seconds + (own if level.blocking else 0.0)
    latency = 0.0 if level.blocking else own
    if level.write_seconds is None and not level.blocking:
        latency += before_seconds
    written, network = state, 0.0
    if level.name == "peer":
        written, network = _parity_bytes(level, state)
    copies = {"shards": 1, "nodes": job.nodes, "ranks": job.ranks}[level.readers]
    return LevelCosts(
        level.name,
        stall,
        latency,
        own if level.name == "persistent" and not level.blocking else 0.0,
        read if level.restore_seconds is None else level.restore_seconds,
        written,
        network,
        state * copies,
        _files(scenario, level),
    )


def write_seconds(scenario: Scenario, level: Level) -> float:
    """From the version on the level before until it is complete here."""
    job, bandwidth = scenario.job, scenario.bandwidth
    shard = job.state_bytes / job.nodes
    if level.name == "memory":
        return job.step_seconds  # it is copied during the next step
    if level.name == "local":
        return shard / bandwidth.disk_bytes
    if level.name == "peer":
        scheme = Scheme.parse(level.scheme)
        _, network = _parity_bytes(level, shard)
        coding = 0.0 if scheme.name == "partner" else shard / bandwidth.coding_bytes
        return max(network / bandwidth.network_bytes, coding)
    writers = min(level.writers or job.nodes, job.nodes)
    sent = job.state_bytes / writers / bandwidth.network_bytes
    opens = _files(scenario, level) / bandwidth.store_opens
    return max(job.state_bytes / bandwidth.store_bytes, sent) + opens


def restore_seconds(scenario: Scenario, level: Level) -> float:
    """Reading a version, and bringing it to all nodes."""
    job, bandwidth = scenario.job, scenario.bandwidth
    shard, everyone = job.state_bytes / job.nodes, job.needed_bytes / bandwidth.network_bytes
    if level.name == "memory":
        return everyone
    if level.name == "local":
        return shard / bandwidth.disk_bytes + everyone
    if level.name == "peer":
        scheme = Scheme.parse(level.scheme)
        sources = {"partner": 1, "xor": level.group_size - 1, "rs": scheme.k}.get(scheme.name, 1)
        read = shard / bandwidth.disk_bytes
        # Survivors collect rows side by side: the lost node receives only its own bytes.
        network = (2 if sources > 1 else 1) * shard / bandwidth.network_bytes
        coding = 0.0 if sources == 1 else shard / bandwidth.coding_bytes
        return read + max(network, coding) + everyone
    copies = {"shards": 1, "nodes": job.nodes, "ranks": job.ranks}[level.readers]
    readers = job.nodes if level.readers == "shards" else 1
    at_store = copies * job.state_bytes / bandwidth.store_bytes
    at_node = copies / job.nodes * job.state_bytes / bandwidth.network_bytes
    opens = max(copies, readers) / bandwidth.store_opens
    return max(at_store, at_node) + opens + (everyone if level.readers == "shards" else 0.0)


def protect_seconds(scenario: Scenario, level: Level) -> float:
    """After a restart, until the lost redundancy is there again: the same exchange once more, and
    the write of a node's shard and parity."""
    if level.protect_seconds is not None:
        return level.protect_seconds
    shard = scenario.job.state_bytes / scenario.job.nodes
    written, _ = _parity_bytes(level, shard)
    return write_seconds(scenario, level) + (shard + written) / scenario.bandwidth.disk_bytes


def exposed_seconds(scenario: Scenario, costs: Mapping[str, LevelCosts]) -> float:
    """Time from the loss of a node until its shards are protected again, if no other failure comes
    in between; 0 without a peer level."""
    restart, level = scenario.restart, scenario.level("peer")
    if level is None:
        return 0.0
    parts = restart.notice_seconds + restart.node_seconds + restart.start_seconds
    return parts + costs["peer"].restore_seconds + protect_seconds(scenario, level)


def _parity_bytes(level: Level, shard_bytes: float) -> tuple[float, float]:
    """Parity stored, and bytes sent, for a shard of this size.

    A row's collector receives k - 1 of its data segments, and sends m parities on, of which it
    keeps one: k + m - 1 messages a row, as in docs/internals/erasure.md.
    """
    scheme = Scheme.parse(level.scheme)
    if scheme.name == "none":
        return 0.0, 0.0
    k = scheme.k or level.group_size - 1
    return shard_bytes * scheme.m / k, shard_bytes * (k + scheme.m - 1) / k


def _files(scenario: Scenario, level: Level) -> int:
    """Files of one version."""
    ranks = scenario.job.ranks
    if level.name == "memory":
        return 0
    if level.name in ("local", "peer"):
        return 2 * ranks  # a shard, or parity, and its manifest
    if level.writers == 1:
        return 1
    return 2 * math.ceil(ranks / level.shards_per_file) + 1  # data and record; the manifest


class Redundancy:
    """The groups of a job. Nodes are numbered from 0; racks hold neighbours."""

    def __init__(self, job: Job, level: Level) -> None:
        """Raises ConfigError if the ranks cannot be grouped."""
        self.scheme = Scheme.parse(level.scheme)
        unit = job.ranks_per_node * (job.nodes_per_rack if level.domain == "rack" else 1)
        domains = [f"{rank // unit}" for rank in range(job.ranks)]
        self._members: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._codes: list[Code] = []
        self.groups: list[tuple[int, ...]] = []
        for number, group in enumerate(plan_groups(domains, self.scheme, level.group_size)):
            self._codes.append(group.code)
            nodes = tuple(rank // job.ranks_per_node for rank in group.ranks)
            self.groups.append(nodes)
            for member, node in enumerate(nodes):
                self._members[node].append((number, member))

    def survives(self, lost_nodes: Collection[int]) -> bool:
        """True if the shards of these nodes can be rebuilt from the others'."""
        if not self._codes:
            return not lost_nodes
        by_group: defaultdict[int, list[int]] = defaultdict(list)
        for node in lost_nodes:
            for number, member in self._members[node]:
                by_group[number].append(member)
        return all(
            len(members) <= self.scheme.m or code_survives(self._codes[number], tuple(members))
            for number, members in by_group.items()
        )


@cache
def code_survives(code: Code, lost: tuple[int, ...]) -> bool:
    """True if a group can rebuild the shards of these members."""
    gone = set(lost)
    for row in range(code.n):
        segments = code.row(row)
        missing = [segment for segment in segments if segment.member in gone]
        if len(missing) > code.m and any(not segment.parity for segment in missing):
            return False
    return True


def losses_per_second(redundancy: Redundancy, node_rate: float, window_seconds: float) -> float:
    """Rate at which failures exceed the redundancy, to first order.

    Each node is lost `node_rate` times a second. It is unprotected for `window_seconds`, and each
    further loss starts the window again. So m + 1 losses, each within a window of the one before,
    cost a version, if they are fatal to a group. With F ordered fatal (m + 1)-tuples of nodes the
    rate is F r^(m+1) w^m. It is good as long as losses within a window are rare.
    """
    m = redundancy.scheme.m
    return _fatal_tuples(redundancy) * node_rate ** (m + 1) * window_seconds**m


def _fatal_tuples(redundancy: Redundancy) -> int:
    """Ordered tuples of m + 1 nodes that cost a version."""
    fatal: set[frozenset[int]] = set()
    need = redundancy.scheme.m + 1
    for nodes, code in zip(redundancy.groups, redundancy._codes, strict=True):
        for members in _fatal_members(code, need):
            fatal.add(frozenset(nodes[member] for member in members))
    orders = 1
    for number in range(2, need + 1):
        orders *= number
    return len(fatal) * orders


@cache
def _fatal_members(code: Code, need: int) -> tuple[tuple[int, ...], ...]:
    from itertools import combinations

    return tuple(
        lost for lost in combinations(range(code.n), need) if not code_survives(code, lost)
    )


MAX_STEPS = 10**12


class Plan(Struct, frozen=True):
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
    return MAX_STEPS if ratio >= MAX_STEPS else max(1, math.ceil(ratio - 1e-9))


def _least_steps(cost: LevelCosts, step_seconds: float) -> int:
    """One version at a time: the next one is not started before this one is complete."""
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
