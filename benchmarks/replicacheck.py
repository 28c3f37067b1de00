"""How much does the replica check cost, compared with a version? DDP training, a version per step.

    python benchmarks/replicacheck.py --toy
    python benchmarks/replicacheck.py --json replicacheck.json

Three kinds of blocks take turns in the same processes: steps of a plain twin, steps with
versions, and steps with versions and the check. CPU time is that of all threads of the process.
The clocks of the threads that run the check count its own time as well, with less noise from
other load.

step_ms      CPU time of the plain twin's step, mean of the ranks' medians
version_ms   excess CPU time of a step with a version
check_ms     CPU time inside the check by its threads' clocks, less the clocks' cost
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
from lib.files import SHARED_MEMORY
from lib.machine import description
from lib.ranks import rows_of_ranks
from lib.report import publish
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


def measure(folder: str, name: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Run one rank; yields the row of a model."""
    one = Rank(name, folder)
    steps = one.ckpt.config.compared_steps  # all slices, in each block
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        one.block(8, kind)
    for turn in range(rounds):
        for kind in (*KINDS[turn % 3 :], *KINDS[: turn % 3]):
            found[kind].append(one.block(steps, kind))
    plain, versions, checked = (found[kind] for kind in KINDS)
    mine = {
        "step_ms": median(p[0] for p in plain),
        "version_ms": median(v[0] - p[0] for v, p in zip(versions, plain, strict=True)),
        "check_ms": median(c[1] for c in checked),
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    yield {"model": name, "ranks": len(everyone)} | {
        figure: 1e3 * fmean(each[figure] for each in everyone) for figure in mine
    }
    one.ckpt.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    models, rounds = (["small"], 2) if options.toy else (["wide", "deep"], options.rounds)
    rows = [row for name in models for row in rows_of_ranks(measure, 2, name, rounds)]
    publish(options.json, description(SHARED_MEMORY), rows=rows)


if __name__ == "__main__":
    main()
