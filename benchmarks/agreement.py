"""How much does the agreement of the ranks cost? DDP training with a ballot at each boundary.

    python benchmarks/agreement.py --toy
    python benchmarks/agreement.py --json agreement.json

No other part of Tierckpt is attached. Three kinds of blocks take turns in the same processes:
steps without ballots, with ballots in a shared page of memory (ranks of one node), and with
ballots over gloo (ranks of several nodes). The figures are differences within a round, so that
other load of the machine affects all of them equally.

step_ms     a step, slowest rank, median of the blocks
longer_ms   excess over a step without a ballot, median of the rounds, and rank 0's range: the noise
cast_ms     its part in the call that casts the vote; read_ms: that reads the previous ballot
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_ckpt import TorchGroup
from lib.files import SHARED_MEMORY
from lib.machine import description
from lib.ranks import rows_of_ranks
from lib.report import publish
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


def measure(folder: str, rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Run one rank; yields the rows."""
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
        longer, step, cast, read = (1e3 * max(column) for column in zip(*everyone, strict=True))
        yield {
            "ranks": one.group.size,
            "ballots": kind,
            "step_ms": step,
            "longer_ms": {"median": longer, "low": 1e3 * min(more), "high": 1e3 * max(more)},
            "cast_ms": cast,
            "read_ms": read,
        }
    one.group.close()


def main() -> None:
    options = parser_of(__doc__).parse_args()
    rows = rows_of_ranks(measure, 2, *((3, 5) if options.toy else (42, 25)))
    publish(options.json, description(SHARED_MEMORY), rows=rows)


if __name__ == "__main__":
    main()
