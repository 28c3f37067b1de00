"""The journal under Horovod: a restart makes the steps of the optimizers, without reductions."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.support.rank_pool import RankPool
from tests.support.training import (
    HorovodJob,
    Named,
    Place,
    attach,
    make_horovod_job,
)

LAST, END = 5, 8


def compressed(hvd: Any, model: nn.Module) -> dict[str, Any]:
    return {"compression": hvd.Compression.fp16}


def halves(model: nn.Module) -> list[Named]:
    named = list(model.named_parameters())
    return [named[:2], named[2:]]


class Clipped(HorovodJob):
    """Gradients are clipped between the reduction and the step."""

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()


def make(kind: str, seed: int = 1) -> HorovodJob:
    if kind == "several, compressed":
        return make_horovod_job(parts=halves, options=compressed, seed=seed)
    job = make_horovod_job(passes=2 if kind == "passes" else 1, seed=seed)
    if kind == "clipped":
        job.__class__ = Clipped
    return job


def resumed(place: Place, kind: str) -> dict[str, Any]:
    """Train with a version at the first step alone; then continue with another job."""
    settings = {"memory_every_steps": 0, "local_journal_steps": 100, "when_busy": "wait"}
    alone = make(kind)
    for iteration in range(END):
        alone.iterate(iteration)
    job = make(kind)
    ckpt = attach(job, place, **settings).ckpt
    for iteration in range(LAST):
        job.iterate(iteration)
        ckpt.step()
    ckpt.wait()
    ckpt.abandon()
    again = make(kind, seed=2)
    attached = attach(again, place, **settings)
    restored = attached.ckpt.restore()
    for iteration in range(restored, END):
        again.iterate(iteration)
        attached.ckpt.step()
    attached.ckpt.close()
    return {
        "restored": (int(restored), restored.replayed),
        "same": again.digest() == alone.digest(),
        "complaints": [e.text() for e in attached.events if e.severity > 20],
    }


@pytest.mark.parametrize("kind", ["several, compressed", "passes", "clipped"])
def test_a_restart_makes_the_steps_again(kind: str, pool: RankPool, place: Place) -> None:
    check_resumed(pool.run(resumed, place, kind))


def check_resumed(told: list[dict[str, Any]]) -> None:
    for each in told:
        assert each["restored"] == (LAST, LAST - 1)
        assert each["same"]
        assert not each["complaints"]
