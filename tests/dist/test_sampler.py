"""Real ranks on a resumable sampler: each sample once an epoch, and the same curve, after a crash.

The loaders have workers, which draw batches long before the training sees them.
"""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import tierckpt
from tests.support.training import WIDTH, Place, attach, make_job

LENGTH = 35
EPOCHS = 2
BATCH = {2: 2, 3: 3}
"""Batch size by number of ranks."""
PLAIN, STATEFUL = "torch.utils.data.DataLoader", "torchdata.stateful_dataloader.StatefulDataLoader"


class Rows(Dataset[tuple[int, torch.Tensor]]):
    """Each sample is its own number."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def train_on(
    kind: str, place: Place, crash_after: int | None = None, **loader_options: Any
) -> dict[str, Any]:
    """Restore and train, to the end or to a crash in the iteration after `crash_after` iterations.

    The result has the iterations on which a restart builds: those up to the last boundary.
    """
    job = make_job()
    ranks = torch.distributed.get_world_size()
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, gamma=0.5)
    sampler = tierckpt.ResumableSampler(range(LENGTH), BATCH[ranks], seed=5)
    module, name = kind.rsplit(".", 1)
    loader: DataLoader[Any] = getattr(importlib.import_module(module), name)(
        Rows(),
        batch_sampler=sampler,
        num_workers=2,
        generator=torch.Generator(),
        **loader_options,
    )
    extra = {"position": sampler.position, "schedule": schedule}
    own = {"loader": loader} if kind == STATEFUL else {}
    attached = attach(job, place, extra=extra, extra_per_rank=own)
    ckpt = attached.ckpt
    told: dict[str, Any] = {"start": int(ckpt.restore()), "seen": [], "curve": []}
    told["complaints"] = [e.text() for e in attached.events if e.severity > 30]
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for numbers, rows in loader:
            job.optimizer.zero_grad()
            job.model(rows).square().mean().backward()
            job.optimizer.step()
            sampler.step()
            if len(told["curve"]) == crash_after:
                ckpt.abandon()
                return told
            ckpt.step()
            told["seen"] += [(epoch, number) for number in numbers.tolist()]
            told["curve"].append(job.digest())
        schedule.step()
    ckpt.close()
    return told


@pytest.fixture(params=[PLAIN, STATEFUL], ids=["plain", "stateful"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == STATEFUL:
        pytest.importorskip("torchdata.stateful_dataloader")
    return str(request.param)


def places(tmp_path: Path, shm_dir: Path) -> tuple[Place, Place]:
    """Folders of the undisturbed job, and of the killed one."""
    for name in ("alone", "killed"):
        (shm_dir / name).mkdir()
    alone, killed = (Place.under(tmp_path / n, shm_dir / n) for n in ("alone", "killed"))
    return alone, killed


def assert_each_sample_came_once_an_epoch(told: list[dict[str, Any]]) -> None:
    seen = Counter(sample for each in told for sample in each["seen"])
    assert seen == Counter((epoch, n) for epoch in range(EPOCHS) for n in range(LENGTH))


def test_the_curve_is_that_of_a_job_that_nobody_disturbed(
    kind: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Kills in the middle of an epoch, and after the last batch of one, before the epoch ends."""
    alone, killed = places(tmp_path, shm_dir)
    undisturbed = ranks(2).run(train_on, kind, alone)
    lives = [ranks(2).run(train_on, kind, killed, after) for after in (4, 5, None)]
    for whole, *parts in zip(undisturbed, *lives, strict=True):
        assert [part["start"] for part in parts] == [0, 4, 9]
        assert [part["complaints"] for part in parts] == [[], [], []]
        for name in ("seen", "curve"):
            assert [each for part in parts for each in part[name]] == whole[name]


def test_each_sample_comes_once_an_epoch_on_any_number_of_ranks(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    _, place = places(tmp_path, shm_dir)
    told = ranks(2).run(train_on, PLAIN, place, 2)
    told += ranks(3).run(train_on, PLAIN, place, 3)
    told += ranks(2).run(train_on, PLAIN, place)
    assert [each["start"] for each in told] == [0, 0, 2, 2, 2, 5, 5]
    assert_each_sample_came_once_an_epoch(told)


def test_a_loader_that_keeps_its_state_every_few_steps_only(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """The loop repeats the steps since then, which does not move the position."""
    pytest.importorskip("torchdata.stateful_dataloader")
    _, place = places(tmp_path, shm_dir)
    told = ranks(2).run(train_on, STATEFUL, place, 5, snapshot_every_n_steps=3)
    told += ranks(2).run(train_on, STATEFUL, place, 2, snapshot_every_n_steps=3)
    told += ranks(2).run(train_on, STATEFUL, place, snapshot_every_n_steps=3)
    assert_each_sample_came_once_an_epoch(told)
