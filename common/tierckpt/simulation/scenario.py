"""Scenario: the description of a simulated job, its TOML file, and examples to start from.

In a scenario, times are in seconds, and rates are given as mean times between failures of *one*
unit (a rank, a node, a rack, the store). Infinite means never. `check` refuses values that make no
sense. All but reading a file is pure.

A file has times and sizes as people write them. A key has no unit in its name: the value has one
(`step = "1.5s"`, `state = "201MB"`). Values given on the command line replace those of the file,
and these replace those measured from events. `tierckpt simulate --example NAME` prints an example.
"""

from __future__ import annotations

import math
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from tierckpt._text import bytes_of, near_names, question, seconds_of
from tierckpt.errors import ConfigError

LEVELS = ("memory", "local", "peer", "persistent")
"""The cheapest to restore from first."""
POLICIES = ("young", "daly", "best", "budget")
NEVER = math.inf


class Job(Struct, frozen=True):
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


class Failures(Struct, frozen=True):
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
    """Failures also hit a restarting job."""


class Nodes(Struct, frozen=True):
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


class Bandwidth(Struct, frozen=True):
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


class Restart(Struct, frozen=True):
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


class Constant(Struct, frozen=True):
    """Checkpoints as two constants, as other models have them. No level is simulated and no work is
    lost: both numbers contain it."""

    recovery_seconds: float
    overhead_share: float = 0.0
    """Time of checkpoints, as a share of the training's time."""


class Level(Struct, frozen=True):
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


class Scenario(Struct, frozen=True):
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
    own = (name for name in failures.__struct_fields__ if name.split("_")[0] in _UNITS)
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
    tables: list[tuple[str, Struct | None]] = [("", scenario)]
    names = ("job", "failures", "nodes", "bandwidth", "restart", "constant")
    tables += [(f"[{name}] ", getattr(scenario, name)) for name in names]
    tables += [(f"[levels.{level.name}] ", level) for level in scenario.levels]
    for where, table in tables:
        for each, value in (asdict(table) if table is not None else {}).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            name = each.removesuffix("_seconds").removesuffix("_bytes")
            is_rate = each.endswith("_every_seconds")
            is_time = each.endswith("_seconds")
            if math.isnan(value) or value < 0:
                yield f"{where}{name} is {value:g}; it must not be negative"
            elif value == 0 and (each in _POSITIVE or is_rate):
                hint = '; for no failures leave it out, or write "inf"' if is_rate else ""
                yield f"{where}{name} is 0; it must be more{hint}"
            elif math.isinf(value) and is_time and not (is_rate or each in _ENDLESS):
                yield f"{where}{name} is infinite; give a time that ends"
            elif each in _SHARES and value > 1:
                yield f"{where}{name} is {value:g}; it is a share, from 0 to 1"
    if not 0 < scenario.overhead_budget < 1:
        yield f"overhead_budget is {scenario.overhead_budget:g}; it is a share between 0 and 1"
    spares = scenario.nodes.spares
    if not (math.isinf(spares) or spares == int(spares)):
        yield f"[nodes] spares is {spares:g}; give a whole number"
    if scenario.nodes.bad_factor < 1:
        factor = scenario.nodes.bad_factor
        yield f"[nodes] bad_factor is {factor:g}; it must be 1 or more"


TABLES: dict[str, type] = {
    "job": Job,
    "failures": Failures,
    "nodes": Nodes,
    "bandwidth": Bandwidth,
    "restart": Restart,
    "constant": Constant,
}
TOP = ("replicas", "seed", "overhead_budget")
CHOICES = {
    "readers": ("shards", "nodes", "ranks"),
    "domain": ("node", "rack"),
}
RIVALS = (
    ({"every"}, {"every_steps"}),
    ({"job_every", "node_share"}, {"process_every", "reboot_every", "node_every", "rack_every"}),
)
"""Keys of one table that replace each other: the interval of a level, and the rates of failures."""

Tree = dict[str, Any]


