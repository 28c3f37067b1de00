"""`nn.SyncBatchNorm` for CPUs: torch's own has kernels for GPUs only.

It matters because its collectives use the training's group, in the forward pass and, in the
backward pass, between those of DDP. Their order is the same on all ranks only as long as no other
collective comes between them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Sum(torch.autograd.Function):
    """Sum over all ranks; its gradient is summed, too."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return _all_reduced(x)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _all_reduced(gradient)


class SyncNorm1d(nn.BatchNorm1d):
    """Mean and variance over the batches of all ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        total = torch.stack([x.new_full((self.num_features,), len(x)), x.sum(0), x.square().sum(0)])
        count, first, second = Sum.apply(total)  # type: ignore[no-untyped-call]
        mean = first / count
        variance = second / count - mean.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(variance * count / (count - 1), 0.1)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


def _all_reduced(x: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    if dist.is_initialized():
        dist.all_reduce(result)
    return result
