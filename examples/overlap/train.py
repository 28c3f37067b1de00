"""Copies and allreduces at the same time: `make overlap` runs this, and `tierckpt report`.

    TIERCKPT_TRACE_DIR=traces HOROVOD_TIMELINE=hvd.json \\
        horovodrun --gloo -np 2 python examples/overlap/train.py ckpts

The net has wide layers, so that their allreduces take as long as those of a real model.
"""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch

import horovod_ckpt

LAYERS, WIDTH, ROWS, STEPS = 8, 1024, 256, 24


def main() -> None:
    """Train on random numbers; only the trace matters."""
    hvd.init()
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())
            for _ in range(LAYERS)
        )
    )
    optimizer = horovod_ckpt.DistributedOptimizer(
        torch.optim.Adam(net.parameters(), lr=1e-4),
        named_parameters=net.named_parameters(),
        model=net,
        path=sys.argv[1],
        release="backward",
    )
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    for _ in range(STEPS):
        batch = torch.randn(ROWS, WIDTH)
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.checkpointer.step()
    optimizer.checkpointer.close()


if __name__ == "__main__":
    main()