def read_tree(path: Path) -> Tree:
    """The tables of a file. Raises ConfigError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no file {path}; `tierckpt simulate --example > {path}` writes one to start "
            "from"
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the scenario {path}: {error}") from error


def merge_trees(*trees: Mapping[str, Any]) -> Tree:
    """The tables with the values of all; later ones win, also over their rivals (see RIVALS)."""
    merged: Tree = {}
    for tree in trees:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                before = merged.get(key, {})
                if not isinstance(before, Mapping):
                    raise ConfigError(f"{key} is a value and a table; it can be one of them")
                merged[key] = merge_trees(_without_rivals(before, value), value)
            else:
                merged[key] = value
    return merged


def _without_rivals(before: Mapping[str, Any], value: Mapping[str, Any]) -> Tree:
    replaced: set[str] = set()
    for ones, others in RIVALS:
        replaced |= others if ones & value.keys() else set()
        replaced |= ones if others & value.keys() else set()
    return {key: each for key, each in before.items() if key not in replaced}


def assignments(texts: Iterable[str]) -> Tree:
    """The tables that `--set TABLE.KEY=VALUE` describes. Raises ConfigError."""
    found: Tree = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {text}: write a name and a value, such as job.ranks=1024")
        found = merge_trees(found, assignment(name, value))
    return found


def assignment(name: str, text: str) -> Tree:
    """The table for one value given as text."""
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text
    tree: Any = value
    for part in reversed(name.strip().split(".")):
        tree = {part: tree}
    return dict(tree)


def scenario_of(tree: Mapping[str, Any], source: str) -> Scenario:
    """The checked scenario. Raises ConfigError that names the key, and `source`."""
    try:
        scenario = _build(tree)
        check(scenario)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return scenario


def _build(tree: Mapping[str, Any]) -> Scenario:
    given: Tree = {}
    for key, value in tree.items():
        if key == "levels":
            given["levels"] = _levels(value)
        elif key in TABLES:
            given[key] = TABLES[key](**_arguments(TABLES[key], value, f"[{key}]"))
        elif key in TOP:
            given[key] = _convert(Scenario, key, value, "")
        else:
            _refuse(key, "", (*TABLES, "levels", *TOP))
    scenario = Scenario(**given)
    _check_given(tree.get("job", {}), scenario.levels)
    return scenario


def _check_given(job: Mapping[str, Any], levels: Iterable[Level]) -> None:
    """Refuse levels without the figures that their costs follow from."""
    for level in levels:
        if "step" not in job:
            raise ConfigError('[job] has no step; give its duration, such as step = "1.5s"')
        named = {"write": level.write_seconds, "restore": level.restore_seconds}
        unknown = [name for name, seconds in named.items() if seconds is None]
        if unknown and "state" not in job:
            raise ConfigError(
                f"[levels.{level.name}] has no {' and no '.join(unknown)}, and [job] no state to "
                'compute it from; give state = "14GB", the size of one copy'
            )


def _levels(value: object) -> tuple[Level, ...]:
    if not isinstance(value, Mapping):
        raise ConfigError("levels is not a table; write [levels.memory] and so on")
    for name in value:
        if name not in LEVELS:
            _refuse(name, "[levels]", LEVELS)
    found = []
    for name in LEVELS:
        if name in value:
            arguments = _arguments(Level, value[name], f"[levels.{name}]")
            found.append(Level(name, **arguments))
    return tuple(found)


def _arguments(kind: type[Struct], value: object, where: str) -> Tree:
    """The arguments of a record from a table of the file."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is not a table")
    keys = {
        name.removesuffix("_seconds").removesuffix("_bytes"): name
        for name in kind.__struct_fields__
    }
    if kind is Level:
        del keys["name"], keys["policy"]
    if kind is Constant and "recovery" not in value:
        raise ConfigError('[constant] has no recovery; give recovery = "20m"')
    found: Tree = {}
    for key, each in value.items():
        if key not in keys:
            _refuse(key, where, keys)
        if kind is Level and key == "every" and each in POLICIES:
            found["policy"] = each
        else:
            found[keys[key]] = _convert(kind, keys[key], each, f"{where} ")
    return found


def _refuse(key: str, where: str, known: Iterable[str]) -> typing.NoReturn:
    known = [*known]
    hint = question(near_names(key, known))
    raise ConfigError(
        f"{where}{' has an' if where else 'there is an'} unknown key {key}; {hint}"
        f"Valid ones: {', '.join(known)}"
    )


def _convert(kind: type, name: str, value: object, where: str) -> object:
    """A value in the type of its field."""
    shown = name.removesuffix("_seconds").removesuffix("_bytes")
    wanted = typing.get_type_hints(kind)[name]
    try:
        if name == "at_seconds":
            return _times(value)
        if name.endswith("_seconds"):
            return _every(value) if name == "every_seconds" else _time(value)
        if name.endswith("_bytes"):
            return bytes_of(value)
    except ConfigError as error:
        raise ConfigError(f"{where}{shown}: {error}") from None
    if name in CHOICES and value not in CHOICES[name]:
        raise ConfigError(f"{where}{shown} is {value!r}; valid: {', '.join(CHOICES[name])}")
    if wanted is float and value == "inf":
        return float("inf")
    accepted = (int, float) if wanted is float else wanted
    if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ConfigError(f"{where}{shown} is {value!r}; give {words[wanted]}")
    return value


def _time(value: object) -> float:
    """A time with its unit, without which 200 could be milliseconds or seconds."""
    seconds = seconds_of(value)
    if seconds and math.isfinite(seconds) and not str(value).strip()[-1].isalpha():
        raise ConfigError(f"{value!r} has no unit; write for example '{value}s' or '{value}ms'")
    return seconds


