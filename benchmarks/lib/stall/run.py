"""One run of stall.py: all teams, the rounds, and the results so far."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib import figures, targets
from lib.figures import Row, Spread
from lib.limits import Limits
from lib.methods.method import Method, Setting
from lib.methods.registry import METHODS
from lib.stall.time_left import Pace
from lib.terminal import say
from lib.training.teams import Team, TeamError, measure_memory, measure_visit


@dataclass
class Bench:
    """All methods of one run. A failed method is listed with its error; the run continues.

    rounds: the number of complete rounds.
    """

    options: argparse.Namespace
    directory: Path
    memory_directory: Path
    rounds: int = 0
    status: dict[str, str] = field(default_factory=dict)
    teams: dict[str, Team] = field(default_factory=dict)
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    visits: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    state_bytes: int = 0

    def __post_init__(self) -> None:
        known = METHODS[self.options.launcher]
        self.methods: dict[str, type[Method]] = {
            name: known[name] for name in self.options.methods.split(",")
        }

    # --- continuing an interrupted run -----------------------------------------------------------

    def partial(self) -> dict[str, Any]:
        """The raw timings of the complete rounds, for JSON."""
        return {"rounds": self.rounds, "visits": self.visits, "samples": self.samples}

    def take_up(self, partial: dict[str, Any]) -> None:
        """Continue after the rounds of another run. Call it before `start`."""
        self.rounds = partial["rounds"]
        self.visits, self.samples = partial["visits"], partial["samples"]

    # --- teams -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all teams and measure the memory of each.

        The memory blocks of a team come before the start of the next team: all teams share the
        pages of libraries, so a start in between would change the Pss. The toy size starts all
        teams at once, to save time.
        """
        names = list(self.methods)
        for batch in [names] if self.options.model == "toy" else [[name] for name in names]:
            say(f"starting {', '.join(batch)}")
            for name in batch:
                self._launch(name)
            for name in batch:
                self._prepare(name)
        left = range(self.rounds, self.options.rounds)
        self._pace = Pace(name for _ in left for name in self.teams)

    def _launch(self, name: str) -> None:
        """Start the team of a method, or note the reason why it cannot run."""
        missing = self.methods[name].missing()
        self.status[name] = missing or "ok"
        if missing:
            return
        folder = self.directory / name
        folder.mkdir()
        log = self.directory / f"{name}.log"
        self.teams[name] = Team(self._setting(name, folder), self.options.timeout, log)

    def _prepare(self, name: str) -> None:
        """Wait for a team and measure its memory."""
        if name not in self.teams:
            return
        with self._failing(name):
            team = self.teams[name]
            self.state_bytes = team.ready()
            self.memory[name] = measure_memory(team, self.options.every)
            team.command("sweep")
            self.visits.setdefault(name, [])

    def _setting(self, name: str, folder: Path) -> Setting:
        options = self.options
        return Setting(
            method=name,
            launcher=options.launcher,
            world=options.world,
            model=options.model,
            batch=options.batch,
            every=options.every,
            device=options.device,
            backend=options.backend,
            directory=str(folder),
            memory=str(self.memory_directory),
        )

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except TeamError as error:
            self.status[name] = f"failed: {error}"
            print(f"{name} failed:\n{error}", file=sys.stderr)
            team = self.teams.pop(name, None)
            if team is not None:
                team.kill()

    def close(self) -> None:
        """End all teams at once, since each takes a second or two."""
        for team in self.teams.values():
            team.begin_close()
        for team in self.teams.values():
            team.end_close()

    # --- rounds ----------------------------------------------------------------------------------

    def round(self, limits: Limits) -> None:
        """Visit every method once, and the bare limits."""
        costs = limits.once()
        if "checksum" in costs:
            costs["copy_checksum"] = costs["copy"] + costs["checksum"]
        for name, cost in costs.items():
            self._sample(name, cost.wall_s)
            self._sample(f"{name}_cpu", cost.cpu_s)
        of = f"round {self.rounds + 1} of {self.options.rounds}"
        for name in list(self.teams):
            say(f"{of}: {name}; {self._pace.text()}")
            with self._failing(name), self._pace.part(name):
                self._visit(name, limits)
            if name not in self.teams:
                self._pace.drop(name)
        self.rounds += 1

    def _visit(self, name: str, limits: Limits) -> None:
        team, beside = self.teams[name], self.methods[name].beside
        if beside and beside not in self.teams:
            raise TeamError(f"it is measured against {beside}, and that did not run")
        plain = self.teams[beside or name]
        self.visits[name].append(measure_visit(team, plain, self.options.steps))
        if name == Method.name:
            self._loaded_writes(limits, team)

    def _loaded_writes(self, limits: Limits, team: Team) -> None:
        """Sample the bare write loop while a training uses the cores."""
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(team.block, self.options.steps, False)
            while not training.done():
                cost = limits.write_recycled()
                if not training.done():
                    self._sample("write_loaded", cost.wall_s)
                    self._sample("write_loaded_cpu", cost.cpu_s)
            training.result()

    def _sample(self, name: str, seconds: float) -> None:
        self.samples.setdefault(name, []).append(seconds)

    def result(self) -> targets.Run:
        """The figures of all rounds so far."""
        spreads = {name: figures.spread(values) for name, values in self.samples.items()}
        bare: dict[str, Spread] = {name: value for name, value in spreads.items() if value}
        options = self.options
        return targets.Run(
            {name: self._row(name) for name in self.methods},
            bare,
            options.launcher,
            options.model,
            options.every,
            options.world,
            self.state_bytes,
        )

    def _row(self, name: str) -> Row:
        method = self.methods[name]
        row = Row(
            name,
            method.title,
            method.fsync,
            peer=method.peer,
            slots=method.slots_on(self.options.device),
        )
        row.status = self.status[name]
        if name in self.teams:
            figures.fill(row, self.memory[name], self.visits[name], self.options.every)
        return row
