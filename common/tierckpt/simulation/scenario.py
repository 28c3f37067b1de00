"""Scenario: the description of a simulated job. Pure.

Times are in seconds, rates are given as mean times between failures of *one* unit (a rank, a node,
a rack, the store). Infinite means never. `check` refuses values that make no sense.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from tierckpt.errors import ConfigError

LEVELS = ("memory", "local", "peer", "persistent")
"""The cheapest to restore from first."""
POLICIES = ("young", "daly", "best", "budget")
NEVER = math.inf


@dataclass(frozen=True)
class Job:
    """The job, undisturbed."""

    ranks: int = 16
    ranks_per_node: int = 8
    nodes_per_rack: int = 16
    step_seconds: float = 1.0
    state_bytes: float = 1e9
    """Parameters and optimizer state, one copy."""
    node_state_bytes: float | None = None
    """The part of it that one node needs to train; None: all of it, as in data-parallel jobs."""
    length_seconds: float = 30 * 86400.0
    """Wall time to simulate. The simulation ends before it when `work` is done."""
    work_seconds: float = NEVER
    """Training to do, as an undisturbed job without checkpoints would need it."""

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_node)

    @property
    def racks(self) -> int:
        return math.ceil(self.nodes / self.nodes_per_rack)

    @property
    def needed_bytes(self) -> float:
        """State that one node needs."""
        return self.state_bytes if self.node_state_bytes is None else self.node_state_bytes


@dataclass(frozen=True)
class Failures:
    """Mean times between failures."""

    process_every_seconds: float = NEVER
    """A process of one rank dies. The memory of its node survives."""
    reboot_every_seconds: float = NEVER
    """One node restarts: it loses its memory, and keeps its disk."""
    node_every_seconds: float = NEVER
    """One node is lost with its memory and its disk."""
    rack_every_seconds: float = NEVER
    """One rack is lost, with all of its nodes."""
    job_every_seconds: float = NEVER
    """Any failure of the whole job, instead of those above. `node_share` of them lose a node, all
    others a process."""
    node_share: float = 0.0
    store_out_every_seconds: float = NEVER
    store_out_seconds: float = 1800.0
    """Mean time for which the store does not answer."""
    store_slow_every_seconds: float = NEVER
    store_slow_seconds: float = 3600.0
    store_slow_factor: float = 10.0
    at_seconds: tuple[float, ...] = ()
    """Failures of processes at these times, besides the random ones: those of a real job, again."""
    during_restart: bool = True
    """Failures also hit a job that is restarting."""


@dataclass(frozen=True)
class Nodes:
    """Spare nodes and repair."""

    spares: float = math.inf
    """Nodes that wait for a lost one; infinite: always enough."""
    repair_seconds: float = 86400.0
    """Mean time until a lost node is a spare. Infinite: it never is one."""
    bad_share: float = 0.0
    """Share of nodes that fail `bad_factor` times as often."""
    bad_factor: float = 1.0
    repair_cures: float = 1.0
    """Probability that the repair of a bad node makes it a good one."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second."""

    disk_bytes: float = 2e9
    """The local disk of one node."""
    network_bytes: float = 10e9
    """Of one node, in each direction."""
    store_bytes: float = 100e9
    """The store, for all nodes together."""
    coding_bytes: float = 5e9
    """Parity, computed by one node."""
    store_opens: float = math.inf
    """Files that the store opens a second."""


@dataclass(frozen=True)
class Restart:
    """Parts of a restart that do not depend on the level."""

    notice_seconds: float = 10.0
    """Until the failure is noticed, and all processes have ended."""
    start_seconds: float = 60.0
    """From the start of processes to the restore, and the first step as far as it is longer than
    others."""
    warm_start_seconds: float | None = None
    """The same after the failure of a process only, if a process with all imports is waiting
    (`tierckpt run`). None: as `start_seconds`."""
    first_start_seconds: float | None = None
    """The start of the job. None: as `start_seconds`."""
    node_seconds: float = 0.0
    """Until a spare node has taken the place of a lost one."""


@dataclass(frozen=True)
class Constant:
    """Checkpoints as two constants, as other models have them. No level is simulated and no work is
    lost: both numbers contain it."""

    recovery_seconds: float
    overhead_share: float = 0.0
    """Time of checkpoints, as a share of the training's time."""


@dataclass(frozen=True)
class Level:
    """One level. None: computed from bandwidths."""

    name: str
    every_steps: int = 0
    every_seconds: float = 0.0
    policy: str = ""
    """One of POLICIES, instead of an interval."""
    cost_seconds: float = 0.0
    """Time that one version here adds to the training, beyond the levels before."""
    write_seconds: float | None = None
    """From the boundary until the version is complete here."""
    restore_seconds: float | None = None
    """Reading a version, until the state is on all ranks."""
    blocking: bool = False
    """The training waits until the version is complete."""
    writers: int = 0
    """Nodes that write to the store; 0: all."""
    readers: str = "shards"
    """The restore reads each byte of the store once (`shards`), once for each node (`nodes`), or
    once for each rank (`ranks`)."""
    scheme: str = "partner"
    group_size: int = 8
    domain: str = "node"
    """Members of a group are in different nodes, or different racks."""
    protect_seconds: float | None = None
    """After a restart, until the lost redundancy is there again."""
    shards_per_file: int = 64

    @property
    def has_interval(self) -> bool:
        return bool(self.every_steps or self.every_seconds or self.policy)


