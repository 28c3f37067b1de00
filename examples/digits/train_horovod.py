"""Drawn digits under elastic Horovod, with checkpoints: an example of a user's script.

    horovodrun -np 2 --min-np 2 --max-np 2 --host-discovery-script hosts.sh \\
        python examples/digits/train_horovod.py

The lines that Tierckpt needs are marked with `<-`; they replace `hvd.elastic.TorchState(model,
optimizer, ...)`. The rest follows the documentation of Horovod.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import horovod.torch as hvd
import torch
from digits import Batches, Journal, build_model, options
from torch import nn

from horovod_ckpt.elastic import TorchState  # <-


def main() -> None:
    """Train."""
    args = options(__doc__)
    hvd.init()
    torch.manual_seed(1234)
    model = build_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.steps)
    torch.manual_seed(1234 + hvd.rank())
    journal = Journal(args.journal, hvd.rank)
    first_run = True

    def train(state: Any) -> None:
        nonlocal first_run
        rank = hvd.rank()
        batches = Batches(rank, hvd.size())
        journal.write(start=state.step, at=time.time())
        first_run = first_run and state.step == 0
        while state.step < args.steps:
            begin, step = time.perf_counter(), state.step
            images, labels = batches.of_step(step)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            if step == args.kill_step and rank == 1 and first_run:
                journal.killed(step)
            optimizer.step()
            schedule.step()
            state.step += 1
            state.commit()
            seconds = time.perf_counter() - begin
            journal.write(step=step, loss=loss.item().hex(), step_seconds=seconds, at=time.time())
        journal.write(done=True, at=time.time())

    if args.plain:
        # The optimizer has no state yet; to broadcast it, Horovod would make a step.
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train(SimpleNamespace(step=0, commit=lambda: None))
        return
    state = TorchState(  # <-
        model,
        optimizer,
        schedule=schedule,
        step=0,
        tierckpt={  # <-
            "path": args.path,
            "memory_every_steps": 1,
            "local_every_steps": 10,
            "slots": 3,
            "on_event": journal.event,
        },
    )
    hvd.elastic.run(train)(state)


if __name__ == "__main__":
    main()
