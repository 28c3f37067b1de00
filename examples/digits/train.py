"""Drawn digits on two ranks, with checkpoints: an example of a user's script.

    torchrun --nproc-per-node 2 -m tierckpt.run examples/digits/train.py

The lines that Tierckpt needs are marked with `<-`. The rest is an ordinary DDP script: a small
convolutional net with BatchNorm and dropout, AdamW, a one-cycle schedule, a shuffled sampler.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from digits import Batches, Journal, build_model, options
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt  # <-


def main() -> None:
    """Train."""
    args = options(__doc__)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    journal = Journal(args.journal, dist.get_rank)
    torch.manual_seed(1234 + rank)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.steps)
    batches = Batches(rank, dist.get_world_size())

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
            on_event=journal.event,
        )
        start = ckpt.restore()  # <-
    journal.write(start=int(start), at=time.time())

    first_run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for step in range(start, args.steps):
        begin = time.perf_counter()
        images, labels = batches.of_step(step)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        if step == args.kill_step and rank == 1 and first_run:
            journal.killed(step)
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
    # Without this pause gloo's thread may still need the interpreter's lock to release its part of
    # the barrier, while torch holds that lock and waits for the thread: a deadlock.
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
