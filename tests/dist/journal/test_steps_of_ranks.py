"""A restart makes the journal's steps on all ranks alike, or takes the version on all of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.parts import journal_of
from tests.support.training import Events, Job, Place, attach, make_job, rank, train

STEPS = 5
"""The last version is v1, and the journal repeats the steps of the others."""
SETTINGS: dict[str, Any] = {
    "memory_every_steps": 0,
    "local_journal_steps": 100,
    "when_busy": "wait",
}


def add(job: Job, params: int, repeated: int) -> None:
    """The step of that number, from 1 on, leads to other values at the start of the first
    parameters. The very first is in rank 0's stripe, and rank 1 does not prove it."""
    made = 0

    def after_step(*_: Any) -> None:
        nonlocal made
        made += 1
        if made == repeated:
            with torch.no_grad():
                for param in [*job.bare.parameters()][:params]:
                    param.view(-1)[0] += 1e-3

    job.optimizer.register_step_post_hook(after_step)


def interrupted(place: Place, params: int, repeated: int) -> tuple[int, bool, list[str]]:
    """Train, and restart with a step that differs on rank 1. Returns the version, whether its state
    is as it was, and errors."""
    job = make_job()
    first = attach(job, place, **SETTINGS)
    course = train(job, first.ckpt, range(STEPS))
    first.ckpt.wait()
    dist.barrier()
    first.ckpt.abandon()
    again = make_job()
    attached = attach(again, place, **SETTINGS)
    again.optimizer.register_step_post_hook(lambda *_: dist.all_reduce(torch.ones(1)))
    if rank() == 1:
        add(again, params, repeated)
    restored = attached.ckpt.restore()
    same = again.digest() == course[restored.version]
    attached.ckpt.abandon()
    return restored.version, same, errors(attached.events)


def errors(events: Events) -> list[str]:
    return [event.message for event in events if "could not be made again" in event.message]


@pytest.mark.parametrize(
    ("params", "repeated", "why"),
    [
        (1, STEPS - 1, "the ranks came to different parameters"),
        (1000, 1, "rank 1: v2: parameters or optimizer state differ"),
    ],
)
def test_steps_that_differ_on_one_rank_are_used_on_none(
    params: int, repeated: int, why: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """The steps also communicate: they must not be made on some ranks only."""
    place = Place(str(tmp_path / "ckpts"), str(shm_dir))
    found = ranks(2).run(interrupted, place, params, repeated)
    for version, same, texts in found:
        assert (version, same) == (1, True)
        assert len(texts) == 1
        assert why in texts[0]


class Talking:
    """An object with the mean of all ranks' values."""

    def state_dict(self) -> dict[str, float]:
        mean = torch.tensor(float(rank()))
        dist.all_reduce(mean)
        return {"mean": float(mean)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to load."""


def full_disk_of_rank_1(place: Place) -> list[str]:
    """Train while the journal of rank 1 cannot be written; returns the notices about that."""
    job = make_job()
    attached = attach(job, place, extra={"talking": Talking()}, **SETTINGS)
    train(job, attached.ckpt, range(2))
    if rank() == 1:
        journal: Any = journal_of(attached.ckpt)

        def full(_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        journal._writer._append = full
    train(job, attached.ckpt, range(2, STEPS + 1))
    attached.ckpt.wait()
    attached.ckpt.close()
    return [event.message for event in attached.events if "the journal ends" in event.message]


def test_objects_that_communicate_meet_where_one_journal_has_stopped(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place(str(tmp_path / "ckpts"), str(shm_dir))
    well, full = ranks(2).run(full_disk_of_rank_1, place)
    assert not well
    assert len(full) == 1
    assert "No space left on device" in full[0]
