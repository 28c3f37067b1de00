"""Communication hooks as users write them. No `from __future__ import annotations` here: DDP
compares the annotations themselves."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

Reduced = torch.futures.Future[torch.Tensor]


def sum_of_clamped(state: dict[str, int], bucket: dist.GradBucket) -> Reduced:
    """A hook with a state of its own."""
    state["calls"] = state.get("calls", 0) + 1
    clamped = bucket.buffer().clamp(-0.01, 0.01)
    work = dist.all_reduce(clamped, async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / 3)


def fails_at_the_second_call(state: dict[str, int], bucket: dist.GradBucket) -> Reduced:
    """`state` counts the calls."""
    state["calls"] = state.get("calls", 0) + 1
    if state["calls"] == 2:
        raise ZeroDivisionError("in the user's hook")
    return default_hooks.allreduce_hook(None, bucket)
