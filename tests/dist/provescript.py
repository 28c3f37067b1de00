"""A script as users write them, exact, or inexact in one way: `provescript.py KIND [STEPS]`."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import tierckpt

KIND, STEPS = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def batches(sampler: tierckpt.ResumableSampler) -> Iterator[torch.Tensor]:
    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(5)))
    loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())
    for epoch in range(sampler.epoch, 1000):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            yield batch


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    random.seed(3)
    net: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1)
    )
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    sampler = tierckpt.ResumableSampler(range(64), batch_size=4, rank=rank(), ranks=RANKS)
    extra = {"schedule": schedule, "position": sampler.position}
    if KIND in ("schedule", "position"):
        del extra[KIND]
    if KIND == "fails":
        sys.exit("it does not get far")
    checkpointer_of = tierckpt.Checkpointer
    if RANKS > 1:
        import ddp_ckpt

        net, checkpointer_of = DistributedDataParallel(net), ddp_ckpt.Checkpointer
    with checkpointer_of(net, opt, extra=extra, path="ckpts") as ckpt:
        start = 0 if KIND == "afresh" else int(ckpt.restore())
        noise = [random.random() for _ in range(8)] if KIND == "python" else [0.0] * 8
        for _, batch in zip(range(start, STEPS), batches(sampler), strict=False):
            opt.zero_grad()
            if KIND == "urandom":
                batch = batch + int.from_bytes(os.urandom(4), "big") / 2**32
            if KIND == "python":
                batch = batch + random.choice(noise)
            net(batch).square().mean().backward()
            opt.step()
            schedule.step()
            sampler.step()
            ckpt.step()


def rank() -> int:
    return dist.get_rank() if RANKS > 1 else 0


if __name__ == "__main__":
    if RANKS > 1:
        dist.init_process_group("gloo")
    main()
    if RANKS > 1:
        dist.destroy_process_group()
