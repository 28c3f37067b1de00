"""Training computes the same bits with checkpoints as without, and the same after a crash."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.sync_norm import SyncNorm1d
from tests.support.training import (
    Job,
    Net,
    Place,
    Words,
    course_of,
    fused_adamw,
    make_job,
    no_boundary,
    sgd,
    through_a_crash,
)

CRASH = 4
END = 7

many_buckets = {"bucket_cap_mb": 0.003}
normed = partial(Net, norm=nn.BatchNorm1d)

VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (2, {}),
    "many buckets, rebuilt after the first iteration": (3, many_buckets),
    "gradients that stay views of buckets": (
        3,
        {"gradient_as_bucket_view": True, "keeps_gradients": True, **many_buckets},
    ),
    "gradients that stay views, unused parameters": (
        3,
        {
            "gradient_as_bucket_view": True,
            "keeps_gradients": True,
            "find_unused_parameters": True,
            "net": partial(Net, branch=True),
            **many_buckets,
        },
    ),
    "static graph": (3, {"static_graph": True, **many_buckets}),
    "unused parameters": (
        3,
        {"find_unused_parameters": True, "net": partial(Net, branch=True), **many_buckets},
    ),
    "fused AdamW": (2, {"optimizer": fused_adamw, **many_buckets}),
    "bfloat16": (3, {"dtype": torch.bfloat16, "optimizer": sgd, **many_buckets}),
    "sparse gradients": (3, {"net": Words, "optimizer": torch.optim.SparseAdam}),
    "sparse gradients, and views": (
        2,
        {
            "net": Words,
            "optimizer": torch.optim.SparseAdam,
            "gradient_as_bucket_view": True,
        },
    ),
    "BatchNorm": (3, {"net": normed, "optimizer": sgd}),
    "BatchNorm of each rank its own": (2, {"net": normed, "broadcast_buffers": False}),
    "SyncBatchNorm": (2, {"net": partial(Net, norm=SyncNorm1d), **many_buckets}),
}
"""The number of ranks, and options. With three, DDP sums in an order that depends on its
buckets."""


def plainly_restarted(options: dict[str, Any], job: Job) -> Job:
    """A new job that received its state from `job` by torch alone."""
    model, optimizer = job.bare.state_dict(), job.optimizer.state_dict()
    stream = torch.get_rng_state()
    again = make_job(**options, seed=3)
    again.bare.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    torch.set_rng_state(stream)
    return again


def trained_with_and_without(variant: str, crash: int, place: Place) -> dict[str, Any]:
    _, options = VARIANTS[variant]
    job = make_job(**options)
    plain = course_of(job, range(crash), no_boundary)
    restarted = course_of(plainly_restarted(options, job), range(crash, END), no_boundary)
    told = through_a_crash(lambda seed: make_job(**options, seed=seed), place, crash, END)
    return {**told, "restarted": {**plain, **restarted}}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_iteration_is_bit_for_bit_as_without(variant: str, ranks: Any, place: Place) -> None:
    """Compare with plain DDP without a disturbance, from the first iteration to the last.

    If DDP cannot get its buckets before the first pass: compare with plain DDP, its state copied to
    new objects at the point of our crash. With three ranks it sums in another order from there.
    """
    size, _ = VARIANTS[variant]
    primed = variant not in ("static graph", "unused parameters") and "sparse" not in variant
    for told in ranks(size).run(trained_with_and_without, variant, CRASH, place):
        assert told["complaints"] == []
        assert told["restored"] == (CRASH, {"memory": size})
        assert told["found"] == told["plain"][CRASH - 1][1]
        assert told["course"] == told["plain" if primed else "restarted"]
        assert told["sealed"] == list(range(1, CRASH + 1))


def test_also_from_the_first_version_on(ranks: Any, place: Place) -> None:
    """DDP has not made its final buckets yet at that time."""
    place, variant = (
        place,
        "many buckets, rebuilt after the first iteration",
    )
    for told in ranks(3).run(trained_with_and_without, variant, 1, place):
        assert told["restored"] == (1, {"memory": 3})
        assert told["course"] == told["plain"]


def test_a_job_of_one_process_is_a_job(ranks: Any, place: Place) -> None:
    (told,) = ranks(1).run(trained_with_and_without, "default", CRASH, place)
    assert told["complaints"] == []
    assert told["restored"] == (CRASH, {"memory": 1})
    assert told["course"] == told["plain"]
