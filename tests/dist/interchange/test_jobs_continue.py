"""Real jobs continue from a checkpoint that they never made themselves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.support import exact
from tests.support.rank_pool import GLOO, HOROVODRUN
from tests.support.training import (
    Net,
    Place,
    attach,
    horovod,
    make_horovod_job,
    make_job,
    rank,
    under_horovod,
)
from tierckpt.cli import run_command

normed = partial(Net, norm=nn.BatchNorm1d)
BEFORE, AFTER = 3, 3


def new_job(seed: int) -> tuple[Any, Any]:
    make = make_horovod_job if under_horovod() else make_job
    job = make(net=normed, seed=seed)
    return job, torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.9)


def train(job: Any, schedule: Any, boundary: Any = lambda: None) -> list[tuple[str, str]]:
    """Further iterations, with random streams of their own: files have none."""
    torch.manual_seed(500 + rank())
    course = []
    for iteration in range(BEFORE, BEFORE + AFTER):
        gradients = job.iterate(iteration)
        schedule.step()
        boundary()
        course.append((gradients, exact.digest([job.replicated(), exact.buffers(job.bare)])))
    return course


def train_without(target: str, form: str) -> list[tuple[str, str]]:
    """A job that saves a file in its own way, and continues."""
    job, schedule = new_job(1)
    for iteration in range(BEFORE):
        job.iterate(iteration)
        schedule.step()
    share_buffers(job.bare)  # else ranks differ, and a file has those of one of them
    if form == "dcp":
        model, optimizer = get_state_dict(job.model, job.optimizer)
        content = {"model": model, "optimizer": optimizer, "iteration": BEFORE}
        dcp.save({**content, "schedule": schedule.state_dict()}, checkpoint_id=target)
    elif rank() == 0:
        content = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
        content |= {"schedule": schedule.state_dict()} | ({"epoch": 1} if form == "horovod" else {})
        torch.save(content, target)
    return train(job, schedule)


def share_buffers(model: nn.Module) -> None:
    if under_horovod():
        horovod().broadcast_parameters(dict(model.named_buffers()), root_rank=0)
        return
    for buffer in model.buffers() if dist.is_initialized() else ():
        dist.broadcast(buffer, 0)


def resume(place: Place) -> tuple[int, list[tuple[str, str]], list[str]]:
    job, schedule = new_job(2)
    attached = attach(job, place, extra={"schedule": schedule})
    iteration = int(attached.ckpt.restore())
    course = train(job, schedule, attached.ckpt.step)
    attached.ckpt.close()
    return iteration, course, [e.text() for e in attached.events if e.name == "notice"]


@pytest.mark.parametrize(
    ("kind", "size", "form"),
    [(GLOO, 2, "torch"), (GLOO, 2, "dcp"), (HOROVODRUN, 2, "horovod")],
)
def test_a_job_continues_from_its_own_file_as_if_it_had_not_ended(
    kind: str,
    size: int,
    form: str,
    ranks: Any,
    tmp_path: Path,
    shm_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))
    source = tmp_path / ("folder" if form == "dcp" else "file.pt")
    place = Place.under(tmp_path, shm_dir)
    undisturbed = ranks(size, kind).run(train_without, str(source), form)
    assert run_command(["import", str(source), place.path]) == 0
    resumed = ranks(size, kind).run(resume, place)
    assert [iteration for iteration, *_ in resumed] == [BEFORE] * size
    assert [course for _, course, _ in resumed] == undisturbed
    assert run_command(["verify", place.path]) == 0
