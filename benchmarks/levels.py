"""How fast are the levels below memory, and how much do they slow the training?

    python benchmarks/levels.py --toy
    python benchmarks/levels.py --json levels.json

Six processes stand for nodes; each does an agent's work with the agent's code and priority. As
root each has a network namespace and a cable of 100 Mbit/s each way, else
loopback. Two ranks train on the same cores. Parity goes to memory, since these nodes would share
one disk.

seconds        of a version's work, while the training is idle
bare_seconds   the same bytes without Tierckpt: an O_DIRECT write over an existing file; a read of
               one file and a write of a new one without the page cache; plain sockets, from each
               node to the next at the same time
of_bare        bare time over Tierckpt's, of each round
cpu_s          CPU time of all node processes, with the kernel's network work
slowdown       excess time of the training's steps while the level works, as a share
overlap        as in the OSU micro-benchmarks: 1 - (time of both together - time of computing alone)
               / time of the level alone; computing takes about as long as the level
bare_overlap   overlap of the bare bytes on the cables: the limit, as the training's cores also
               shape the cables and serve the sockets

*all_levels* trains two ranks, each a node and the other's partner; every 32nd version
goes to all levels, and plain steps before and after are the comparison. docs/figures.md has the
targets.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from lib import machine
from lib.figures import wall_seconds
from lib.files import SHARED_MEMORY, clean_up_when_terminated, temporary
from lib.levels.figures import Block, Row, Sample, Work, all_levels
from lib.levels.nodes import LEVELS, Level, NodeError, Nodes, Orders, Place
from lib.methods.method import Method
from lib.methods.ours import OursLevels
from lib.report import publish, table
from lib.terminal import parser_of, say
from lib.training.teams import TeamError, measure_visit, training

MIN_STEPS = 4
"""Timed steps next to the work of a level; shorter work is repeated to take as long."""
LINK_BITS_PER_SECOND = 100_000_000
"""Of each node's cable, each way."""
EVERY = 32
"""Steps between two versions to all levels."""
UNTIMED_STEPS = 2
"""Steps of a block without a clock: one to warm up, one to settle."""


@dataclass(frozen=True)
class Cadence:
    """Repetitions of a level's work, and steps of training, that take about equally long."""

    repeat: int
    steps: int


class Bench:
    """The nodes, and a training next to them."""

    def __init__(
        self, model: str, nbytes: int, levels: Sequence[Level], place: Place, stack: ExitStack
    ) -> None:
        """Start nodes with shards of so many bytes, and the training; closing `stack` ends them."""
        count = max(level.nodes for level in levels)
        nodes = Nodes(count, nbytes, place, LINK_BITS_PER_SECOND / 8)
        self.nodes = stack.enter_context(closing(nodes))
        self.team = stack.enter_context(training(Method.name, model, place.disk, place.memory))
        self.rows = {
            level: Row(
                level.name,
                level.nodes,
                level.nodes * nbytes,
                linked=level.code is not None and nodes.limited,
            )
            for level in levels
        }
        self._cadence: dict[Level, Cadence] = {}

    def calibrate(self) -> None:
        """Choose the cadence of each level. Also warms everything up before the rounds."""
        self.team.block(MIN_STEPS, checkpoints=False)
        steps = 2 * MIN_STEPS
        step_s = wall_seconds(self.team.block(steps, checkpoints=False)) / steps
        for level in self.rows:
            self.nodes.do(level.orders(self.nodes, 1))
            alone_s = self.nodes.do(level.orders(self.nodes, 1)).span_s
            repeat = max(1, round((MIN_STEPS + UNTIMED_STEPS) * step_s / alone_s))
            steps = max(MIN_STEPS, round(repeat * alone_s / step_s) - UNTIMED_STEPS)
            self._cadence[level] = Cadence(repeat, steps)
            say(f"{level.name}: {alone_s:.2f} s, {repeat} times during {steps} steps")

    def round(self) -> None:
        """Measure each level once."""
        for level, row in self.rows.items():
            row.samples.append(self._sample(level))

    def _sample(self, level: Level) -> Sample:
        """Measure the level alone, its bare bytes, and the level next to the training.

        Plain steps are timed before and after. For a level that uses the cables, bare sockets next
        to the training give the limit.
        """
        cadence, nodes = self._cadence[level], self.nodes
        orders = level.orders(nodes, cadence.repeat)
        alone = nodes.do(orders)
        bare_orders = level.bare(nodes, cadence.repeat, alone)
        bare = nodes.do(bare_orders)
        before, before_s = self._train(cadence.steps)
        beside, overall_s = self._train_beside(orders, cadence.steps)
        bare_overall_s = None
        if level.code:
            _, bare_overall_s = self._train_beside(bare_orders, cadence.steps)
        after, after_s = self._train(cadence.steps)
        return Sample(
            Work(alone.seconds, alone.span_s, alone.cpu_s),
            Work(bare.seconds, bare.span_s, bare.cpu_s),
            compute_s=mean((before_s, after_s)),
            overall_s=overall_s,
            bare_overall_s=bare_overall_s,
            plain_s=mean(map(wall_seconds, (before, after))),
            beside_s=wall_seconds(beside),
            others=max(block["others"] for block in (before, after)),
        )

    def _train_beside(self, orders: Orders, steps: int) -> tuple[Block, float]:
        """Train a block of plain steps while the nodes work; return it and the time of both."""
        begin = time.perf_counter()
        wait = self.nodes.begin(orders)
        block, _ = self._train(steps)
        wait()
        return block, time.perf_counter() - begin

    def _train(self, steps: int) -> tuple[Block, float]:
        """Train a block of plain steps; return it and its whole time."""
        begin = time.perf_counter()
        block = self.team.block(steps, checkpoints=False)
        return block, time.perf_counter() - begin


def measure(toy: bool, rounds: int, place: Place) -> dict[str, Any]:
    """Run everything. No process survives, however it ends."""
    model, nbytes = ("toy", 4 << 20) if toy else ("linear", 64 << 20)
    with ExitStack() as stack:
        say("starting nodes and trainings")
        bench = Bench(model, nbytes, LEVELS, place, stack)
        ours = training(OursLevels.name, model, place.disk, place.memory, every=EVERY)
        team, visits = stack.enter_context(ours), []
        team.command("attach")
        bench.calibrate()
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            bench.round()
            visits.append(measure_visit(team, team, 2 * EVERY))
        return {
            "shard_bytes": nbytes,
            "link_bits_per_second": LINK_BITS_PER_SECOND,
            "no_network": bench.nodes.no_network,
            "state_bytes": team.state_bytes,
            "levels": [
                asdict(row)
                | {name: found and asdict(found) for name, found in row.figures().items()}
                for row in bench.rows.values()
            ],
            "all_levels": all_levels(visits, EVERY),
        }


def main() -> None:
    parser = parser_of(
        __doc__,
        toy="4 MiB shards, some 20 seconds",
        place="folder on the disk to measure, must exist",
    )
    parser.add_argument("--rounds", type=int, help="turns of everything; default 5, toy 1")
    options = parser.parse_args()
    clean_up_when_terminated()
    parent = options.dir or machine.scratch_parent()
    with temporary(parent) as disk, temporary(SHARED_MEMORY) as memory:
        place = Place(disk, memory, str(disk / "persistent"))
        about = machine.description(disk)
        try:
            found = measure(options.toy, options.rounds or (1 if options.toy else 5), place)
        except (TeamError, NodeError) as error:
            sys.exit(f"not measured: {error}")
        publish(options.json, about, **found)
        print(f"\nall levels\n{table([found['all_levels']])}")


if __name__ == "__main__":
    main()
