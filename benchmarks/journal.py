"""What does it cost to have every step on disk: a version at each, or the journal of gradients?

    python benchmarks/journal.py --toy
    python benchmarks/journal.py --json journal.json

Two twins of one model take turns in the same two ranks: one takes a version to local at every
step, the other has the journal. Each trains blocks with it and blocks without, and the difference
is its cost. With both the training waits for the disk if it must (`when_busy="wait"`), and a
block ends when its last step is on disk. Then the job with the journal ends as in a crash, and
another one restores it.

alone_seconds    a step of the blocks without
step_seconds     a step of the blocks with it, its part of the last wait included
slower_seconds   the difference by round
step_bytes       bytes of a step in files, of both ranks

A block with it starts after a version on disk. The restored parameters must be equal. For a slower
disk, run it in a control group with a limit of write_bps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
from lib.figures import spread
from lib.files import clean_up_when_terminated, temporary
from lib.machine import description, scratch_parent
from lib.ranks import rows_of_ranks
from lib.report import publish
from lib.step_models import mlp
from lib.terminal import parser_of
from tierckpt.core.levels import LOCAL, MEMORY
from tierckpt.core.parts import call
from tierckpt.journal.segments import FOLDER

VERSIONS, JOURNAL = "a version at every step", "the journal"
Batch = tuple[torch.Tensor, torch.Tensor]
NEVER = 1_000_000
BATCH = 64
SETTINGS: dict[str, dict[str, Any]] = {
    VERSIONS: {"local_every_steps": 1},
    JOURNAL: {"local_journal_steps": NEVER},
}


class Side:
    """One twin."""

    def __init__(self, way: str, options: argparse.Namespace, folder: Path, memory: str) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(mlp(options.layers, options.width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.way = way
        self.folder = folder / way.replace(" ", "-")
        self.base = 0
        """The version with which the last recorded block started."""
        self.ckpt: Any = ddp_ckpt.Checkpointer(
            self.model,
            self.optimizer,
            path=self.folder,
            shm_dir=memory,
            memory_every_steps=0,
            local_every_seconds=0,
            when_busy="wait",
            replicas="off",
            **SETTINGS[way],
        )

    def block(self, steps: int, batch: Batch, recorded: bool) -> float:
        """Train so many steps; returns the seconds of one. If `recorded`, all are on disk then."""
        if recorded:  # from a version on: the journal was stopped
            self.ckpt._schedule.requested = frozenset((MEMORY, LOCAL))
            self._train(1, batch, recorded)
            self.ckpt.wait()
            self.base = self.ckpt.version
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


def measure(memory: str, options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run one rank; yields the rows, and a line about the restart."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    batch = torch.randn(BATCH, options.width), torch.randint(10, (BATCH,))
    sides = [Side(way, options, folder, memory) for way in SETTINGS]
    found: dict[tuple[str, bool], list[float]] = {}
    for number in range(options.rounds + 1):
        for side in sides if number % 2 else sides[::-1]:
            for recorded in (False, True) if number % 2 else (True, False):
                seconds = side.block(options.steps, batch, recorded)
                samples = found.setdefault((side.way, recorded), [])
                samples += [seconds] if number else []  # the first one makes slots and files
    _, journal = sides
    journal.block(options.steps, batch, True)
    steps = journal.ckpt.version
    for side in sides:
        alone, with_it = found[side.way, False], found[side.way, True]
        slower = spread(s - a for s, a in zip(with_it, alone, strict=True))
        yield {
            "way": side.way,
            "alone_seconds": asdict(spread(alone)),
            "step_seconds": asdict(spread(with_it)),
            "slower_seconds": asdict(slower),
            "step_bytes": side.bytes_a_step() if rank == 0 else 0,
        }
    dist.barrier()
    journal.ckpt.abandon()
    again = Side(journal.way, options, folder, memory)
    restored = again.ckpt.restore()
    assert restored.version == steps
    assert all(map(torch.equal, again.model.parameters(), journal.model.parameters()))
    yield {
        "replayed": restored.replayed,
        "replay_seconds": restored.seconds["replay"] / restored.replayed,
        "load_seconds": restored.seconds["load"],
        "state_bytes": sum(3 * p.nbytes for p in journal.model.parameters()),
    }
    for side in (sides[0], again):
        side.ckpt.abandon()


def main() -> None:
    parser = parser_of(__doc__, place="where files are written; default a disk")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    options = parser.parse_args()
    options.layers, options.width = (2, 64) if options.toy else (4, 2048)  # 201 MB
    if options.toy:
        options.rounds, options.steps = 2, 3
    parent = options.dir or scratch_parent()
    about = description(parent)
    clean_up_when_terminated()
    with temporary(parent) as folder:
        *rows, replay = rows_of_ranks(measure, 2, options, folder)
    publish(options.json, about, rows=rows, replay=replay)
    replay_ms = 1e3 * replay["replay_seconds"]
    print(f"\na restart made {replay['replayed']} steps again, in {replay_ms:.0f} ms each")


if __name__ == "__main__":
    main()
