"""What does it cost that ranks agree? A DDP training with each boundary's ballot, and without.

    python benchmarks/agreement.py --toy
    python benchmarks/agreement.py --worlds 2,4

Nothing else of ours is attached. Blocks of steps with and without take turns in the same processes;
of each pair the difference is taken, so that what the machine does besides hits both alike.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_ckpt import TorchGroup
from tierckpt.agreement import Agreement
from tierckpt.config import load_config
from tierckpt.naming import VersionId


class Rank:
    """One rank of a small training, and the clock around what it does at a boundary."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.group = TorchGroup()
        self.agreement = Agreement(self.group, load_config({}, {}), lambda *_: None, lambda: None)
        layers = [torch.nn.Linear(256, 256) for _ in range(8)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.batch = torch.ones(32, 256)

    def block(self, steps: int, ballot: bool) -> tuple[float, float, float]:
        """Seconds a step; and of it in reading the last ballot, and in launching the next one."""
        read = launch = 0.0
        self.group.barrier()
        start = time.perf_counter()
        for version in range(steps):
            self.optimizer.zero_grad()
            torch.autograd.backward(self.model(self.batch).sum())
            self.optimizer.step()
            if ballot:
                before = time.perf_counter()
                self.agreement.read()
                between = time.perf_counter()
                self.agreement.launch(VersionId(1, version), slot_free=True, local_free=True)
                read += between - before
                launch += time.perf_counter() - between
        seconds = time.perf_counter() - start
        self.agreement.read()
        return seconds / steps, read / steps, launch / steps


def measure(rank: int, world: int, pairs: int, steps: int, folder: str) -> None:
    """Be one rank; rank 0 prints the line of the table."""
    meeting = f"file://{folder}/{world}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    one = Rank()
    one.block(steps, ballot=True)
    differences, without, reads, launches = [], [], [], []
    for pair in range(pairs):
        # Each goes first in turn: a machine that slows down would hit the second one.
        found = {ballot: one.block(steps, ballot) for ballot in (pair % 2 == 0, pair % 2 == 1)}
        differences.append(found[True][0] - found[False][0])
        without.append(found[False][0])
        reads.append(found[True][1])
        launches.append(found[True][2])
    mine = [median(values) for values in (without, differences, launches, reads)]
    slowest = [1e3 * max(column) for column in zip(*one.group.all_gather_object(mine), strict=True)]
    if rank == 0:
        low, high = 1e3 * min(differences), 1e3 * max(differences)
        plain, more, launched, waited = slowest
        print(
            f"{world:>5} {plain:>9.2f} {more:>+8.3f} {f'({low:+.2f} to {high:+.2f})':>18} "
            f"{launched:>9.3f} {waited:>8.3f}",
            flush=True,
        )
    one.group.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="some seconds, and no figure to quote")
    parser.add_argument("--worlds", default="2,4", help="numbers of ranks, separated by commas")
    options = parser.parse_args()
    pairs, steps = (2, 5) if options.toy else (40, 25)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; ms a step, medians of {pairs} pairs")
    print("ranks   without     more      (all pairs)     launch     wait")
    with tempfile.TemporaryDirectory() as folder:
        for world in map(int, options.worlds.split(",")):
            torch.multiprocessing.spawn(measure, (world, pairs, steps, folder), nprocs=world)


if __name__ == "__main__":
    main()
