"""How much does the agreement of the ranks cost? DDP training with a ballot at each boundary.

    python benchmarks/agreement.py --toy
    python benchmarks/agreement.py --worlds 2,4

No other part of Tierckpt is attached. Three kinds of blocks take turns in the same processes:
steps without ballots, with ballots in a shared page of memory (ranks of one node), and with
ballots over gloo (ranks of several nodes). The figures are differences within a round, so that
other load of the machine affects all of them equally.

step    ms a step, slowest rank, median of the blocks
more    excess over a step without a ballot, median of the rounds, and rank 0's range: the noise
launch  its part in the call that casts the vote; wait: in the one that reads the previous ballot
"""

from __future__ import annotations

import os
import tempfile
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_ckpt import TorchGroup
from lib.files import SHARED_MEMORY, add_row, rows_of, write_json
from lib.machine import description
from lib.terminal import parser_of
from tierckpt.config import load_config
from tierckpt.coordination.agreement import Agreement
from tierckpt.coordination.ballots import GroupBallots, ballots_for
from tierckpt.core.decisions import VOTE_WIDTH
from tierckpt.format.ids import VersionId
from tierckpt.group import Node

KINDS = ("without", "page", "gloo")


class Rank:
    """One rank of a small training, with a clock around its boundaries."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.group = TorchGroup()
        node = Node(0, 1, tuple(range(self.group.size)))
        page = ballots_for(self.group, node, VOTE_WIDTH)
        assert not isinstance(page, GroupBallots), "these ranks cannot share memory"
        self._agreements = {
            kind: Agreement(self.group, ballots, load_config({}, {}), lambda *_: None, lambda: None)
            for kind, ballots in {
                "page": page,
                "gloo": GroupBallots(self.group, VOTE_WIDTH),
            }.items()
        }
        layers = [torch.nn.Linear(256, 256) for _ in range(8)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.batch = torch.ones(32, 256)

    def block(self, steps: int, kind: str) -> tuple[float, float, float]:
        """Train; return the seconds per step, and of these for casting and for reading a ballot."""
        agreement = self._agreements.get(kind)
        read = launch = 0.0
        self.group.barrier()
        start = time.perf_counter()
        for version in range(steps):
            self.optimizer.zero_grad()
            torch.autograd.backward(self.model(self.batch).sum())
            self.optimizer.step()
            if agreement is not None:
                before = time.perf_counter()
                agreement.read()
                between = time.perf_counter()
                agreement.launch(VersionId(1, version))
                read += between - before
                launch += time.perf_counter() - between
        seconds = time.perf_counter() - start
        if agreement is not None:
            agreement.read()
        return seconds / steps, launch / steps, read / steps


def measure(rank: int, world: int, rounds: int, steps: int, folder: str) -> None:
    """Run one rank; rank 0 prints the lines of the table."""
    meeting = f"file://{folder}/{world}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    one = Rank()
    one.block(steps, "gloo")
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    for turn in range(rounds):
        # The kinds take turns to go first: a machine that slows down would affect the last one
        # most.
        for kind in (*KINDS[turn % 3 :], *KINDS[: turn % 3]):
            found[kind].append(one.block(steps, kind))
    for kind in KINDS:
        pairs = zip(found[kind], found["without"], strict=True)
        more = [step - plain for (step, *_), (plain, *_) in pairs]
        columns = zip(*found[kind], strict=True)
        mine = (median(more), *(median(column) for column in columns))
        everyone = one.group.all_gather_object(mine)
        longer, step, launched, waited = (1e3 * max(c) for c in zip(*everyone, strict=True))
        if rank == 0:
            low, high = 1e3 * min(more), 1e3 * max(more)
            row: dict[str, Any] = {"ranks": world, "ballots": kind, "step_ms": step}
            row |= {"longer_ms": {"median": longer, "low": low, "high": high}}
            add_row(folder, row | {"cast_ms": launched, "read_ms": waited})
            span = f"({low:+.2f} to {high:+.2f})"
            print(
                f"{world:>5} {kind:>8} {step:>8.2f} {longer:>+8.3f} {span:>18} "
                f"{launched:>9.3f} {waited:>8.3f}",
                flush=True,
            )
    one.group.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--worlds", default="2,4", help="numbers of ranks, separated by commas")
    options = parser.parse_args()
    rounds, steps = (3, 5) if options.toy else (42, 25)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; ms, medians of {rounds} rounds")
    print("ranks  ballots     step     more       (all rounds)    launch     wait")
    with tempfile.TemporaryDirectory() as folder:
        for world in map(int, options.worlds.split(",")):
            torch.multiprocessing.spawn(measure, (world, rounds, steps, folder), nprocs=world)
        rows = rows_of(folder)
    if options.json:
        write_json(options.json, {"run": description(SHARED_MEMORY), "rows": rows})


if __name__ == "__main__":
    main()