@dataclass(frozen=True)
class Scenario:
    """All of it. `levels` are in the order of LEVELS."""

    job: Job = field(default_factory=Job)
    failures: Failures = field(default_factory=Failures)
    nodes: Nodes = field(default_factory=Nodes)
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    restart: Restart = field(default_factory=Restart)
    levels: tuple[Level, ...] = ()
    constant: Constant | None = None
    overhead_budget: float = 0.03
    replicas: int = 10
    seed: int = 1

    def level(self, name: str) -> Level | None:
        """The level of this name, if it is used."""
        return next((level for level in self.levels if level.name == name), None)


def check(scenario: Scenario) -> None:
    """Raise ConfigError, with the remedy, for a scenario that makes no sense."""
    for problem in _problems(scenario):
        raise ConfigError(problem)


def _problems(scenario: Scenario) -> Iterator[str]:
    yield from _bad_numbers(scenario)
    job, failures = scenario.job, scenario.failures
    if math.isinf(job.length_seconds) and math.isinf(job.work_seconds):
        yield "[job] has neither a length nor work: the simulation would not end; give length"
    if math.isinf(job.length_seconds) and _may_lack_nodes(scenario.nodes):
        yield (
            "[nodes] repair never ends, so the job may wait for a node without end; give [job] "
            "length"
        )
    own = (f.name for f in fields(failures) if f.name.split("_")[0] in _UNITS)
    given = [name for name in own if name.endswith("_every_seconds") and _finite(failures, name)]
    if not math.isinf(failures.job_every_seconds) and given:
        yield (
            f"[failures] job_every is the rate of all failures, and "
            f"{given[0].removesuffix('_seconds')} would add to it; give one or the other"
        )
    if scenario.nodes.bad_share and math.isinf(failures.node_every_seconds):
        yield "[nodes] bad_share needs [failures] node_every, the time for a good node"
    if scenario.constant is not None and scenario.levels:
        yield "[constant] replaces all levels; remove it, or the [levels]"
    if scenario.constant is None:
        yield from _level_problems(scenario)


def _may_lack_nodes(nodes: Nodes) -> bool:
    return math.isinf(nodes.repair_seconds) and not math.isinf(nodes.spares)


_UNITS = ("process", "reboot", "node", "rack")


def _finite(table: object, name: str) -> bool:
    return not math.isinf(getattr(table, name))


def _level_problems(scenario: Scenario) -> Iterator[str]:
    if not scenario.levels:
        yield (
            'no level takes versions; give for example [levels.persistent] with every = "10m", or '
            "[constant] with the time of a recovery"
        )
    for level in scenario.levels:
        where = f"[levels.{level.name}]"
        if sum(map(bool, (level.every_steps, level.every_seconds, level.policy))) > 1:
            yield f"{where} has two intervals; give either every_steps or every"
        if level.name == "peer":
            if level.has_interval:
                yield f"{where} has an interval, but takes the local level's versions; remove it"
            if scenario.level("local") is None:
                yield f"{where} protects the versions of the local level; add [levels.local]"
        elif not level.has_interval:
            yield (
                f'{where} has no interval; give every_steps = 100, every = "10m", or every = one '
                f"of {', '.join(POLICIES)}"
            )


_POSITIVE = {"ranks", "ranks_per_node", "nodes_per_rack", "step_seconds", "length_seconds"}
_POSITIVE |= {"work_seconds", "replicas", "disk_bytes", "network_bytes", "store_bytes"}
_POSITIVE |= {"coding_bytes", "store_opens", "store_slow_factor", "bad_factor", "shards_per_file"}
_ENDLESS = {"length_seconds", "work_seconds", "every_seconds", "repair_seconds"}
_SHARES = {"node_share", "bad_share", "repair_cures"}


def _bad_numbers(scenario: Scenario) -> Iterator[str]:
    """Sentences about numbers that are out of range."""
    tables: list[tuple[str, object]] = [("", scenario)]
    names = ("job", "failures", "nodes", "bandwidth", "restart", "constant")
    tables += [(f"[{name}] ", getattr(scenario, name)) for name in names]
    tables += [(f"[levels.{level.name}] ", level) for level in scenario.levels]
    for where, table in tables:
        for each in fields(table) if table is not None else ():  # type: ignore[arg-type]
            value = getattr(table, each.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            name = each.name.removesuffix("_seconds").removesuffix("_bytes")
            is_rate = each.name.endswith("_every_seconds")
            is_time = each.name.endswith("_seconds")
            if math.isnan(value) or value < 0:
                yield f"{where}{name} is {value:g}; it must not be negative"
            elif value == 0 and (each.name in _POSITIVE or is_rate):
                hint = '; for no failures leave it out, or write "inf"' if is_rate else ""
                yield f"{where}{name} is 0; it must be more{hint}"
            elif math.isinf(value) and is_time and not (is_rate or each.name in _ENDLESS):
                yield f"{where}{name} is infinite; give a time that ends"
            elif each.name in _SHARES and value > 1:
                yield f"{where}{name} is {value:g}; it is a share, from 0 to 1"
    if not 0 < scenario.overhead_budget < 1:
        yield f"overhead_budget is {scenario.overhead_budget:g}; it is a share between 0 and 1"
    spares = scenario.nodes.spares
    if not (math.isinf(spares) or spares == int(spares)):
        yield f"[nodes] spares is {spares:g}; give a whole number"
    if scenario.nodes.bad_factor < 1:
        factor = scenario.nodes.bad_factor
        yield f"[nodes] bad_factor is {factor:g}; it must be 1 or more"
