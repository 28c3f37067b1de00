"""A small training on the GPU. Its results depend only on seed, rank and iteration, and, by
dropout, on the device's random stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_ckpt
import tierckpt
from tests.support import exact
from tierckpt.state import unwrap

WIDTH, HIDDEN, ROWS = 64, 512, 32

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw-capturable": lambda p: torch.optim.AdamW(p, capturable=True),
    "adam-capturable": lambda p: torch.optim.Adam(p, capturable=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@dataclass
class Job:
    """Objects of a training script."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    rank: int

    def iterate(self, iteration: int) -> str:
        """Run one iteration; returns its exact loss."""
        source = torch.Generator().manual_seed(1000 * self.rank + iteration)
        x = torch.randn(ROWS, WIDTH, generator=source).cuda()
        loss = (self.model(x) - x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item().hex()

    def digest(self) -> str:
        """Digest of all state that the next iteration depends on."""
        bare = unwrap(self.model)
        streams = [torch.get_rng_state(), torch.cuda.get_rng_state()]
        parts = [bare.state_dict(), self.optimizer.state_dict(), streams]
        return exact.digest(exact.image(on_host(parts)))


def on_host(value: Any) -> Any:
    """The same value, with tensors on the CPU and dicts sorted, as their order is no state."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_host(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [on_host(each) for each in value]
    return value


def make_job(optimizer: str = "adamw-fused", seed: int = 1, synchronized: bool = False) -> Job:
    """Job on the first GPU, with DDP if this process is in a group; `synchronized` BatchNorm."""
    torch.cuda.set_device(0)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Dropout(0.1), nn.Linear(HIDDEN, WIDTH)
    )
    if synchronized:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.cuda()
    made = OPTIMIZERS[optimizer](model.parameters())
    if dist.is_initialized():
        model = DistributedDataParallel(model, device_ids=[0])
    torch.manual_seed(100 * seed + rank)  # dropout differs by rank
    return Job(model, made, rank)


def attach(job: Job, path: str, shm_dir: str, **settings: Any) -> tierckpt.Checkpointer:
    """By default a version to memory at every step, and nothing to disk."""
    levels = {"local_every_steps": 0, "local_every_seconds": 0, **settings}
    return ddp_ckpt.Checkpointer(job.model, job.optimizer, path=path, shm_dir=shm_dir, **levels)


def train(job: Job, ckpt: tierckpt.Checkpointer, start: int, end: int) -> list[str]:
    """Run the ordinary loop; returns the losses."""
    losses = []
    for iteration in range(start, end):
        losses.append(job.iterate(iteration))
        ckpt.step()
    return losses


def resumes(path: str, shm_dir: str, steps: int = 5, **options: Any) -> dict[str, Any]:
    """Train and abandon the job as a crash would; restore in a job with another seed, and compare
    its further course with that of the first."""
    job = make_job(**options)
    ckpt = attach(job, path, shm_dir)
    ckpt.restore()
    train(job, ckpt, 0, steps)
    left = job.digest()
    following = [job.iterate(steps + i) for i in range(3)]
    ckpt.wait(60)
    ckpt.abandon()

    job = make_job(seed=77, **options)
    assert job.digest() != left
    again = attach(job, path, shm_dir)
    restored = again.restore()
    told = {
        "version": restored.version,
        "levels": restored.levels,
        "same state": job.digest() == left,
        "same losses": [job.iterate(steps + i) for i in range(3)] == following,
    }
    again.close()
    return told
