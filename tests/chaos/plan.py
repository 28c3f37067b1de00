"""The schedule of a round: kind, place and time of its faults. A pure function of the seed.

A round is one job with several runs. "When" is never a time: it is a number of versions after the
one that a run started from, or the moment between two runs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

RANKS = 4
MAX_RANKS = 6
"""Ranks of a run that only restores and is checked, see `Life.ranks`."""
LIVES = 4
"""Number of runs that end in a failure; one more goes to the end."""
AIMED = 3
"""Number of runs after which the very copy is damaged that the next run would load."""
LONGEST = 18
"""Versions that a run makes at most before it ends."""
STEPS = LIVES * LONGEST + 12
"""Steps of the whole job: the last run always has some left."""

PLACES = (
    *(f"script:phase={p},step={{}}" for p in ("begin", "forward", "backward", "optimizer")),
    "script:phase=boundary,step={}",
    "barrier:version={}",
    "copy:version={}",
    "seal:version={}",
    "sealed:version={}",
)
"""Fault points at which a trainer is killed; {} is the version, or the step that makes it."""
LOADING = ("take_inventory", "verify", "load_shard", "finish_load", "after_load")
"""The same during a restore; see `CALLS` in tests/support/crash/job.py."""
AGENTS = (
    "kill@agent:hit={}",
    "kill@file:op=write,hit={}",
    "kill@file:op=fsync,hit={}",
    "kill@file:op=rename,hit={}",
    "kill@file:op=unlink,hit={}",
    "kill@file:op=fsync_directory,hit={}",
    "kill@peer:op=meet,hit={}",
    "kill@peer:op=send,hit={}",
    "kill@peer:op=commit,hit={}",
    "enospc@file:op=write,hit={}",
    "eio@file:op=fsync,hit={}",
    "enospc@file:op=write_manifest,hit={}",
)
"""Rules for the agents that a run starts. A run that finds an agent of the previous run starts
none, unless that agent is killed."""


@dataclass(frozen=True)
class Shape:
    """Shape of a round's job."""

    nodes: tuple[int, ...]
    """The node of every rank."""
    scheme: str
    survives: int
    """Number of lost nodes that the scheme covers."""
    slots: int
    persistent: bool = True
    """True if there is a persistent level; without it, peers are the last level."""

    @property
    def node_numbers(self) -> tuple[int, ...]:
        """Every node once."""
        return tuple(dict.fromkeys(self.nodes))


APART, PAIRS, MIXED = (0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 1, 2)
SCHEMES = (
    (APART, "xor", 1),
    (APART, "partner", 1),
    (APART, "partner 2", 2),
    (APART, "rs 2+1", 1),
    (APART, "rs 2+2", 2),
    (PAIRS, "xor", 1),
    (PAIRS, "partner", 1),
    (MIXED, "xor", 1),
)


@dataclass(frozen=True)
class Fault:
    """One fault; the fields in use depend on `kind`.

    During a run, while all ranks wait before a step: `agent` (SIGKILL to a node's agent), `stop`
    and `wake` (the same agent), `fill` and `free` (a node's disk), `flip` (a bit), `truncate` (a
    file). Between two runs: `agent`, and `flip` and `truncate`, which may be aimed then. At the end
    of a run: `trainer` (one is killed), `loading` (the same during a restore), `node` and `nodes`
    (processes, memory and disk), `reboot` (a node's processes and memory), `power` (the same of all
    nodes), `allocation` (all but the persistent level).
    """

    kind: str
    at: int = 0
    """Versions after the one that the run started from."""
    rank: int = 0
    nodes: tuple[int, ...] = ()
    level: str = ""
    """`aimed`: the copy of the rank's shard that a restart would load now. `copies`: all copies of
    that shard, and all parity of its version, so that only an older version is left."""
    part: str = ""
    """`data` or `manifest` of the rank's newest version on `level`."""
    spot: float = 0.0
    """Position in the file, 0 to 1."""
    bit: int = 0
    place: str = ""
    """Point at which a trainer is killed."""


@dataclass(frozen=True)
class Life:
    """All faults of one run of the job."""

    during: tuple[Fault, ...]
    """Faults during the run, in order of `at`."""
    end: Fault | None
    """The fault that ends the run; None: it may go to the end."""
    after: tuple[Fault, ...] = ()
    """Faults before the next run."""
    agent_rule: str = ""
    """For the agent that this node's first rank starts; see AGENTS."""
    agent_rule_node: int = 0
    nodes: tuple[int, ...] = ()
    """The node of every rank: the nodes of the shape, but ranks may have changed places."""

    @property
    def ranks(self) -> int:
        """Number of ranks. A run with another number than RANKS restores, is checked, and is killed
        before its first step: there is no reference for its training."""
        return len(self.nodes)


@dataclass(frozen=True)
class Round:
    """A job, and all its runs and faults."""

    seed: int
    shape: Shape
    lives: tuple[Life, ...]


