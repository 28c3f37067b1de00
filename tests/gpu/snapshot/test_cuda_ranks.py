"""Real ranks that train on one GPU: over gloo, over NCCL, and killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import cuda_ranks
from tests.support.cuda_job import attach, make_job, resumes, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

STEPS, KILLED_AT = 10, 6


@pytest.fixture
def place(tmp_path: Path, shm_dir: Path) -> dict[str, str]:
    """Place of the job's checkpoints."""
    return {"path": str(tmp_path / "c"), "shm_dir": str(shm_dir)}


def exactly(version: int, shards: int) -> dict[str, Any]:
    return {
        "version": version,
        "levels": {"memory": shards},
        "same state": True,
        "same losses": True,
    }


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adam-capturable", "sgd"])
def test_two_ranks_on_one_gpu_resume_each_with_its_own_random_stream(
    optimizer: str, place: dict[str, str], tmp_path: Path
) -> None:
    assert cuda_ranks.run(resumes, tmp_path, optimizer=optimizer, **place) == [exactly(5, 2)] * 2


def test_synchronized_batch_norm_resumes(place: dict[str, str], tmp_path: Path) -> None:
    assert cuda_ranks.run(resumes, tmp_path, synchronized=True, **place) == [exactly(5, 2)] * 2


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_nccl_available()), reason="this torch has no NCCL"
)
def test_ddp_over_nccl_at_world_size_one_resumes(place: dict[str, str], tmp_path: Path) -> None:
    assert cuda_ranks.run(resumes, tmp_path, world=1, backend="nccl", **place) == [exactly(5, 1)]


# --- killed --------------------------------------------------------------------------------------


def kill_in_backward(gradient: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in_backward(path: str, shm_dir: str) -> None:
    job = make_job()
    ckpt = attach(job, path, shm_dir)
    ckpt.restore()
    train(job, ckpt, 0, KILLED_AT)
    ckpt.wait(60)
    dist.barrier()  # now the newest version is sealed on both
    if job.rank == 1:
        next(iter(job.model.parameters())).register_hook(kill_in_backward)
    job.iterate(KILLED_AT)


def comes_back(path: str, shm_dir: str) -> dict[str, Any]:
    job = make_job(seed=77)
    ckpt = attach(job, path, shm_dir)
    start = ckpt.restore()
    losses = train(job, ckpt, start, STEPS)
    told = {"begin": int(start), "levels": start.levels, "losses": losses, "end": job.digest()}
    ckpt.close()
    return told


def is_left_alone() -> dict[str, Any]:
    job = make_job()
    losses = [job.iterate(iteration) for iteration in range(STEPS)]
    return {"losses": losses[KILLED_AT:], "end": job.digest()}


def test_a_job_with_a_rank_killed_on_the_gpu_resumes_as_if_nothing_had_happened(
    place: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=f"rank 1 ended with status -{signal.SIGKILL.value};"):
        cuda_ranks.run(dies_in_backward, tmp_path, **place)
    back = cuda_ranks.run(comes_back, tmp_path, **place)
    undisturbed = cuda_ranks.run(is_left_alone, tmp_path)
    for told, expected in zip(back, undisturbed, strict=True):
        assert told == {"begin": KILLED_AT, "levels": {"memory": 2}, **expected}


def test_the_compared_state_depends_on_the_devices_random_stream() -> None:
    """Otherwise the equalities above would not cover it."""
    losses = []
    for seed in (5, 6):
        job = make_job()
        torch.cuda.manual_seed(seed)
        losses.append(job.iterate(0))
    assert losses[0] != losses[1]
