"""A checkpoint made under DDP restores under Horovod, and the other way round."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import exact
from tests.support.rank_pool import GLOO, HOROVODRUN, RankPool
from tests.support.training import (
    Net,
    Place,
    attach,
    make_horovod_job,
    make_job,
    train,
    under_horovod,
)

normed = partial(Net, norm=nn.BatchNorm1d)
VERSION = 4

Job = tuple[str, int]
JOBS: list[Job] = [(HOROVODRUN, 2), (GLOO, 3), (GLOO, 2)]


def new_job(seed: int) -> tuple[Any, dict[str, Any]]:
    """A job with the library of the ranks, and a schedule in `extra`."""
    make = make_horovod_job if under_horovod() else make_job
    ddp = {} if under_horovod() else {"broadcast_buffers": False}
    job = make(net=normed, seed=seed, **ddp)
    schedule = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.9)
    return job, {"schedule": schedule}


def whole(job: Any, extra: dict[str, Any]) -> str:
    return exact.digest([job.replicated(), exact.image(extra["schedule"].state_dict())])


def leave_behind(place: Place) -> tuple[str, str]:
    """Train and save to disk; returns the state equal on all ranks, and this rank's own."""
    job, extra = new_job(1)
    ckpt = attach(job, place, extra=extra, local_every_steps=1000).ckpt
    for iteration in range(VERSION):
        job.iterate(iteration)
        extra["schedule"].step()
        ckpt.step()
    ckpt.save(now=True)
    told = whole(job, extra), exact.digest([exact.buffers(job.bare), exact.streams()])
    ckpt.abandon()
    return told


def take_up(place: Place, **settings: Any) -> dict[str, Any]:
    job, extra = new_job(2)
    attached = attach(job, place, extra=extra, **settings)
    restored = attached.ckpt.restore()
    told = {
        "restored": (int(restored), restored.version, restored.levels),
        "whole": whole(job, extra),
        "own": exact.digest([exact.buffers(job.bare), exact.streams()]),
        "complaints": [e.text() for e in attached.events if e.severity > 20],
    }
    train(job, attached.ckpt, range(restored, restored + 2))
    told["course"] = exact.digest(job.replicated())
    attached.ckpt.abandon()
    return told


Left = Callable[[Job], tuple[Path, list[tuple[str, str]]]]


@pytest.fixture(scope="module")
def left(ranks: Any, tmp_path_factory: pytest.TempPathFactory, shm_root: Path) -> Left:
    """`left(job)`: the files that the job left on its disk, and the results of its ranks. Each runs
    once."""
    done: dict[Job, tuple[Path, list[tuple[str, str]]]] = {}
    for kind, size in JOBS:
        folder = tmp_path_factory.mktemp("left")
        memory = shm_root / folder.name
        memory.mkdir()
        done[kind, size] = (
            folder / "disk",
            ranks(size, kind).run(leave_behind, Place(str(folder / "disk"), str(memory))),
        )
        shutil.rmtree(memory)
    return done.__getitem__


CROSSINGS: list[tuple[Job, Job]] = [((GLOO, 3), (HOROVODRUN, 2)), ((HOROVODRUN, 2), (GLOO, 3))]


@pytest.mark.parametrize(("now", "before"), CROSSINGS, ids=lambda job: f"{job[0]}-{job[1]}")
def test_one_library_continues_where_another_was(
    now: Job, before: Job, left: Left, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    disk, made = left(before)
    shutil.copytree(disk, tmp_path / "disk")
    told = ranks(now[1], now[0]).run(take_up, Place(str(tmp_path / "disk"), str(shm_dir)))
    check_taken_up(told, made)


def test_a_fork_of_one_library_starts_from_anothers_version(
    left: Left, tmp_path: Path, shm_dir: Path, pool: RankPool
) -> None:
    disk, made = left((GLOO, 2))
    place, fork_from = Place(str(tmp_path / "fork"), str(shm_dir)), f"{disk}@v{VERSION}"
    told = pool.run(take_up, place, fork_from=fork_from)
    check_taken_up(told, made)
    holds = {mark.suffix for mark in disk.iterdir() if mark.suffix in (".hold", ".fork")}
    assert len(holds) == 1


def check_taken_up(told: list[dict[str, Any]], made: list[tuple[str, str]]) -> None:
    """For each rank: the state that the second job restored, and that of the first one."""
    assert len({t["course"] for t in told}) == 1
    for number, found in enumerate(told):
        assert found["restored"] == (VERSION, VERSION, {"local": len(made)})
        assert found["whole"] == made[0][0]
        assert found["complaints"] == []
        if number < len(made):
            assert found["own"] == made[number][1]
