"""DDP's `join()`: ranks with different numbers of batches, which checkpoints do not support."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch.distributed as dist

import tierckpt
from tests.support.rank_pool import RankPool
from tests.support.training import Job, Place, attach, make_job


def train_joined(job: Job, step: Any, **settings: Any) -> int:
    """Train one batch more on each rank than on the previous rank; returns the number of trained
    batches."""
    made = 0
    with job.model.join(**settings):
        for iteration in range(3 + dist.get_rank()):
            job.iterate(iteration)
            step()
            made += 1
    return made


def refused_and_not(place: Place) -> dict[str, Any]:
    job = make_job()
    ckpt = attach(job, place).ckpt
    told: dict[str, Any] = {}
    with pytest.raises(tierckpt.UnsupportedStateError, match="join"):
        train_joined(job, ckpt.step)
    # The solutions that the error names. The loops of all ranks end with the shortest ...
    job, beside = make_job(), Place(f"{place.path} 2", place.shm)
    ckpt.abandon()
    ckpt = attach(job, beside).ckpt
    with contextlib.suppress(RuntimeError):
        train_joined(job, ckpt.step, throw_on_early_termination=True)
    told["thrown"] = ckpt.iteration
    # ... or the checkpointer is closed before.
    ckpt.close()
    job = make_job()
    attach(job, Place(f"{place.path} 3", place.shm)).ckpt.close()
    told["closed"], ours = [train_joined(job, int)], job.digest()
    plain = make_job()
    told["closed"] += [train_joined(plain, int)]
    told["same"] = ours == plain.digest()
    divides = {"divide_by_initial_world_size": False}
    job = make_job()
    attach(job, Place(f"{place.path} 4", place.shm)).ckpt.close()
    told["closed"] += [train_joined(job, int, **divides)]
    ours, plain = job.digest(), make_job()
    told["closed"] += [train_joined(plain, int, **divides)]
    told["same"] = told["same"] and ours == plain.digest()
    # With this setting the module has a communication hook.
    job = make_job(find_unused_parameters=True)
    attach(job, Place(f"{place.path} 5", place.shm)).ckpt.close()
    with pytest.raises(tierckpt.UnsupportedStateError, match="divide_by_initial_world_size"):
        train_joined(job, int, **divides)
    return told


def test_a_join_that_would_hang_or_divide_otherwise_is_refused(
    pool: RankPool, place: Place
) -> None:
    told = pool.run(refused_and_not, place)
    for rank, each in enumerate(told):
        assert each == {"thrown": 3, "closed": [3 + rank] * 4, "same": True}
