"""Visits to a method's checkpoints at several intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from lib import figures
from lib.figures import wall_seconds
from lib.methods.method import Setting
from lib.models import OF_PAPERS
from lib.papers.results import Row
from lib.training.teams import Team, measure_visit

MIN_STEPS = 6
"""Steps with checkpoints in a visit at least."""


@contextmanager
def attached(
    method: str, launcher: str, name: str, world: int, places: tuple[Path, Path], timeout: float
) -> Iterator[tuple[Team, int]]:
    """Start a team that trains a model of the papers, and attach a method.

    Yields the team and the bytes of the state; ends the team. places: an existing folder on the
    disk, and one in shared memory with a short path.
    """
    folder, memory = places
    setting = Setting(
        method=method,
        launcher=launcher,
        world=world,
        model=OF_PAPERS + name,
        every=1,
        directory=str(folder),
        memory=str(memory),
    )
    team = Team(setting, timeout, folder.with_suffix(".log"))
    try:
        state_bytes = team.ready()
        team.command("keep_freed")
        team.command("attach")
        yield team, state_bytes
    finally:
        team.begin_close()
        team.end_close()


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
