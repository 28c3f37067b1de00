"""Does `every_steps="auto"` hold its budget, and how often does it take versions?

    python benchmarks/budget.py --toy
    python benchmarks/budget.py --json budget.json

Two ranks train with automatic intervals on memory, local and persistent. The same processes make
plain steps with a loop that calls no boundary: half of them before a block, half after all its
work is done. Steps until then are in the block's wake, and their extra time is charged to the
block. The first steps, to learn, do not count. In the last case the persistent level takes 20
MB/s a node.

overhead     excess time of a block's steps and wake, as a share: over the rounds, and its 95 %
             confidence interval; a budget not below it is held
wake_steps   mean number of steps in the wake
each_steps   steps for each version by level, in the counted rounds
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

from lib import machine
from lib.figures import Spread, spread, wall_seconds
from lib.files import SHARED_MEMORY, clean_up_when_terminated, temporary
from lib.methods.ours import OursAuto
from lib.report import publish
from lib.terminal import parser_of, say
from lib.training.teams import Team, TeamError, training

LEVELS = ("memory", "local", "persistent")
WAKE_STEPS, MAX_WAKE_STEPS = 10, 2000
"""Steps made at a time until the work of a block is done, and the limit of such steps."""
SLOW_BYTES = 20e6
"""Bytes per second and node to a slow persistent level."""


@dataclass
class Case:
    """One budget, to a fast or a slow persistent level.

    overhead: how much longer the steps of a block and of its wake take than plain steps before and
    after, as a fraction of the block; one sample a round. each_steps: steps per version, by level,
    over all rounds; None: no version was taken. wake_steps: the mean length of the wake.
    """

    budget: float
    slow: bool
    overhead: Spread | None = None
    each_steps: dict[str, float | None] = field(default_factory=dict)
    wake_steps: float = 0.0


@contextmanager
def environment(case: Case) -> Iterator[None]:
    """Set the environment variables of ranks that are started inside the block."""
    variables = {"TIERCKPT_OVERHEAD_BUDGET": str(case.budget)}
    if case.slow:
        variables["TIERCKPT_PERSISTENT_BYTES_PER_SECOND"] = str(SLOW_BYTES)
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Bench:
    """A training for each case, one after the other.

    The same processes make the plain steps, with a loop that calls no boundary: two trainings that
    do the same work differ by more than a budget. While work of a block is still under way,
    plain steps are in the wake of the block: their extra time is charged to the block.
    """

    def __init__(self, options: argparse.Namespace, disk: Path, memory: Path) -> None:
        self.options, self.disk, self.memory = options, disk, memory

    def measure(self, cases: list[Case]) -> int:
        """Fill in the figures; returns the bytes of the training's state."""
        state_bytes = 0
        for number, case in enumerate(cases):
            say(f"{case.budget}: {self.options.learning} steps to learn")
            disk, memory = (each / f"case{number}" for each in (self.disk, self.memory))
            disk.mkdir()
            memory.mkdir()
            name, never = OursAuto.name, 1_000_000_000
            with (
                environment(case),
                training(name, self.options.model, disk, memory, every=never, limit_s=600) as team,
            ):
                state_bytes = team.state_bytes
                self._visit(case, team, disk / name)
        return state_bytes

    def _visit(self, case: Case, team: Team, folder: Path) -> None:
        steps = self.options.steps
        team.command("attach")
        team.block(self.options.learning, checkpoints=True)
        self._wake(team)
        before, overheads, wakes = _taken(folder), [], []
        for number in range(self.options.rounds):
            before_seconds = self._plain(team)
            seconds = wall_seconds(team.block(steps, checkpoints=True))
            more, wake = self._wake(team)
            step_seconds = mean((before_seconds, self._plain(team)))
            overheads.append((seconds + more) / (steps * step_seconds) - 1 - wake / steps)
            wakes.append(wake)
            say(f"{case.budget}: round {number + 1}, {100 * overheads[-1]:.1f} %")
        case.overhead, case.wake_steps = spread(overheads), mean(wakes)
        for level in LEVELS:
            count = _taken(folder)[level] - before[level]
            case.each_steps[level] = self.options.rounds * steps / count if count else None

    def _plain(self, team: Team) -> float:
        """Seconds of a plain step while nothing else is at work. Half as many steps as a block has,
        called once before the block and once after it."""
        steps = (self.options.steps + 1) // 2
        return wall_seconds(team.block(steps, checkpoints=False)) / steps

    def _wake(self, team: Team) -> tuple[float, int]:
        """Train until all work of the block is done; return the seconds and the steps of that."""
        seconds, steps = 0.0, 0
        while any(team.command("busy")):
            if steps == MAX_WAKE_STEPS:
                raise TeamError(f"still at work after {steps} steps that began nothing")
            seconds += wall_seconds(team.block(WAKE_STEPS, checkpoints=False))
            steps += WAKE_STEPS
        return seconds, steps


def _taken(folder: Path) -> dict[str, float]:
    """Versions that each level has received so far, by the events of the ranks."""
    counts = [json.loads(path.read_text()) for path in sorted(folder.glob("taken*.json"))]
    return {level: mean(each.get(level, 0) for each in counts) for level in LEVELS}


def main() -> None:
    parser = parser_of(
        __doc__,
        toy="1.5 MB of state, one budget",
        place="folder on the disk to measure, must exist",
    )
    parser.add_argument("--budgets", default="0.01,0.03,0.1", help="fractions of the time")
    parser.add_argument("--rounds", type=int, help="default 8, toy 1")
    options = parser.parse_args()
    budgets = [float(each) for each in options.budgets.split(",")]
    cases = [Case(budget, slow=False) for budget in budgets[: 1 if options.toy else None]]
    if not options.toy:
        cases.append(Case(budgets[len(budgets) // 2], slow=True))
    options.model = "toy" if options.toy else "linear"
    options.learning, options.steps = (40, 40) if options.toy else (300, 100)
    options.rounds = options.rounds or (1 if options.toy else 8)
    clean_up_when_terminated()
    parent = options.dir or machine.scratch_parent()
    with temporary(parent) as disk, temporary(SHARED_MEMORY) as memory:
        about = machine.description(disk)
        try:
            state_bytes = Bench(options, disk, memory).measure(cases)
        except TeamError as error:
            sys.exit(f"not measured: {error}")
    publish(options.json, about, state_bytes=state_bytes, cases=[asdict(case) for case in cases])


if __name__ == "__main__":
    main()