def make_round(seed: int) -> Round:
    """Make the round of a seed: the same one on every machine."""
    draw = random.Random(seed)
    nodes, scheme, survives = draw.choice(SCHEMES)
    shape = Shape(nodes, scheme, survives, draw.choice((2, 3)), draw.random() < 0.5)
    lives = []
    to_mend: list[Fault] = []
    aimed = draw.sample(range(LIVES), AIMED)
    visited = draw.randrange(1, LIVES)
    for number in range(LIVES):
        if number == visited:
            lives.append(_visit(draw, shape))
        life, to_mend = _life(draw, shape, number == 0, to_mend)
        if number in aimed:
            life = replace(life, after=(*life.after, _aimed(draw)))
        lives.append(life)
    lives.append(Life(tuple(_mending(to_mend, 1)), None, nodes=_placed(draw, shape)))
    return Round(seed, shape, tuple(lives))


def _placed(draw: random.Random, shape: Shape) -> tuple[int, ...]:
    """Nodes of a run's ranks: in one of three runs, ranks have changed places."""
    nodes = list(shape.nodes)
    if draw.random() < 1 / 3:
        draw.shuffle(nodes)
    return tuple(nodes)


def _visit(draw: random.Random, shape: Shape) -> Life:
    """A run of another size that sees the remaining files on all nodes."""
    every = shape.node_numbers
    ranks = draw.choice([n for n in range(len(every), MAX_RANKS + 1) if n != RANKS])
    nodes = [*every, *(draw.choice(every) for _ in range(ranks - len(every)))]
    draw.shuffle(nodes)
    end = Fault("trainer", 0, draw.randrange(ranks), place=PLACES[0])
    return Life((), end, nodes=tuple(nodes))


def _aimed(draw: random.Random) -> Fault:
    level = draw.choice(("aimed", "aimed", "copies"))
    return Fault(
        "flip", 0, draw.randrange(RANKS), (), level, "data", draw.random(), draw.randrange(8)
    )


def _life(
    draw: random.Random, shape: Shape, first: bool, to_mend: list[Fault]
) -> tuple[Life, list[Fault]]:
    """A run, and the damage before the next one."""
    end = _end(draw, shape, first)
    during: list[Fault] = []
    left: list[Fault] = []
    if end.kind == "loading":
        left = to_mend
    else:
        during += _mending(to_mend, 1)
        for _ in range(draw.choice((0, 0, 1, 1, 2))):
            fault = _blow(draw, shape, draw.randint(1, max(end.at - 1, 1)))
            during.append(fault)
            if fault.kind in MENDS:
                later = fault.at + draw.randint(2, 6)
                if later < end.at:
                    during += _mending([fault], later)
                else:
                    left.append(fault)
    after = [
        _damage(draw, shape)
        if draw.random() < 0.8
        else Fault("agent", nodes=(draw.choice(shape.node_numbers),))
        for _ in range(draw.choice((0, 0, 0, 1, 1, 2)))
    ]
    rule = draw.choice(AGENTS).format(draw.randint(1, 8)) if draw.random() < 0.5 else ""
    during.sort(key=lambda fault: fault.at)
    ruled = draw.choice(shape.node_numbers)
    return Life(tuple(during), end, tuple(after), rule, ruled, _placed(draw, shape)), left


MENDS = {"stop": "wake", "fill": "free"}


def _mending(faults: list[Fault], at: int) -> list[Fault]:
    return [Fault(MENDS[fault.kind], at, nodes=fault.nodes) for fault in faults]


ENDS = ("trainer",) * 8 + ("node",) * 5 + ("nodes", "reboot", "reboot", "power", "allocation")


def _end(draw: random.Random, shape: Shape, first: bool) -> Fault:
    kind = draw.choice(ENDS if first else ("loading", "loading", *ENDS))
    rank = draw.randrange(RANKS)
    if kind == "loading":
        return Fault(kind, 1, rank, place=draw.choice(LOADING))
    # Not before version 4: a restart from version 1 may round differently
    # (docs/internals/ddp.md).
    at = draw.randint(4 if first else 1, LONGEST)
    nodes: tuple[int, ...] = ()
    if kind in ("node", "nodes", "reboot"):
        nodes = (shape.nodes[rank],)
    if kind == "nodes":
        nodes += (draw.choice([n for n in shape.node_numbers if n not in nodes]),)
    return Fault(kind, at, rank, nodes, place=draw.choice(PLACES))


def _blow(draw: random.Random, shape: Shape, at: int) -> Fault:
    kind = draw.choice(("agent", "agent", "stop", "fill", "damage"))
    if kind == "damage":
        return _damage(draw, shape, at)
    return Fault(kind, at, nodes=(draw.choice(shape.node_numbers),))


def _damage(draw: random.Random, shape: Shape, at: int = 0) -> Fault:
    """Damage of one bit or of a file's end. Memory is not truncated: its pages are in use."""
    levels = ("memory", "local", "parity", "persistent")
    level = draw.choice(levels if shape.persistent else levels[:-1])
    kind = "flip" if level == "memory" else draw.choice(("flip", "flip", "truncate"))
    part = draw.choice(("data", "data", "manifest"))
    spot, bit = draw.random(), draw.randrange(8)
    return Fault(kind, at, draw.randrange(RANKS), (), level, part, spot, bit)
