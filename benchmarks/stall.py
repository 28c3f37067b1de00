"""What does a checkpoint cost a data-parallel training? Ours and its peers, in one run.

    python benchmarks/stall.py --toy
    python benchmarks/stall.py --json stall.json --plot stall.png
    python benchmarks/stall.py --model resnet18 --every 1
    python benchmarks/stall.py --device cuda --model gpt2

See benchmarks/README.md for what the columns mean and how they are measured.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import figures
import machine
import models
import report
import targets
from figures import Row, Spread
from harness import Team, TeamError, measure_memory, measure_visit
from limits import Limits
from methods import Setting
from registry import METHODS

SHARED_MEMORY = Path("/dev/shm")


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line and fill in what depends on other options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="1.5 MB of state, under a minute")
    parser.add_argument("--model", choices=models.NAMES, help="default: linear, on cuda gpt2")
    parser.add_argument("--batch", type=int, help="samples a rank")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), help="default: nccl for one GPU rank"
    )
    parser.add_argument("--world", type=int, help="ranks; default 2, on cuda 1")
    parser.add_argument("--every", type=int, help="steps a checkpoint; default 4, on cuda 1")
    parser.add_argument("--steps", type=int, help="timed steps of a block; default 4 checkpoints")
    parser.add_argument("--rounds", type=int, help="visits to each method; default 5, toy 2")
    parser.add_argument("--methods", default=",".join(METHODS), help="names, separated by commas")
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure, must exist")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one command")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--plot", type=Path, help="draw the picture here (needs matplotlib)")
    options = parser.parse_args(argv)
    _defaults(options)
    problem = _problem(options)
    if problem:
        parser.error(problem)
    return options


def _defaults(options: argparse.Namespace) -> None:
    cuda = options.device == "cuda"
    options.model = options.model or ("toy" if options.toy else "gpt2" if cuda else "linear")
    options.batch = options.batch or models.BATCHES[options.model]
    options.world = options.world or (1 if cuda else 2)
    options.backend = options.backend or ("nccl" if cuda and options.world == 1 else "gloo")
    options.every = options.every or (1 if cuda else 4)
    options.steps = options.steps or (12 if options.every == 1 else 4 * options.every)
    options.rounds = options.rounds or (2 if options.toy else 5)


def _problem(options: argparse.Namespace) -> str | None:
    """Why these options cannot be run here."""
    unknown = [name for name in options.methods.split(",") if name not in METHODS]
    if unknown:
        return f"unknown methods {', '.join(unknown)}; known are {', '.join(METHODS)}"
    if options.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda needs a GPU that this torch can use, and there is none here"
    if options.backend == "nccl" and (options.device != "cuda" or options.world > 1):
        return "nccl wants one GPU a rank: use --device cuda --world 1, or --backend gloo"
    if options.steps % options.every or options.steps < 2:
        return "--steps must be a multiple of --every, and at least 2"
    if options.dir is not None and not options.dir.is_dir():
        return f"--dir {options.dir} is not a folder"
    return None


@dataclass
class Bench:
    """All teams of one run, and what has been measured so far.

    A method that fails is listed with its error; the run goes on without it.
    """

    options: argparse.Namespace
    directory: Path
    memory_directory: Path
    rows: dict[str, Row] = field(default_factory=dict)
    teams: dict[str, Team] = field(default_factory=dict)
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    visits: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    state_bytes: int = 0

    def start(self) -> None:
        """Start all teams and measure the memory of each.

        The memory blocks of one team come before the next team starts: the pages of libraries
        are shared by all teams, so a team that comes in between would move the Pss. The toy
        starts all at once: there only the time matters that it takes.
        """
        names = self.options.methods.split(",")
        for batch in [names] if self.options.model == "toy" else [[name] for name in names]:
            _say(f"starting {', '.join(batch)}")
            for name in batch:
                self.launch(name)
            for name in batch:
                self.prepare(name)

    def launch(self, name: str) -> None:
        """Start a method's team, or note why it cannot be."""
        method = METHODS[name]
        row = Row(name, method.title, method.fsync, peer=method.peer, slots=method.slots)
        self.rows[name] = row
        missing = method.missing()
        if missing:
            row.status = missing
            return
        folder = self.directory / name
        folder.mkdir()
        options = self.options
        self.teams[name] = Team(
            self._setting(name, folder),
            options.world,
            options.timeout,
            self.directory / f"{name}.log",
        )

    def prepare(self, name: str) -> None:
        """Wait for a team and measure its memory."""
        if name not in self.teams:
            return
        with self._failing(name):
            team = self.teams[name]
            self.state_bytes = team.ready()
            self.memory[name] = measure_memory(team, self.options.every)
            team.command("sweep")
            self.visits[name] = []

    def _setting(self, name: str, folder: Path) -> Setting:
        options = self.options
        return Setting(
            method=name,
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
            self.rows[name].status = f"failed: {error}"
            print(f"{name} failed:\n{error}", file=sys.stderr)
            team = self.teams.pop(name, None)
            if team is not None:
                team.kill()

    def round(self, limits: Limits) -> None:
        """Visit every method once, and the bare limits."""
        costs = limits.once()
        if "checksum" in costs:
            costs["copy_checksum"] = costs["copy"] + costs["checksum"]
        for name, cost in costs.items():
            self._sample(name, cost.wall_s)
            self._sample(f"{name}_cpu", cost.cpu_s)
        for name, team in list(self.teams.items()):
            with self._failing(name):
                self.visits[name].append(measure_visit(team, self.options.steps))
                if name == "nothing":
                    self._loaded_writes(limits, team)

    def _loaded_writes(self, limits: Limits, team: Team) -> None:
        """The bare write loop while a training has the cores: what ours has to share with."""
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
        for name in self.teams:
            figures.fill(self.rows[name], self.memory[name], self.visits[name], self.options.every)
        spreads = {name: figures.spread(values) for name, values in self.samples.items()}
        bare: dict[str, Spread] = {name: value for name, value in spreads.items() if value}
        options = self.options
        return targets.Run(
            self.rows, bare, options.model, options.every, options.world, self.state_bytes
        )

    def close(self) -> None:
        """End all teams at once: each takes a second or two to leave."""
        for team in self.teams.values():
            team.begin_close()
        for team in self.teams.values():
            team.end_close()


def measure(options: argparse.Namespace, directory: Path, memory: Path) -> targets.Run:
    """Run everything; leaves no process behind, however it ends."""
    bench = Bench(options, directory, memory)
    try:
        bench.start()
        if not bench.teams:
            sys.exit("no method could be run: see the reasons above")
        limits = Limits(bench.state_bytes, directory)
        for number in range(options.rounds):
            _say(f"round {number + 1} of {options.rounds}")
            bench.round(limits)
        return bench.result()
    finally:
        bench.close()


def publish(options: argparse.Namespace, about: dict[str, Any], run: targets.Run) -> None:
    """Print tables and targets, write the files that were asked for."""
    verdicts = targets.judge(run)
    rows = list(run.rows.values())
    steps = ", ".join(f"{1e3 * row.step.median:.0f}" for row in rows if row.step)
    print(
        f"\n{options.model}: {run.state_bytes / 1e6:.1f} MB of state, {run.world} ranks, "
        f"{options.backend}, a checkpoint every {run.every} steps, {options.rounds} rounds\n"
        f"{about['cpu']}, {about['cores']} cores, {about['filesystem']}, torch {about['torch']}\n"
        f"plain step, by method: {steps} ms\n"
    )
    print(report.table(rows))
    print(report.warning(rows) or "", "\n")
    print(report.limits_table(run), "\n")
    print(report.targets_text(verdicts))
    if options.json:
        report.write_json(options.json, about, run, verdicts)
    if options.plot:
        _say(report.plot(options.plot, run) or f"picture: {options.plot}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    options = arguments(sys.argv[1:])
    # A plain kill shall clean up, too: raise where the main thread is, so that `finally` runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    parent = options.dir or machine.scratch_parent()
    # A method that is killed cannot clean up its shared memory: it gets a folder, too.
    with _temporary(parent) as directory, _temporary(SHARED_MEMORY) as memory:
        about = machine.description(directory)
        publish(options, about, measure(options, directory, memory))


@contextmanager
def _temporary(parent: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="stall-", dir=parent)).resolve()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
