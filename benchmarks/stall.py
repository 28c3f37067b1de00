"""How much does a checkpoint slow a data-parallel training? Tierckpt and its alternatives.

    python benchmarks/stall.py --toy
    python benchmarks/stall.py --json stall.json --plot stall.png
    python benchmarks/stall.py --model resnet18 --every 1
    python benchmarks/stall.py --launcher horovod
    python benchmarks/stall.py --device cuda --model gpt2

Needs the package and torch; torchsnapshot, matplotlib (`--plot`) and xxhash are used if there.
Each rank computes on one thread. `--json` is rewritten after each round. On a GPU, where some
methods need seconds a step: `--rounds 2 --steps 6`.

nothing        training alone, measured as if it took checkpoints: the noise
torch-save     rank 0 writes with fsync, all ranks wait; with Horovod at their next allreduce
dcp-thread     DCP's `async_save` as in its tutorial, fsync
dcp-process    the same with `AsyncCheckpointerType.PROCESS`
dcp-tuned      a daemon process, a staging thread with reused shared memory, cached plans, plain
               state dicts, a wait before the optimizer's step
torchsnapshot  `Snapshot.async_take`, all replicated, each rank writes a part, no fsync
ours-off       Tierckpt attached with every level off, compared with `nothing`
ours-memory    Tierckpt's memory level; not on disk
ours-local     its local level: committed, file and folder fsync'ed

call       seconds inside the method at the boundary, slowest rank, over the checkpoints
wait       the optimizer's step waited for a copy, slowest rank
cpu        CPU-seconds a checkpoint beyond plain steps, of all processes and their children
durable    from the first rank's call until the last rank's data is finished (fsync'ed if it is)
slowdown   wall time that a finished checkpoint adds: a block with checkpoints, less as many
           plain steps; over visits
extra      peak memory of all processes above training alone, in bytes; Pss divides shared pages,
           Rss counts them once a process. CUDA's pinned memory may be missing in both
taken      finished checkpoints, of those due
others     cores that other processes used
quiet      visits that count: with other load of at most 0.15 cores, if there are three; 0: too few
           were quiet, so all count

Each method has rank processes of its own for the whole run; while one trains, the others block in
a read (Horovod's are stopped, as they poll). Methods take turns: a visit is half a block of plain
steps, a block with checkpoints, half a block of plain steps, so drift of the machine cancels. A
block is a warm-up step, timed steps, a step to settle, and a wait until all is durable.
Boundaries are called in blocks with checkpoints alone. No method starts a checkpoint while its
previous one is under way: it waits, as call time. DCP and torchsnapshot use a gloo group of their
own. Memory is sampled every 20 ms in blocks without timing, with `mallopt` so that freed memory
leaves at once. The ranks of `nothing` train the plain blocks of `ours-off`. On a GPU a block ends
when its stream is done.

*limits*: the bare work on one thread over the whole state: a copy between shared mappings, xxh3,
an O_DIRECT write and fsync of an old file (`recycled`), and of one beside a training (`loaded`); on
a GPU a copy to page-locked memory (`copy_pinned`). docs/figures.md has the targets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lib import machine, models
from lib.figures import figures_of, spread
from lib.files import SHARED_MEMORY, clean_up_when_terminated, temporary, write_json
from lib.limits import Limits
from lib.methods.method import Method, Setting
from lib.methods.registry import METHODS
from lib.report import publish
from lib.stall_picture import plot
from lib.terminal import parser_of, say
from lib.training.launchers import LAUNCHERS
from lib.training.teams import Team, TeamError, measure_memory, measure_visit

LIMIT_SECONDS = 300.0
"""For one command."""


class Bench:
    """All methods of one run. A failed method is listed with its error; the run continues."""

    def __init__(self, options: argparse.Namespace, disk: Path, memory: Path) -> None:
        self.options, self.disk, self.memory_directory = options, disk, memory
        known = METHODS[options.launcher]
        self.methods: dict[str, type[Method]] = {name: known[name] for name in options.methods}
        self.status = {name: method.missing() or "ok" for name, method in self.methods.items()}
        self.teams: dict[str, Team] = {}
        self.memory: dict[str, dict[str, Any]] = {}
        self.visits: dict[str, list[dict[str, Any]]] = {}
        self.samples: dict[str, list[float]] = {}
        self.state_bytes = 0

    def start(self) -> None:
        """Start all teams and measure the memory of each.

        The memory blocks of a team come before the start of the next team: all teams share the
        pages of libraries, so a start in between would change the Pss. The toy size starts all
        teams at once, to save time.
        """
        names = [name for name in self.methods if self.status[name] == "ok"]
        for batch in [names] if self.options.model == "toy" else [[name] for name in names]:
            say(f"starting {', '.join(batch)}")
            for name in batch:
                self.teams[name] = self._team(name)
            for name in batch:
                with self._failing(name):
                    self._prepare(name, self.teams[name])

    def _team(self, name: str) -> Team:
        options, folder = self.options, self.disk / name
        folder.mkdir()
        setting = Setting(
            method=name,
            launcher=options.launcher,
            world=options.world,
            model=options.model,
            every=options.every,
            device=options.device,
            backend=options.backend,
            directory=str(folder),
            memory=str(self.memory_directory),
        )
        return Team(setting, LIMIT_SECONDS, self.disk / f"{name}.log")

    def _prepare(self, name: str, team: Team) -> None:
        self.state_bytes = team.ready()
        self.memory[name] = measure_memory(team, self.options.every)
        team.command("sweep")
        self.visits[name] = []

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except TeamError as error:
            self.status[name] = f"failed: {error}"
            say(f"{name} failed:\n{error}")
            team = self.teams.pop(name, None)
            if team is not None:
                team.kill()

    def close(self) -> None:
        """End all teams at once, since each takes a second or two."""
        for team in self.teams.values():
            team.begin_close()
        for team in self.teams.values():
            team.end_close()

    def round(self, limits: Limits) -> None:
        """Visit every method once, and the bare limits."""
        for name, cost in limits.once().items():
            self._sample(name, cost.wall_s)
        for name in list(self.teams):
            say(f"  {name}")
            with self._failing(name):
                self._visit(name, limits)

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
            training.result()

    def _sample(self, name: str, seconds: float) -> None:
        self.samples.setdefault(name, []).append(seconds)

    def document(self) -> dict[str, Any]:
        """The figures of all rounds so far."""
        options = self.options
        limits = {name: spread(values) for name, values in self.samples.items()}
        return {
            "model": options.model,
            "every": options.every,
            "world": options.world,
            "state_bytes": self.state_bytes,
            "methods": [self._row(name) for name in self.methods],
            "limits": {name: asdict(found) for name, found in limits.items() if found},
        }

    def _row(self, name: str) -> dict[str, Any]:
        method, found = self.methods[name], {}
        if name in self.teams and self.visits[name]:
            found = figures_of(self.memory[name], self.visits[name])
        about = {"name": name, "title": method.title, "fsync": method.fsync}
        return {**about, "status": self.status[name], **found}


def arguments() -> argparse.Namespace:
    """Parse the command line, and set the defaults that depend on other options."""
    parser = parser_of(__doc__, toy="1.5 MB of state, under a minute", place="folder on the disk")
    parser.add_argument("--launcher", choices=tuple(LAUNCHERS), default="torchrun")
    parser.add_argument("--model", choices=models.NAMES, help="default: linear, on cuda gpt2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--world", type=int, help="ranks; default 2, on cuda 1")
    parser.add_argument("--every", type=int, help="steps a checkpoint; default 4, on cuda 1")
    parser.add_argument("--steps", type=int, help="timed steps of a block; default 4 checkpoints")
    parser.add_argument("--rounds", type=int, help="visits to each method; default 5, toy 2")
    parser.add_argument("--methods", help="names, separated by commas; default: all")
    parser.add_argument("--plot", type=Path, help="draw the picture here (needs matplotlib)")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    options.model = options.model or ("toy" if options.toy else "gpt2" if cuda else "linear")
    options.world = options.world or (1 if cuda else 2)
    # NCCL needs a GPU for each rank, and all ranks share one here.
    options.backend = "nccl" if cuda and options.world == 1 else "gloo"
    options.every = options.every or (1 if cuda else 4)
    options.steps = options.steps or (12 if options.every == 1 else 4 * options.every)
    options.rounds = options.rounds or (2 if options.toy else 5)
    usual = (name for name, method in METHODS[options.launcher].items() if method.usual)
    options.methods = options.methods.split(",") if options.methods else [*usual]
    if problem := _problem(options):
        parser.error(problem)
    return options


def _problem(options: argparse.Namespace) -> str | None:
    """The reason if these options cannot be run here."""
    known, names = METHODS[options.launcher], options.methods
    if unknown := [name for name in names if name not in known]:
        return f"unknown methods {', '.join(unknown)}; known are {', '.join(known)}"
    if alone := [name for name in names if known[name].beside not in ("", *names)]:
        needed = " and ".join(sorted({known[name].beside for name in alone}))
        return f"{', '.join(alone)}: measured against {needed}: add that to --methods"
    if options.launcher == "horovod" and options.device == "cuda":
        return "--launcher horovod runs over Gloo, on the CPU: remove --device"
    if missing := LAUNCHERS[options.launcher].missing():
        return f"--launcher {options.launcher}: {missing}"
    if options.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: this torch finds no GPU here"
    if options.steps % options.every or options.steps < 2:
        return "--steps must be a multiple of --every, and at least 2"
    return None


def main() -> None:
    options = arguments()
    clean_up_when_terminated()
    parent = options.dir or machine.scratch_parent()
    # A killed method cannot clean up its shared memory, so it is a temporary folder as well.
    with temporary(parent) as disk, temporary(SHARED_MEMORY) as memory:
        about = machine.description(disk)
        bench = Bench(options, disk, memory)
        try:
            bench.start()
            if not bench.teams:
                sys.exit("no method could be run: see the reasons above")
            limits = Limits(bench.state_bytes, disk, options.device, options.world)
            for number in range(options.rounds):
                say(f"round {number + 1} of {options.rounds}")
                bench.round(limits)
                if options.json:
                    write_json(options.json, {**about, **bench.document()})
        finally:
            bench.close()
    document = bench.document()
    publish(options.json, about, **document)
    bare = ((name, found["median"]) for name, found in document["limits"].items())
    print("\nlimits, ms: " + ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in bare))
    if options.plot:
        plot(options.plot, document)


if __name__ == "__main__":
    main()
