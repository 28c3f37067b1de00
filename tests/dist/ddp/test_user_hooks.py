"""The user's hooks on parameters, beside ours."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support.training import Job, Place, attach, course_of, make_job, no_boundary

CRASH = 4
END = 7

many_buckets = {"bucket_cap_mb": 0.003}


def noisy_job(seed: int = 1) -> tuple[Job, Counter[str]]:
    """A job with hooks that draw from every random stream, and count their calls."""
    calls: Counter[str] = Counter()
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
    return job, calls


def trained_with_noise(place: Place) -> dict[str, Any]:
    job, _ = noisy_job()
    plain = course_of(job, range(END), no_boundary)
    job, _ = noisy_job()
    first = attach(job, place)
    course = course_of(job, range(CRASH), first.ckpt.step)
    first.ckpt.abandon()
    job, calls = noisy_job(seed=2)
    second = attach(job, place)
    restored = second.ckpt.restore()
    heard = dict(calls)
    course.update(course_of(job, range(restored, END), second.ckpt.step))
    second.ckpt.abandon()
    return {"plain": plain, "course": course, "restored": int(restored), "heard": heard}


def test_hooks_on_parameters_receive_only_the_gradients_of_training(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Three ranks: DDP gets its buckets by a simulated pass."""
    for told in ranks(3).run(trained_with_noise, Place.under(tmp_path, shm_dir)):
        assert told["restored"] == CRASH
        assert told["heard"] == {}
        assert told["course"] == told["plain"]
