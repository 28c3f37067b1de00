"""Handwritten digits on two ranks, with checkpoints: what a user's own script looks like.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/digits/train.py

The lines that Tierckpt needs are marked with `<-`. The rest is an ordinary DDP script: a small
convolutional net with BatchNorm and dropout, AdamW, a one-cycle schedule, a shuffled sampler.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

import ddp_ckpt  # <-

BATCH = 64


def build_model() -> nn.Module:
    """A net that learns the digits in a minute, with everything that makes resuming hard."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(128 * 16, 128),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(128, 10),
    )


class Batches:
    """The batch of any step: a shuffled sampler per epoch, so a resumed job draws the same ones."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        x = torch.from_numpy(images.astype(np.float32) / 16).reshape(-1, 1, 8, 8)
        self.data = TensorDataset(x, torch.from_numpy(labels))
        self.sampler = DistributedSampler(self.data, shuffle=True, seed=7, drop_last=True)
        self.per_epoch = len(self.sampler) // BATCH
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def of_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels of this rank in this step."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self.sampler.set_epoch(epoch)
            self._epoch, self._order = epoch, torch.tensor(list(self.sampler))
        chosen = self._order[index * BATCH : (index + 1) * BATCH]
        images = self.data.tensors[0][chosen]
        return images + 0.05 * torch.randn_like(images), self.data.tensors[1][chosen]


class Journal:
    """Where the demo reads what happened: one JSON line a step."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._file = (folder / f"steps-r{rank}.jsonl").open("a", buffering=1) if folder else None

    def write(self, **values: object) -> None:
        """Add a line."""
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--path", default="ckpts", help="where checkpoints go")
    parser.add_argument("--journal", type=Path, help="folder for one JSON line a step")
    parser.add_argument("--plain", action="store_true", help="no checkpoints at all")
    parser.add_argument("--kill-step", type=int, default=-1, help="SIGKILL rank 1 in this step")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    journal = Journal(args.journal, rank)
    torch.manual_seed(1234 + rank)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.steps)
    batches = Batches()

    start, ckpt = 0, None
    if not args.plain:
        ckpt = ddp_ckpt.Checkpointer(  # <-
            model,
            optimizer,
            path=args.path,
            extra={"schedule": schedule},
            memory_every_steps=1,
            local_every_steps=10,
            slots=3,
            on_event=lambda e: journal.write(
                event=e.name, version=e.version, level=e.level, seconds=e.seconds, at=time.time()
            ),
        )
        start = ckpt.restore()  # <-
    journal.write(start=int(start), at=time.time())

    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for step in range(start, args.steps):
        begin = time.perf_counter()
        images, labels = batches.of_step(step)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        if step == args.kill_step and rank == 1 and first_life:
            journal.write(killed=step, at=time.time())
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        schedule.step()
        if ckpt is not None:
            ckpt.step()  # <-
        seconds = time.perf_counter() - begin
        journal.write(step=step, loss=loss.item().hex(), step_seconds=seconds, at=time.time())
    if ckpt is not None:
        ckpt.close()  # <-
    journal.write(done=True, at=time.time())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
