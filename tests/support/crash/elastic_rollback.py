"""Elastic state in one process that makes some commits and dies: elastic_rollback.py FOLDER SHM N.
Prints the batch that it starts with, and the one after `state.restore()`."""

from __future__ import annotations

import os
import signal
import sys

import horovod.torch as hvd
import torch

from horovod_ckpt.elastic import TorchState


def main(folder: str, shm_dir: str, batches: int) -> None:
    hvd.init()
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    optimizer._register_hooks()  # Horovod omits it for one process, but not in an elastic job
    settings = {"path": f"{folder}/ckpts", "shm_dir": shm_dir, "local_every_steps": 1}
    settings |= {"local_every_seconds": 0, "local_keep": 50, "when_busy": "wait"}
    state = TorchState(model, optimizer, batch=0, tierckpt=settings)
    state.sync()
    started = state.batch
    for _ in range(batches):
        optimizer.zero_grad()
        model(torch.full((3, 4), float(state.batch))).sum().backward()
        optimizer.step()
        state.batch += 1
        state.commit()
    state.checkpointer.wait()
    if batches:
        state.restore()
    print(f"begun {started}, restored {state.batch}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
