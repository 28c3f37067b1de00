"""Equal runs end with equal versions, independent of the last boundary's version in memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tierckpt
from tests.support.training import WIDTH, Place, attach, make_job, rank
from tierckpt import _faults
from tierckpt.cli import run_command
from tierckpt.storage import SlotPool

ROWS, STEPS = 4, 6
TIMINGS: dict[str, dict[str, Any]] = {
    "in memory": {},
    "on disk": {"local_every_steps": 1},
    "not due": {"memory_every_steps": 100},
    "lost on a rank": {},
    "no slot on a rank": {},
}


def epochs_at(timing: str, place: Place) -> int:
    """Two epochs of three steps, after which the job is closed; returns the versions that were
    taken at boundaries."""
    job = make_job()
    dataset = TensorDataset(torch.arange(2 * 3 * ROWS).float())
    loader = DataLoader(dataset, ROWS, sampler=DistributedSampler(dataset))
    data: tierckpt.ResumableLoader[Any] = tierckpt.ResumableLoader(loader)
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, gamma=0.5)
    given = {"extra": {"schedule": schedule}, "extra_per_rank": {"data": data}}
    settings = {
        "agent": "inline",
        "when_busy": "skip",
        "local_every_steps": 1000,
        **TIMINGS[timing],
    }
    ckpt = attach(job, place, **given, **settings).ckpt
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1 and timing == "lost on a rank":
            patch.setattr(_faults, "_rules", _faults.parse(f"eio@copy:version={STEPS}"))
        if rank() == 1 and timing == "no slot on a rank":
            patch.setattr(SlotPool, "has_room", lambda *_: ckpt.version < 2)
        for epoch in range(data.epoch, 2):
            data.set_epoch(epoch)
            for (rows,) in data:
                job.optimizer.zero_grad()
                job.model(rows[:, None].expand(-1, WIDTH) / 100).square().mean().backward()
                job.optimizer.step()
                ckpt.step()
            schedule.step()
        ckpt.complete()
        taken = sum(slot is not None and slot.manifest() is not None for slot in ckpt._pool.slots)
        dist.barrier()
        ckpt.close()
    return taken


def test_equal_runs_end_with_equal_versions(
    ranks: Any, tmp_path: Any, shm_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))
    places = {t: Place.under(tmp_path / t.replace(" ", "-"), shm_dir) for t in TIMINGS}
    for timing, place in places.items():
        os.mkdir(os.path.dirname(place.path))
        told = ranks(2).run(epochs_at, timing, place)
        assert (min(told) == 0) == (timing == "not due")
        latest = tierckpt.latest(place.path)
        assert latest is not None
        assert latest.version == STEPS
    first, *others = (place.path for place in places.values())
    assert [run_command(["diff", first, other]) for other in others] == [0] * len(others)
