"""How much does a version at every step cost, beside the copy of its bytes? DDP, memory level.

    python benchmarks/stepcost.py --toy
    python benchmarks/stepcost.py --models cnn,mlp --sleep 0.05
    python benchmarks/stepcost.py --device cuda --ranks 1         # one GPU, NCCL
    TIERCKPT_COPY_ENGINE=torch python benchmarks/stepcost.py      # without the copy engine

Two kinds of blocks take turns in the same processes: steps of a plain twin, and steps with a
version each. Figures are differences within a round, so that other load of the machine affects both
equally. CPU time is that of all threads of the rank's process. *bare* is the least that the
version's bytes cost: between further steps of the twin the training thread copies as many bytes,
block by block, into shared memory, and hashes them. `--sleep` waits that many seconds in each step,
as for a GPU: then a core is idle. With `--device cuda` all ranks share one GPU, each step ends with
the GPU's work done, and *bare* is the hash of the bytes alone, as a GPU copies them by DMA.

step_ms     a step of the plain twin, median        slower_ms     with a version: median, quartiles
cpu_ms      CPU time that a version adds            main_cpu_ms   of it that of the training thread
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
from lib.files import SHARED_MEMORY
from lib.machine import description
from lib.ranks import rows_of_ranks
from lib.report import publish
from lib.step_models import cnn, deep, mlp
from lib.terminal import parser_of
from tierckpt.format.layout import BLOCK_BYTES
from tierckpt.snapshot import copy_engine

MODELS = {
    "cnn": (cnn, (64, 1, 8, 8)),
    "mlp": (mlp, (64, 256)),
    "deep": (deep, (64, 64)),
}


class BareCopy:
    """A copy and hash of so many bytes, with a clock; the sources are as cold as live tensors."""

    def __init__(self, nbytes: int, copies: bool) -> None:
        """Make the memory.

        Args:
            copies: False leaves the copy out: the hash alone.
        """
        self._copies = copies
        self._source = np.ones(nbytes, np.uint8)
        self._target = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self._target[:] = 0
        self.seconds = 0.0

    def run(self) -> None:
        begin = time.thread_time()
        for low in range(0, len(self._source), BLOCK_BYTES):
            block = self._target[low : low + BLOCK_BYTES]
            if self._copies:
                block[:] = self._source[low : low + BLOCK_BYTES]
            xxhash.xxh3_64_intdigest(block)
        self.seconds += time.thread_time() - begin


@dataclass
class Cost:
    """Milliseconds per step of one block."""

    wall: float
    cpu: float
    """Of the process."""
    main: float
    """Of the training thread."""


class Rank:
    """One rank: a plain model, and its twin with a checkpointer."""

    def __init__(self, name: str, folder: str, sleep_seconds: float, device: str) -> None:
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        make, shape = MODELS[name]
        torch.manual_seed(0)
        self.batch = torch.randn(shape).to(self.device)
        self.labels = torch.randint(0, 10, shape[:1]).to(self.device)
        self.loss, self.sleep_seconds = nn.CrossEntropyLoss(), sleep_seconds
        models = [DistributedDataParallel(make().to(self.device)) for _ in range(2)]
        self.sides = [(m, torch.optim.AdamW(m.parameters(), lr=1e-4)) for m in models]
        self.nbytes = 0
        settings = {"path": f"{folder}/ckpts", "shm_dir": f"{folder}/shm", "memory_every_steps": 1}
        self.ckpt = ddp_ckpt.Checkpointer(
            *self.sides[1], local_every_seconds=0, on_event=self._on_event, **settings
        )
        self.ckpt.restore()
        self.bare: BareCopy | None = None

    def _on_event(self, event: Any) -> None:
        self.nbytes = event.nbytes or self.nbytes

    def block(self, steps: int, versions: bool) -> Cost:
        """Train so many steps."""
        model, optimizer = self.sides[versions]
        dist.barrier()
        wall, cpu, main = time.perf_counter(), time.process_time(), time.thread_time()
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss(model(self.batch), self.labels).backward()
            if self.sleep_seconds:
                time.sleep(self.sleep_seconds)
            optimizer.step()
            if versions:
                self.ckpt.step()
            self._wait_for_the_device()
        dist.barrier()
        ends = time.perf_counter(), time.process_time(), time.thread_time()
        begins = wall, cpu, main
        return Cost(*(1e3 * (e - b) / steps for e, b in zip(ends, begins, strict=True)))

    def _wait_for_the_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def bare_ms(self, steps: int) -> float:
        """Mean of the bare copy between steps of the twin."""
        if self.bare is None:
            self.bare = BareCopy(self.nbytes, copies=self.device.type == "cpu")
        self.bare.seconds = 0.0
        model, optimizer = self.sides[0]
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss(model(self.batch), self.labels).backward()
            optimizer.step()
            self._wait_for_the_device()
            self.bare.run()
        return 1e3 * self.bare.seconds / steps


def measure(
    folder: str, options: argparse.Namespace, name: str, rounds: int, steps: int
) -> Iterator[dict[str, Any]]:
    """Run one rank; yields the row of a model."""
    one = Rank(name, folder, options.sleep, options.device)
    for versions in (False, True):
        one.block(max(steps, 4), versions)
    found: dict[bool, list[Cost]] = {False: [], True: []}
    bare = []
    for turn in range(rounds):
        for versions in (False, True) if turn % 2 else (True, False):
            found[versions].append(one.block(steps, versions))
        bare.append(one.bare_ms(steps))
    yield _row(name, one.nbytes, found[False], found[True], median(bare))
    one.ckpt.close()


def _row(
    name: str, nbytes: int, plain: list[Cost], versions: list[Cost], bare_ms: float
) -> dict[str, Any]:
    pairs = list(zip(plain, versions, strict=True))
    walls = [v.wall - p.wall for p, v in pairs]
    low, _, high = quantiles(walls, n=4) if len(walls) > 1 else walls * 3
    return {
        "model": name,
        "rank_bytes": nbytes,
        "step_ms": median(p.wall for p in plain),
        "slower_ms": {"median": median(walls), "low": low, "high": high},
        "cpu_ms": median(v.cpu - p.cpu for p, v in pairs),
        "main_cpu_ms": median(v.main - p.main for p, v in pairs),
        "bare_ms": bare_ms,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40, help="steps of a block")
    parser.add_argument("--sleep", type=float, default=0.0, help="idle seconds of each step")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    models = ["cnn"] if options.toy else options.models.split(",")
    rounds, steps = (2, 4) if options.toy else (options.rounds, options.steps)
    engine = "the copy engine" if copy_engine.find() is not None else "torch"
    print(f"copies by {engine}")
    # NCCL refuses ranks that share a GPU.
    backend = "nccl" if options.device == "cuda" and options.ranks == 1 else "gloo"
    rows = [
        row
        for name in models
        for row in rows_of_ranks(
            *(measure, options.ranks, options, name, rounds, steps), backend=backend
        )
    ]
    publish(options.json, description(SHARED_MEMORY), rows=rows)


if __name__ == "__main__":
    main()
