"""Training computes the same bits with checkpoints as without, and the same after a crash."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.sync_norm import SyncNorm1d
from tests.support.training import (
    Attached,
    Job,
    Net,
    Place,
    Words,
    attach,
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

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "many buckets, rebuilt after the first iteration": many_buckets,
    "gradients are views of buckets": {"gradient_as_bucket_view": True, **many_buckets},
    "gradients that are kept": {"keeps_gradients": True, **many_buckets},
    "gradients that stay views of buckets": {
        "gradient_as_bucket_view": True,
        "keeps_gradients": True,
        **many_buckets,
    },
    "gradients that stay views, unused parameters": {
        "gradient_as_bucket_view": True,
        "keeps_gradients": True,
        "find_unused_parameters": True,
        "net": partial(Net, branch=True),
        **many_buckets,
    },
    "static graph": {"static_graph": True, **many_buckets},
    "unused parameters": {
        "find_unused_parameters": True,
        "net": partial(Net, branch=True),
        **many_buckets,
    },
    "fused AdamW": {"optimizer": fused_adamw, **many_buckets},
    "float64": {"dtype": torch.float64, "optimizer": sgd},
    "bfloat16": {"dtype": torch.bfloat16, "optimizer": sgd, **many_buckets},
    "float16": {"dtype": torch.float16, "optimizer": sgd},
    "sparse gradients": {"net": Words, "optimizer": torch.optim.SparseAdam},
    "sparse gradients, and views": {
        "net": Words,
        "optimizer": torch.optim.SparseAdam,
        "gradient_as_bucket_view": True,
    },
    "BatchNorm": {"net": normed, "optimizer": sgd},
    "BatchNorm of each rank its own": {"net": normed, "broadcast_buffers": False},
    "SyncBatchNorm": {"net": partial(Net, norm=SyncNorm1d), **many_buckets},
}


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
    options = VARIANTS[variant]
    job = make_job(**options)
    plain = course_of(job, range(crash), no_boundary)
    restarted = course_of(plainly_restarted(options, job), range(crash, END), no_boundary)
    told = through_a_crash(lambda seed: make_job(**options, seed=seed), place, crash, END)
    return {**told, "restarted": {**plain, **restarted}}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_iteration_is_bit_for_bit_as_without(
    variant: str, size: int, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Compare with plain DDP without a disturbance, from the first iteration to the last.

    If DDP cannot get its buckets before the first pass: compare with plain DDP, its state copied to
    new objects at the point of our crash. With three ranks it sums in another order from there.
    """
    primed = variant not in ("static graph", "unused parameters") and "sparse" not in variant
    place = Place.under(tmp_path, shm_dir)
    for told in ranks(size).run(trained_with_and_without, variant, CRASH, place):
        assert told["complaints"] == []
        assert told["restored"] == (CRASH, {"memory": size})
        assert told["found"] == told["plain"][CRASH - 1][1]
        assert told["course"] == told["plain" if primed else "restarted"]
        assert told["sealed"] == list(range(1, CRASH + 1))


FIRST = ["many buckets, rebuilt after the first iteration", "BatchNorm"]


@pytest.mark.parametrize("variant", FIRST)
def test_also_from_the_first_version_on(
    variant: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """DDP has not made its final buckets yet at that time."""
    place = Place.under(tmp_path, shm_dir)
    for told in ranks(3).run(trained_with_and_without, variant, 1, place):
        assert told["restored"] == (1, {"memory": 3})
        assert told["course"] == told["plain"]


def two_networks(way: str, place: Place) -> dict[str, Any]:
    def networks(seed: int) -> Job:
        job = make_job(seed=seed, **many_buckets)
        parts = [job.bare.body.parameters(), job.bare.head.parameters()]
        job.optimizers = [torch.optim.AdamW(parts[0]), sgd(parts[1], lr=0.1)]
        return job

    def arranged(job: Job, place: Place) -> Attached:
        given = dict(zip("ab", job.optimizers, strict=True)) if way == "dict" else job.optimizers
        return attach(job, place, optimizer=given)

    return through_a_crash(networks, place, CRASH, END, arranged)


@pytest.mark.parametrize("way", ["dict", "list"])
def test_several_optimizers_share_one_model(
    way: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for told in ranks(2).run(two_networks, way, Place.under(tmp_path, shm_dir)):
        assert told["course"] == told["plain"]
        assert told["restored"] == (CRASH, {"memory": 2})


@pytest.mark.parametrize("process_group", [True, False])
def test_a_job_of_one_process_is_a_job(
    process_group: bool, ranks: Any, own_ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    pool = ranks(1) if process_group else own_ranks([{}], process_group=False)
    (told,) = pool.run(trained_with_and_without, "default", CRASH, Place.under(tmp_path, shm_dir))
    assert told["complaints"] == []
    assert told["restored"] == (CRASH, {"memory": 1})
    assert told["course"] == told["plain"]
