"""The simulator beside the rows of goodput.py: the same kills at the same times, simulated."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tierckpt.simulation.course import simulate
from tierckpt.simulation.scenario import Failures, Job, Level, Restart, Scenario

DURABLE_SECONDS = {"dcp-thread": 0.45}
"""Time until a version counts, for methods that write during later steps."""
MEMORY = ("ours", "ours-run", "ours-torchrun")
"""Methods with a version complete one step later."""


@dataclass(frozen=True)
class Row:
    """One row of a results file, and its simulation."""

    method: str
    mtbf_seconds: float
    measured: float
    """Goodput, as in the file."""
    simulated: float
    """Goodput at the pace of the run itself."""
    resolution_points: float
    """What one version more or less is worth."""

    @property
    def points(self) -> float:
        """Difference in points of goodput."""
        return 100 * (self.simulated - self.measured)


def rows(path: Path) -> Iterator[Row]:
    """Simulate every row of a results file of goodput.py that has failures."""
    document = json.loads(path.read_text())
    for row in document["rows"]:
        if row["status"] == "ok" and row["failures"]:
            yield _row(row, document["settings"]["seed"])


def _row(row: dict[str, Any], seed: int) -> Row:
    wall, step = row["wall_seconds"], row["step_seconds"]
    kills = _arrivals(row["failures"] * row["mtbf_seconds"], row["failures"], seed)
    restart, away = _restarts(kills, row["back_seconds"], wall)
    stall = row["cost_seconds"] / row["every_steps"]
    # The first step after a failure is a part of its `back_seconds`.
    own = (wall - away) / (row["made_steps"] - len(row["back_seconds"]))
    useful = _useful_steps(row, kills, own - stall, restart - own)
    return Row(
        row["method"],
        row["mtbf_seconds"],
        row["goodput"],
        useful * step / wall,
        100 * row["every_steps"] * step / wall,
    )


def _useful_steps(
    row: dict[str, Any], kills: Sequence[float], step_seconds: float, restart_seconds: float
) -> float:
    """Steps that count at the end of the same time, with the same kills."""
    method = row["method"]
    latency = step_seconds if method in MEMORY else DURABLE_SECONDS.get(method, 0.0)
    level = Level(
        "local",
        every_steps=row["every_steps"],
        cost_seconds=row["cost_seconds"],
        write_seconds=latency,
        restore_seconds=0.0,
    )
    scenario = Scenario(
        job=Job(
            ranks=2, ranks_per_node=2, step_seconds=step_seconds, length_seconds=row["wall_seconds"]
        ),
        failures=Failures(at_seconds=tuple(kills)),
        restart=Restart(0.0, max(0.0, restart_seconds), first_start_seconds=0.0),
        levels=(level,),
        replicas=1,
    )
    (outcome,) = simulate(scenario).outcomes
    return outcome.version


def _arrivals(window_seconds: float, count: int, seed: int) -> list[float]:
    """Times of the kills, as goodput.py draws them."""
    chance = random.Random(seed)
    return sorted(chance.uniform(0, window_seconds) for _ in range(count))


def _restarts(
    kills: Sequence[float], back_seconds: Sequence[float], wall_seconds: float
) -> tuple[float, float]:
    """Mean duration of a restart that was not hit by the next kill, and the time away in all."""
    ends = [kill + back for kill, back in zip(kills, back_seconds, strict=False)]
    limits = [*kills[1 : len(ends)], wall_seconds]
    whole = [
        back for back, end, limit in zip(back_seconds, ends, limits, strict=False) if end <= limit
    ]
    away, until = 0.0, 0.0
    for kill, end in zip(kills, ends, strict=False):
        away += max(0.0, end - max(kill, until))
        until = max(until, end)
    return fmean(whole or back_seconds), away
