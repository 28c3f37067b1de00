"""One rank of a small DDP job, started by any launcher: torchrun, mpirun or srun.

The scripts next to this file set the checkpointer's settings, as TIERCKPT_... variables.
"""

from __future__ import annotations

import argparse
import hashlib
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
import tierckpt

WIDTH = 64
BATCH = 32
LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Variables with rank and number of ranks, set by torchrun, mpirun and srun."""


def place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without a launcher."""
    for rank, ranks in LAUNCHERS:
        if rank in os.environ and ranks in os.environ:
            return int(os.environ[rank]), int(os.environ[ranks])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return 0, 1


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


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data of a rank in a step, the same in every run."""
    source = torch.Generator().manual_seed(1_000_003 * rank + step)
    x = torch.randn(BATCH, WIDTH, generator=source)
    return x, (x[:, :8].sum(1) > 0).long()


def digest(model: nn.Module) -> str:
    """Return a hash of the weights: equal on all ranks, and another one after every step."""
    hashed = hashlib.sha256()
    for weights in model.parameters():
        hashed.update(weights.detach().numpy().tobytes())
    return hashed.hexdigest()[:16]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Do the forward pass, the backward pass and the optimizer's step; return the loss."""
    x, y = batch
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


class Journal:
    """JSON lines of a rank, to compare a restarted run with an undisturbed one."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"journal-r{rank}.jsonl").open("a", buffering=1)

    def write(self, **values: object) -> None:
        """Add a line."""
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-seconds", type=float, default=0.1, help="pause after a step")
    parser.add_argument(
        "--halted-status",
        type=int,
        default=0,
        help="exit status after a signal or the end of the allocation",
    )
    parser.add_argument("--journal", type=Path, help="folder for a JSON line per step and rank")
    return parser.parse_args()


def main() -> int:
    """Train; return the exit status."""
    args = options()
    rank, ranks = place()
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1000 + rank)
    journal = Journal(args.journal, rank)

    def on_event(event: tierckpt.Event) -> None:
        journal.write(event=event.name, level=event.level, version=event.version)

    ckpt = ddp_ckpt.Checkpointer(model, optimizer, on_event=on_event)
    start = ckpt.restore()
    levels = ckpt.restored.levels
    journal.write(start=int(start), ranks=ranks, levels=levels, digest=digest(model))
    if rank == 0:
        source = f"shards from {levels}" if levels else "a fresh start"
        print(f"{ranks} ranks start at step {int(start)}: {source}", flush=True)
    for step in range(start, args.steps):
        loss = train_step(model, optimizer, batch(step, rank))
        ckpt.step()
        journal.write(step=step, loss=loss.item().hex(), digest=digest(model))
        if ckpt.should_exit():  # the same on all ranks
            break
        time.sleep(args.step_seconds)
    ckpt.close()
    finished = ckpt.iteration == args.steps
    journal.write(done=finished)
    dist.barrier()
    dist.destroy_process_group()
    return args.halted_status if ckpt.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
