"""What does it cost to have every step on disk: a version at each, or the journal of gradients?

    python benchmarks/journal.py --toy
    python benchmarks/journal.py --json journal.json
    python benchmarks/journal.py --copies            # the journal, without and with copies

Two twins of one model take turns in the same two ranks: one takes a version to local at every
step, the other has the journal. Each trains blocks with it and blocks without, and the difference
is its cost. With both the training waits for the disk if it must (`when_busy="wait"`), and a
block ends when its last step is on disk. Then the job with the journal ends as in a crash, and
another one restores it. With `--copies` each rank is a node of its own, and the twins are the
journal without and with copies on the other node.

without      a step of the blocks without, median
step         a step of the blocks with it, its part of the last wait included, median
slower       the difference by round, median and range
MB a step    bytes in files, of both ranks

A block with it starts after a version on disk (with `--copies`: protected). The restored
parameters must be equal. For a slower disk, run it in a control group with a limit of write_bps.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
from lib.figures import Spread, spread
from lib.files import (
    SHARED_MEMORY,
    add_row,
    clean_up_when_terminated,
    rows_of,
    temporary,
    write_json,
)
from lib.machine import description, scratch_parent
from lib.report import align
from lib.step_models import mlp
from lib.terminal import parser_of
from tierckpt.core.levels import LOCAL, MEMORY
from tierckpt.core.parts import call
from tierckpt.journal.segments import FOLDER

VERSIONS, JOURNAL = "a version at every step", "the journal"
ALONE, COPIES = "the journal, two nodes", "with copies"
Batch = tuple[torch.Tensor, torch.Tensor]
NEVER = 1_000_000
PEERS = {"local_journal_steps": NEVER, "peer_redundancy": "partner", "peer_interface": "lo"}
SETTINGS: dict[str, dict[str, Any]] = {
    VERSIONS: {"local_every_steps": 1},
    JOURNAL: {"local_journal_steps": NEVER},
    ALONE: {**PEERS, "peer_redundancy": "none"},
    COPIES: PEERS,
}


@dataclass
class Row:
    """One way. Seconds are per step; bytes are on disk, per step, of all ranks."""

    way: str
    alone_seconds: Spread
    step_seconds: Spread
    slower_seconds: Spread
    step_bytes: int = 0


class Side:
    """One twin."""

    def __init__(self, way: str, options: argparse.Namespace, folder: Path, memory: Path) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(mlp(options.layers, options.width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.way = way
        self.folder = folder / way.replace(" ", "-")
        self.events: list[Any] = []
        self.protects = "peer_redundancy" in SETTINGS[way]
        self.base = 0
        """The version with which the last recorded block started."""
        places = {"path": self.folder}
        if self.protects:
            places = {"path": self.folder / "{node}", "node": f"node{dist.get_rank()}"}
        self.ckpt: Any = ddp_ckpt.Checkpointer(
            self.model,
            self.optimizer,
            shm_dir=memory,
            memory_every_steps=0,
            local_every_seconds=0,
            when_busy="wait",
            replicas="off",
            on_event=self.events.append,
            **places,
            **SETTINGS[way],
        )

    def block(self, steps: int, batch: Batch, recorded: bool) -> float:
        """Train so many steps; returns the seconds of one. If `recorded`, all are on disk then."""
        if recorded:  # from a version on: the journal was stopped
            self.ckpt._schedule.requested = frozenset((MEMORY, LOCAL))
            self._train(1, batch, recorded)
            self.ckpt.wait()
            self.base = self.ckpt.version
            while self.protects and not self._protected():
                self._train(1, batch, recorded)
        else:
            self._stop()
            self._train(1, batch, recorded)
        dist.barrier()
        begin = time.perf_counter()
        self._train(steps, batch, recorded)
        if recorded:
            self.ckpt.wait()
        dist.barrier()
        return (time.perf_counter() - begin) / steps

    def _train(self, steps: int, batch: Batch, recorded: bool) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(batch[0]), batch[1]).backward()
            self.optimizer.step()
            if recorded:
                self.ckpt.step()

    def _protected(self) -> bool:
        """Whether the other node has the parity of the version: making it is no part of a block."""
        here = [e.version for e in self.events if (e.name, e.level) == ("committed", "peer")]
        found = torch.tensor(int(self.base in here))
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return bool(found)

    def _stop(self) -> None:
        """Make no records before the next version."""
        call(self.ckpt._parts.pause)

    def bytes_a_step(self) -> int:
        """Bytes on disk of one step, of all ranks; those since the last block started."""
        version = self.ckpt.version
        if self.way == VERSIONS:
            files = self.folder.glob(f"v{version:010d}*.safetensors")
            return sum(path.stat().st_size for path in files)
        files = self.folder.rglob(f"{FOLDER}/v{self.base:010d}*")
        return sum(path.stat().st_size for path in files) // (version - self.base)


def measure(rank: int, options: argparse.Namespace, folder: Path, memory: Path) -> None:
    """Run one rank; rank 0 adds the rows."""
    logging.basicConfig()
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    torch.manual_seed(rank)
    batch = torch.randn(options.batch, options.width), torch.randint(10, (options.batch,))
    ways = (ALONE, COPIES) if options.copies else (VERSIONS, JOURNAL)
    sides = [Side(way, options, folder, memory) for way in ways]
    found: dict[tuple[str, bool], list[float]] = {}
    for number in range(options.rounds + 1):
        for side in sides if number % 2 else sides[::-1]:
            for recorded in (False, True) if number % 2 else (True, False):
                seconds = side.block(options.steps, batch, recorded)
                samples = found.setdefault((side.way, recorded), [])
                samples += [seconds] if number else []  # the first one makes slots and files
    journal = sides[1]
    sides[1].block(options.steps, batch, True)
    steps = journal.ckpt.version
    state_bytes = sum(3 * p.nbytes for p in journal.model.parameters())
    if rank == 0:
        for side in sides:
            alone, with_it = found[side.way, False], found[side.way, True]
            slower = [s - a for s, a in zip(with_it, alone, strict=True)]
            row = Row(side.way, spread(alone), spread(with_it), spread(slower))
            row.step_bytes = side.bytes_a_step()
            add_row(str(folder), asdict(row))
    dist.barrier()
    journal.ckpt.abandon()
    again = Side(journal.way, options, folder, memory)
    restored = again.ckpt.restore()
    assert restored.version == steps
    assert all(map(torch.equal, again.model.parameters(), journal.model.parameters()))
    if rank == 0:
        replay = {
            "replayed": restored.replayed,
            "replay_seconds": restored.seconds["replay"] / restored.replayed,
            "load_seconds": restored.seconds["load"],
            "state_bytes": state_bytes,
            "not_on_disk": [e.message for e in journal.events if "journal ends at" in e.message],
        }
        add_row(str(folder), replay)
    for side in (sides[0], again):
        side.ckpt.abandon()
    dist.barrier()
    dist.destroy_process_group()


def table(rows: list[Row]) -> str:
    """The table, one line for each way."""
    headers = ("way", "without, ms", "step, ms", "slower, ms (min..max)", "MB a step")
    lines = [
        (
            r.way,
            f"{1e3 * r.alone_seconds.median:.0f}",
            f"{1e3 * r.step_seconds.median:.0f}",
            _ms(r.slower_seconds),
            f"{r.step_bytes / 1e6:.1f}",
        )
        for r in rows
    ]
    return align([headers, *lines])


SPREADS = ("alone_seconds", "step_seconds", "slower_seconds")


def _row(values: dict[str, Any]) -> Row:
    spreads = {key: Spread(**values[key]) for key in SPREADS}
    return Row(**{**values, **spreads})


def _ms(found: Spread) -> str:
    return f"{1e3 * found.median:.0f} ({1e3 * found.low:.0f}..{1e3 * found.high:.0f})"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__, place="where files are written; default a disk")
    parser.add_argument("--copies", action="store_true", help="compare it with copies")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048, help="4 layers of 2048: 201 MB")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    options = parser.parse_args()
    if options.toy:
        options.layers, options.width, options.rounds, options.steps = 2, 64, 2, 3
    options.dir = options.dir or scratch_parent()
    return options


def main() -> None:
    options = arguments()
    about = description(options.dir)
    clean_up_when_terminated()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with temporary(options.dir) as folder, temporary(SHARED_MEMORY) as memory:
        torch.multiprocessing.spawn(measure, (options, folder, memory), nprocs=2)
        *found, replay = rows_of(str(folder))
        shutil.rmtree(folder, ignore_errors=True)
    rows = [_row(each) for each in found]
    megabytes, again_ms = replay["state_bytes"] / 1e6, 1e3 * replay["replay_seconds"]
    print(f"{about['cpu']}, {about['cores']} cores, {about['filesystem']}; 2 ranks")
    print(f"{megabytes:.0f} MB of parameters and AdamW; {options.rounds} rounds\n")
    print(table(rows))
    print(f"\na restart made {replay['replayed']} steps again, in {again_ms:.0f} ms each")
    for text in replay["not_on_disk"]:
        print(text)
    if options.json:
        document = {"run": about, "rows": [asdict(row) for row in rows], "replay": replay}
        write_json(options.json, document)


if __name__ == "__main__":
    main()
