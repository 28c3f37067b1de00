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

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from lib import machine
from lib.figures import spread, wall_seconds
from lib.files import SHARED_MEMORY, clean_up_when_terminated, temporary
from lib.methods.ours import NEVER, OursAuto
from lib.report import publish
from lib.terminal import parser_of, say
from lib.training.teams import Team, TeamError, training

LEVELS = ("memory", "local", "persistent")
WAKE_STEPS, MAX_WAKE_STEPS = 10, 2000
"""Steps made at a time until the work of a block is done, and the limit of such steps."""
LIMIT_SECONDS = 600.0
"""For one block."""
SLOW_BYTES = 20e6
"""Bytes per second and node to a slow persistent level."""


@contextmanager
def environment(budget: float, slow: bool) -> Iterator[None]:
    """Set the environment variables of ranks that are started inside the block."""
    before = dict(os.environ)
    os.environ["TIERCKPT_OVERHEAD_BUDGET"] = str(budget)
    if slow:
        os.environ["TIERCKPT_PERSISTENT_BYTES_PER_SECOND"] = str(SLOW_BYTES)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(team: Team, folder: Path, learning: int, steps: int, rounds: int) -> dict[str, Any]:
    """The figures of a budget.

    The same processes make the plain steps, with a loop that calls no boundary: two trainings that
    do the same work differ by more than a budget. While work of a block is still under way,
    plain steps are in the wake of the block: their extra time is charged to the block.
    """
    team.command("attach")
    team.block(learning, checkpoints=True)
    _wake(team)
    before, overheads, wakes = _taken(folder), [], []
    for number in range(rounds):
        plain_seconds = _plain(team, steps)
        seconds = wall_seconds(team.block(steps, checkpoints=True))
        more, wake = _wake(team)
        step_seconds = mean((plain_seconds, _plain(team, steps)))
        overheads.append((seconds + more) / (steps * step_seconds) - 1 - wake / steps)
        wakes.append(wake)
        say(f"  round {number + 1}, {100 * overheads[-1]:.1f} %")
    counts = {level: count - before[level] for level, count in _taken(folder).items()}
    return {
        "overhead": asdict(spread(overheads)),
        "each_steps": {
            level: rounds * steps / count if count else None for level, count in counts.items()
        },
        "wake_steps": mean(wakes),
    }


def _plain(team: Team, steps: int) -> float:
    """Seconds of a plain step while nothing else is at work. Half as many steps as a block has,
    called once before the block and once after it."""
    half = (steps + 1) // 2
    return wall_seconds(team.block(half, checkpoints=False)) / half


def _wake(team: Team) -> tuple[float, int]:
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
    chosen = [(budget, False) for budget in budgets[: 1 if options.toy else None]]
    chosen += [] if options.toy else [(budgets[len(budgets) // 2], True)]
    model, learning, steps = ("toy", 40, 40) if options.toy else ("linear", 300, 100)
    rounds = options.rounds or (1 if options.toy else 8)
    clean_up_when_terminated()
    parent = options.dir or machine.scratch_parent()
    about, cases, name = machine.description(parent), [], OursAuto.name
    for budget, slow in chosen:
        say(f"{budget}: {learning} steps to learn")
        with (
            temporary(parent) as disk,
            temporary(SHARED_MEMORY) as memory,
            environment(budget, slow),
            training(name, model, disk, memory, every=NEVER, limit_s=LIMIT_SECONDS) as team,
        ):
            found = measure(team, disk / name, learning, steps, rounds)
        cases.append({"budget": budget, "slow": slow, **found})
    publish(options.json, about, cases=cases)


if __name__ == "__main__":
    main()
