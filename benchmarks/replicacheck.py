"""How much does the replica check cost, compared with a version? DDP training, a version per step.

    python benchmarks/replicacheck.py --toy
    python benchmarks/replicacheck.py --model wide --ranks 2

Three kinds of blocks take turns in the same processes: steps of a plain twin, steps with
versions, and steps with versions and the check. CPU time is that of all threads of the process.
The clocks of the threads that run the check count its own time as well, with less noise from
other load.

step          CPU time of the plain twin's step, ms, mean of the ranks' medians
version       excess CPU time of a step with a version
check         CPU time inside the check by its threads' clocks, less the clocks' cost
of a version  check / version
paired        excess CPU time of a step with the check over one without, by the process's
              clock: noisy
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
from lib.files import SHARED_MEMORY, add_row, job_in_memory, rows_of, write_json
from lib.machine import description
from lib.step_models import deep, mlp
from lib.terminal import parser_of
from tierckpt.replicas.monitor import ReplicaMonitor
from tierckpt.replicas.replicated_state import Look

KINDS = ("without", "versions", "checked")


MODELS = {"wide": (lambda: mlp(4, 2048), 2048), "small": (mlp, 256), "deep": (deep, 64)}


class Spent:
    """CPU seconds that threads spent inside the check."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._inside = threading.local()
        begin = time.perf_counter()
        for _ in range(1000):
            time.thread_time()
        self._clock_seconds = (time.perf_counter() - begin) / 1000
        for owner, names in (
            (ReplicaMonitor, ("read", "vote", "voted", "settle")),
            (Look, ("run",)),
        ):
            for name in names:
                setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            if getattr(self._inside, "yes", False):
                return method(*args)
            self._inside.yes = True
            begin = time.thread_time()
            try:
                return method(*args)
            finally:
                self._inside.yes = False
                with self._lock:
                    self.seconds += time.thread_time() - begin - self._clock_seconds

        return counted


class Rank:
    """One rank: a plain model, and its twin with a checkpointer."""

    def __init__(self, name: str, folder: str) -> None:
        torch.set_num_threads(1)
        make, width = MODELS[name]
        torch.manual_seed(0)
        self.batch, self.spent = torch.randn(32, width), Spent()
        models = [DistributedDataParallel(make()) for _ in range(2)]
        self.sides = [(m, torch.optim.AdamW(m.parameters(), lr=1e-4)) for m in models]
        settings = {"path": f"{folder}/ckpts", "shm_dir": f"{folder}/shm", "memory_every_steps": 1}
        self.ckpt = ddp_ckpt.Checkpointer(*self.sides[1], local_every_seconds=0, **settings)
        self.ckpt.restore()

    def block(self, steps: int, kind: str) -> tuple[float, float]:
        """Train; return the CPU seconds per step, and of these inside the check."""
        model, optimizer = self.sides[kind != "without"]
        self.ckpt._parts.find(ReplicaMonitor).active = kind == "checked"
        dist.barrier()
        self.spent.seconds = 0.0
        cpu = time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            model(self.batch).square().mean().backward()
            optimizer.step()
            if kind != "without":
                self.ckpt.step()
        dist.barrier()
        return (time.process_time() - cpu) / steps, self.spent.seconds / steps


def measure(rank: int, ranks: int, name: str, rounds: int, folder: str) -> None:
    """Run one rank; rank 0 prints a line."""
    logging.basicConfig()  # warnings and errors alone, between the lines of the table
    meeting = f"file://{folder}/meeting-{name}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    one = Rank(name, folder)
    steps = one.ckpt.config.compared_steps  # all slices, in each block
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        one.block(8, kind)
    for turn in range(rounds):
        for kind in (*KINDS[turn % 3 :], *KINDS[: turn % 3]):
            found[kind].append(one.block(steps, kind))
    plain, versions, checked = (found[kind] for kind in KINDS)
    version = median(v[0] - p[0] for v, p in zip(versions, plain, strict=True))
    more = median(c[0] - v[0] for c, v in zip(checked, versions, strict=True))
    mine = (version, more, median(c[1] for c in checked), median(p[0] for p in plain))
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, mine)
    version, more, inside, step = (
        1e3 * sum(column) / ranks for column in zip(*everyone, strict=True)
    )
    if rank == 0:
        row = {"model": name, "ranks": ranks, "step_ms": step, "version_ms": version}
        add_row(folder, {**row, "check_ms": inside, "paired_ms": more})
        print(
            f"{name:>6} {ranks:>5} {step:>9.2f} {version:>9.3f} {inside:>9.4f} "
            f"{100 * inside / version:>7.2f} % {more:>+9.3f}",
            flush=True,
        )
    one.ckpt.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help=f"one of {', '.join(MODELS)}; default: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    models = [options.model] if options.model else ["small"] if options.toy else [*MODELS]
    rounds = 2 if options.toy else options.rounds
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; ms, means of the ranks' medians")
    print(f"of {rounds} rounds, CPU time")
    print(" model ranks      step   version     check of a version   paired")
    rows = []
    for name in models:
        with job_in_memory() as folder:
            args = (options.ranks, name, rounds, folder)
            torch.multiprocessing.spawn(measure, args, nprocs=options.ranks)
            rows += rows_of(folder)
    if options.json:
        write_json(options.json, {"run": description(SHARED_MEMORY), "rows": rows})


if __name__ == "__main__":
    main()
