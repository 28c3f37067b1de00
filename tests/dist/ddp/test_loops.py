"""Different kinds of loops give the same bits with checkpoints as without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.training import Job, Net, Place, attach, make_job, sgd

many_buckets = {"bucket_cap_mb": 0.003}
normed = partial(Net, norm=nn.BatchNorm1d)


def accumulate(job: Job, iteration: int) -> None:
    job.optimizer.zero_grad()
    for part in range(3):
        with job.model.no_sync() if part < 2 else nullcontext():
            job.loss(iteration, part).backward()
    job.optimizer.step()


def accumulate_over_iterations(job: Job, iteration: int) -> None:
    """Every iteration synchronizes, every third one makes a step."""
    job.loss(iteration).backward()
    if iteration % 3 == 2:
        job.optimizer.step()
        job.optimizer.zero_grad()


def two_forwards(job: Job, iteration: int) -> None:
    job.optimizer.zero_grad()
    (job.loss(iteration, 0) + job.loss(iteration, 1)).backward()
    job.optimizer.step()


def evaluate_between(job: Job, iteration: int) -> None:
    """Evaluate in evaluation mode, and in training mode without gradients, which changes
    BatchNorm."""
    job.iterate(iteration)
    with torch.no_grad():
        job.model.eval()
        job.loss(iteration, 5)
        job.model.train()
        job.loss(iteration, 6)


def fail_and_continue(job: Job, iteration: int) -> None:
    """Errors that a loop catches: before the forward, and between backward and step."""
    for attempt in range(2):
        try:
            if attempt == 0 and iteration % 3 == 1:
                raise ValueError("a bad batch")
            job.optimizer.zero_grad()
            job.loss(iteration).backward()
            if attempt == 0 and iteration % 3 == 2:
                raise ValueError("a bad loss")
            job.optimizer.step()
        except ValueError:
            continue
        return


def rewrite_gradients(job: Job, iteration: int) -> None:
    job.model.zero_grad(set_to_none=False)
    job.loss(iteration).backward()
    for p in job.model.parameters():
        p.grad = p.grad.sign()
    job.optimizer.step()


def accumulate_into_what_is_kept(job: Job, iteration: int) -> None:
    """Gradients are views of buckets in every pass; only the first iteration starts with new
    ones."""
    job.optimizer.zero_grad(set_to_none=False)
    for part in range(2):
        job.loss(iteration, part).backward()
    job.optimizer.step()


def keep_some(job: Job, iteration: int) -> None:
    """In one bucket, some gradients are views from the start and others are new."""
    for number, param in enumerate(job.bare.parameters()):
        if param.grad is not None and number % 2:
            param.grad.zero_()
        else:
            param.grad = None
    job.loss(iteration).backward()
    job.optimizer.step()


views = {"gradient_as_bucket_view": True, **many_buckets}

LOOPS: dict[str, tuple[int, Callable[[Job, int], None], dict[str, Any]]] = {
    "two forwards": (2, two_forwards, {"optimizer": sgd}),
    "evaluation between steps": (2, evaluate_between, {"net": normed}),
    "errors caught by the loop": (2, fail_and_continue, many_buckets),
    # DDP computes the mean in two ways, which differ if the world size is no power of two.
    "accumulation under no_sync": (3, accumulate, views),
    "accumulation over iterations": (3, accumulate_over_iterations, views),
    "accumulation into what is kept": (3, accumulate_into_what_is_kept, views),
    "some gradients kept": (3, keep_some, views),
    "gradients rewritten": (3, rewrite_gradients, views),
}
"""The number of ranks, the loop's body, and the options of the job."""


def looped_with_and_without(name: str, place: Place) -> tuple[Any, ...]:
    _, iterate, options = LOOPS[name]
    plain = make_job(**options)
    expected = {}
    for iteration in range(9):
        iterate(plain, iteration)
        expected[iteration + 1] = plain.digest()

    course = {}
    job = make_job(**options)
    attached = attach(job, place)
    for iteration in range(6):
        iterate(job, iteration)
        attached.ckpt.step()
        course[iteration + 1] = job.digest()
    # Up to the next step of the optimizer, which completes the last snapshot.
    for iteration in range(6, 9):
        iterate(job, iteration)
    version = attached.ckpt.version
    attached.ckpt.abandon()

    job = make_job(**options, seed=2)
    attached = attach(job, place)
    restored = attached.ckpt.restore()
    if name == "accumulation over iterations":
        job.optimizer.zero_grad()
    for iteration in range(restored, 9):
        iterate(job, iteration)
        attached.ckpt.step()
        course[iteration + 1] = job.digest()
    attached.ckpt.close()
    return expected, course, int(restored), restored.version == version


@pytest.mark.parametrize("name", LOOPS)
def test_the_loop_may_be_written_in_many_ways(name: str, ranks: Any, place: Place) -> None:
    size, *_ = LOOPS[name]
    told = ranks(size).run(looped_with_and_without, name, place)
    for expected, course, restored, is_newest in told:
        assert course == expected
        assert restored == 6
        assert is_newest
