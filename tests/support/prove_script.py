"""A user's script, exact, or inexact in one way: `prove_script.py KIND [STEPS]`.

It runs alone, under torchrun, or under horovodrun.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import tierckpt

KIND, STEPS = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100
BY_EPOCH = KIND in ("epochs", "wrap", "counts")
"""The schedule steps at ends of epochs, and is not given to the Checkpointer."""
HOROVOD = "HOROVOD_RANK" in os.environ
RANK = int(os.environ.get("HOROVOD_RANK", os.environ.get("RANK", "0")))
RANKS = int(os.environ.get("HOROVOD_SIZE", os.environ.get("WORLD_SIZE", "1")))


class Drawn(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from a generator not found, as it is one of many."""

    def __init__(self) -> None:
        self.many = [random.Random(1)] * 100

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 64 + self.many[0].random())


def drawn(data: Any) -> Iterator[torch.Tensor]:
    for epoch in range(data.epoch, 1000):
        data.set_epoch(epoch)
        yield from data


def batches(sampler: tierckpt.ResumableSampler, schedule: Any) -> Iterator[torch.Tensor]:
    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(5)))
    loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())
    for epoch in range(sampler.epoch, 1000):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            yield batch
        if BY_EPOCH:
            schedule.step()


def attach(net: torch.nn.Module, opt: Any, extra: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Model, optimizer and checkpointer, as each library has them."""
    if HOROVOD:
        import horovod.torch as hvd

        import horovod_ckpt

        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        opt = hvd.DistributedOptimizer(opt, net.named_parameters())
        return net, opt, horovod_ckpt.install(opt, net, path="ckpts", extra=extra)
    if RANKS == 1:
        return net, opt, tierckpt.Checkpointer(net, opt, path="ckpts", extra=extra)
    import ddp_ckpt

    net = DistributedDataParallel(net)
    if KIND == "wrap":
        ddp_ckpt.wrap(opt, net, path="ckpts", extra=extra)
        return net, opt, opt.checkpointer
    return net, opt, ddp_ckpt.Checkpointer(net, opt, path="ckpts", extra=extra)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    random.seed(3)
    net: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1)
    )
    opt: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    sampler = tierckpt.ResumableSampler(range(64), batch_size=4, rank=RANK, ranks=RANKS)
    extra = {"schedule": schedule, "position": sampler.position}
    if KIND in ("schedule", "position"):
        del extra[KIND]
    if BY_EPOCH:
        del extra["schedule"]
    if KIND == "fails":
        sys.exit("it does not get far")
    if KIND == "hangs":
        threading.Event().wait()
    data: Any = tierckpt.ResumableLoader(DataLoader(Drawn(), batch_size=4))
    if KIND == "draws":
        extra["data"] = data
    net, opt, ckpt = attach(net, opt, extra)
    start = 0 if KIND in ("afresh", "wrap") else int(ckpt.restore())
    if KIND == "python":
        noise = [random.random() for _ in range(8)]
    source = drawn(data) if KIND == "draws" else batches(sampler, schedule)
    pairs = zip(range(start, STEPS), source, strict=False)
    for number, (_, batch) in enumerate(pairs):
        if KIND == "counts":
            opt.param_groups[0]["lr"] = 0.1 / (1 + number)
        opt.zero_grad()
        if KIND == "urandom":
            batch = batch + int.from_bytes(os.urandom(4), "big") / 2**32
        if KIND == "python":
            batch = batch + random.choice(noise)
        net(batch).square().mean().backward()
        if KIND == "expands":
            net[0].weight.grad = net[0].weight.grad[:1].expand(8, 8)
        opt.step()
        if KIND == "clamps":
            with torch.no_grad():
                net[0].weight.clamp_(-0.3, 0.3)
        if not BY_EPOCH:
            schedule.step()
        if KIND != "draws":
            sampler.step()
        if KIND != "wrap":
            ckpt.step()
    ckpt.close()


if __name__ == "__main__":
    if HOROVOD:
        import horovod.torch as hvd

        hvd.init()
    elif RANKS > 1:
        dist.init_process_group("gloo")
    main()
    if not HOROVOD and RANKS > 1:
        dist.destroy_process_group()