def _times(value: object) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{value!r} is not a list of times; write for example ['90m', '3h']")
    found = tuple(_time(each) for each in value)
    if found and not 0 <= min(found) <= max(found) < math.inf:
        raise ConfigError(f"{value!r} has a time that is negative or infinite")
    return found


def _every(value: object) -> float:
    try:
        return _time(value)
    except ConfigError as error:
        raise ConfigError(f"{error}, or one of {', '.join(POLICIES)}") from None


EXAMPLES = {
    "cluster": """\
# 128 ranks on 16 nodes, all four levels.
# Times: 20ms, 1.5s, 3m, 8h, 2d, 1y. Sizes: 201MB, 1.5GB, 64GiB.
replicas = 10
seed = 1

[job]
ranks = 128
ranks_per_node = 8
step = "1s"
state = "14GB"              # parameters and optimizer, one copy
length = "90d"              # wall time to simulate

# Mean times between failures of ONE rank or node. Left out: never.
[failures]
process_every = "1y"        # the process dies, the memory of its node survives
reboot_every = "2y"         # the node loses its memory and keeps its disk
node_every = "1y"           # the node is lost with its memory and its disk
store_out_every = "60d"     # the store of all nodes does not answer
store_out = "1h"

[nodes]
spares = 1
repair = "2d"

[restart]
notice = "5s"
start = "40s"               # processes, imports, rendezvous, first step
warm_start = "3s"           # the same under `tierckpt run`, after the failure of a process
node = "2m"                 # until a spare has taken the place of a lost node

[bandwidth]
disk = "2GB"                # bytes a second, of one node
network = "5GB"             # of one node
store = "5GB"               # of the store, all nodes together

[levels.memory]
every_steps = 1
cost = "2ms"                # time that a version here adds to the training
[levels.local]
every = "60s"
cost = "20ms"
[levels.peer]
scheme = "xor"              # or "partner", "partner 2", "rs 4+2"
[levels.persistent]
every = "10m"               # or "young", "daly", "best" (of all levels together), "budget"
cost = "20ms"
""",
    "llama3": """\
# A job of the size of Llama 3 405B's: 16,384 GPUs, and 419 unexpected interruptions in 54 days
# (A. Dubey et al., 2024), of which 258 by parts of a node that had to be replaced.
replicas = 10
seed = 1

[job]
ranks = 16384
ranks_per_node = 8
step = "5s"
state = "5.7TB"             # 405 billion parameters, 14 bytes each
node_state = "356GB"        # a sixteenth; left out: a node needs all, as in data-parallel jobs
length = "54d"

[failures]
process_every = "5495d"     # 161 in 54 days, of 16,384 ranks
node_every = "429d"         # 258 in 54 days, of 2,048 nodes
store_out_every = "30d"
store_out = "30m"

[nodes]
spares = 32
repair = "2d"

[restart]
notice = "30s"
start = "3m"
warm_start = "20s"
node = "2m"

[bandwidth]
disk = "4GB"
network = "50GB"
store = "2TB"

[levels.memory]
every_steps = 1
cost = "10ms"
[levels.local]
every = "60s"
cost = "50ms"
[levels.peer]
scheme = "rs 4+2"
[levels.persistent]
every = "10m"
cost = "50ms"
""",
    "torch-save": """\
# Rank 0 writes everything with torch.save, all others wait, every rank reads the file.
replicas = 10
seed = 1

[job]
ranks = 128
ranks_per_node = 8
step = "1s"
state = "14GB"
length = "90d"

[failures]
process_every = "1y"
reboot_every = "2y"
node_every = "1y"

[restart]
notice = "30s"              # the launcher's
start = "40s"
node = "2m"

[bandwidth]
network = "1.5GB"           # what one rank writes: serialization, one stream
store = "5GB"

[levels.persistent]
every = "daly"
blocking = true
writers = 1
readers = "ranks"
""",
    "spot": """\
# 8 spot machines that are taken away once a day each, without local disks that survive.
replicas = 20
seed = 1

[job]
ranks = 64
ranks_per_node = 8
step = "500ms"
state = "6GB"
length = "14d"

[failures]
node_every = "1d"
process_every = "180d"

[restart]
notice = "5s"
start = "40s"
warm_start = "3s"
node = "90s"                # until another machine has joined

[bandwidth]
network = "3GB"
store = "10GB"

[levels.memory]
every_steps = 1
cost = "2ms"
[levels.local]
every = "15s"
cost = "20ms"
[levels.peer]
scheme = "partner"
[levels.persistent]
every = "best"
cost = "20ms"
""",
    "constant": """\
# No levels: a recovery takes a constant time and loses no work, as in other models.
replicas = 10

[job]
ranks = 4096
ranks_per_node = 1
length = "inf"
work = "256d"

[failures]
node_every = "100d"
during_restart = false

[nodes]
spares = 264
repair = "40.4h"
bad_share = 0.15            # these fail bad_factor times as often, until a repair cures them
bad_factor = 6
repair_cures = 0.76

[constant]
recovery = "20m"
""",
}
