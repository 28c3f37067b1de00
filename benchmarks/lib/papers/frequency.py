"""Visits to a method's checkpoints at several intervals."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from lib import figures
from lib.figures import wall_seconds
from lib.files import SHARED_MEMORY, temporary
from lib.models import OF_PAPERS
from lib.papers.results import Row
from lib.training.teams import Team, measure_visit, training

MIN_STEPS = 6
"""Steps with checkpoints in a visit at least."""


@contextmanager
def attached(
    options: Namespace, method: str, model: str, launcher: str = "torchrun", world: int = 2
) -> Iterator[Frequency]:
    """A team that trains a model of the papers, with a method attached and its buffers warm."""
    with temporary(options.dir) as disk, temporary(SHARED_MEMORY) as memory:
        name = OF_PAPERS + model
        with training(method, name, disk, memory, launcher, world, 1, options.timeout) as team:
            team.command("keep_freed")
            team.command("attach")
            frequency = Frequency(team, options.rounds)
            frequency.at(1, rounds=1, checkpoints=2)  # buffers, files and page tables
            yield frequency


class Frequency:
    """One method's team, and its visits at several intervals."""

    def __init__(self, team: Team, rounds: int) -> None:
        self.team, self.rounds = team, rounds

    def at(self, every: int, rounds: int | None = None, checkpoints: int | None = None) -> Row:
        """Measure checkpoints at this interval. `lib.papers.rule` makes a cost of the visits; their
        overhead counts all steps; shares are fractions of a plain step."""
        steps = (checkpoints or max(2, MIN_STEPS // every)) * every
        visits = [
            measure_visit(self.team, self.team, steps, every) for _ in range(rounds or self.rounds)
        ]
        plain = [figures.plain_step(visit, wall_seconds) for visit in visits]
        merged = [each for visit in visits for each in figures.merge(visit["checkpoints"])]
        return {
            "state_bytes": self.team.state_bytes,
            "every": every,
            "step_seconds": median(plain),
            "visits": [
                {
                    "total_overhead": wall_seconds(visit["checkpoints"]) / (steps * step) - 1,
                    "cpu_share": figures.direct_cpu_share(visit),
                    "others_cores": figures.noise(visit),
                    "step_seconds": step,
                    "step_cpu_seconds": figures.step_cpu(visit),
                }
                for visit, step in zip(visits, plain, strict=True)
            ],
            "due": len(merged),
            "taken": sum("durable" in each for each in merged),
            "durable_seconds": _median(each.get("durable") for each in merged),
            "phases": _phases(merged),
        }


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


def _phases(merged: list[dict[str, Any]]) -> dict[str, float]:
    names = sorted({name for each in merged for name in each["phases"]})
    return {
        name: median(each["phases"][name] for each in merged if name in each["phases"])
        for name in names
    }
