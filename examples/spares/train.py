"""One rank of the experiment: a small net on made-up data, a checkpoint at every step.

experiment.py starts it like a launcher, with RANK, WORLD_SIZE and the file of the rendezvous.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt

WIDTH = 64
BATCH = 32


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data of a rank in a step, the same in every run."""
    source = torch.Generator().manual_seed(1_000_003 * rank + step)
    x = torch.randn(BATCH, WIDTH, generator=source)
    return x, (x[:, :8].sum(1) > 0).long()


def build_model() -> nn.Module:
    """Make a net with BatchNorm and dropout, which make an exact restart difficult."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, 2),
    )


def main() -> None:
    """Train until `steps`, or until this process is killed."""
    work, meeting, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1000 + rank)
    journal = (work / f"journal-r{rank}.jsonl").open("a", buffering=1)

    def write(**values: object) -> None:
        journal.write(json.dumps({"at": time.time(), **values}) + "\n")

    ckpt = ddp_ckpt.Checkpointer(
        model,
        optimizer,
        path=str(work / "disks" / "{node}"),
        local_every_steps=2,
        local_every_seconds=0,
        peer_redundancy="xor",
        slots=3,
        on_event=lambda e: write(event=e.name, level=e.level, version=e.version, message=e.message),
    )
    begin = time.perf_counter()
    start = ckpt.restore()
    seconds = time.perf_counter() - begin
    write(start=int(start), levels=ckpt.restored.levels, seconds=seconds, ranks=ranks)
    for step in range(start, steps):
        x, y = batch(step, rank)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ckpt.step()
        write(step=step, loss=loss.item().hex())
        time.sleep(0.02)  # a net this small would be faster than the experiment's observation
    ckpt.close()
    write(done=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
