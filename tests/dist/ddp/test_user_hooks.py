"""The user's hooks on parameters, beside ours."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support.training import Job, Place, make_job, through_a_crash

CRASH = 4
END = 7

many_buckets = {"bucket_cap_mb": 0.003}


def noisy_job(seed: int, calls: Counter[str]) -> Job:
    """A job with hooks that draw from every random stream, and count their calls."""
    job = make_job(seed=seed, **many_buckets)

    def noise(gradient: torch.Tensor) -> torch.Tensor:
        calls["noise"] += 1
        return gradient + 0.01 * random.random() * np.random.rand() * torch.randn_like(gradient)

    def shrink(param: torch.Tensor) -> None:
        calls["shrink"] += 1
        param.grad.mul_(0.5)

    for param in job.bare.parameters():
        param.register_hook(noise)
        param.register_hook(lambda gradient: gradient.clamp(-1, 1)).remove()
        param.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        param.register_post_accumulate_grad_hook(shrink)
        # On autograd's node of the parameter: Python cannot suspend this one.
        node = param.view_as(param).grad_fn.next_functions[0][0]
        node.register_prehook(lambda gradients: torch.rand(1) and None)
    random.seed(1000 * seed + dist.get_rank())
    np.random.seed(1000 * seed + dist.get_rank())
    return job


def trained_with_noise(place: Place) -> dict[str, Any]:
    """And the calls of the hooks in the continued job, for each parameter."""
    calls: Counter[str] = Counter()

    def make(seed: int) -> Job:
        calls.clear()
        return noisy_job(seed, calls)

    told = through_a_crash(make, place, CRASH, END)
    layers = len(list(make_job().bare.parameters()))
    return {**told, "heard": {name: count / layers for name, count in calls.items()}}


def test_hooks_on_parameters_receive_only_the_gradients_of_training(
    ranks: Any, place: Place
) -> None:
    """Three ranks: DDP gets its buckets by a simulated pass."""
    for told in ranks(3).run(trained_with_noise, place):
        assert told["restored"] == (CRASH, {"memory": 3})
        assert told["heard"] == {"noise": END - CRASH, "shrink": END - CRASH}
        assert told["course"] == told["plain"]
