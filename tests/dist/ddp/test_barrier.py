"""The barrier keeps the optimizer from tensors that are being copied, while gradients are
reduced."""

from __future__ import annotations

import time
from functools import partial

import pytest

import tierckpt
from tests.support import exact
from tests.support.late_copies import before_blocks
from tests.support.rank_pool import RankPool
from tests.support.training import (
    Job,
    Net,
    Place,
    attach,
    fused_adamw,
    make_job,
    only_layers_release,
    sgd,
    train,
)

many_buckets = {"bucket_cap_mb": 0.003}

PATIENCE_SECONDS = 120.0

SILENT = {"fused SGD": partial(sgd, fused=True), "fused AdamW": fused_adamw}


@only_layers_release()
def restored_from_slow_copies(kind: str, barrier: bool, place: Place) -> tuple[int, list[str]]:
    """Every block is copied late; without the barrier, only after the optimizer's step."""
    options = {"optimizer": SILENT[kind], "net": partial(Net, layers=8)}
    with pytest.MonkeyPatch.context() as patch:

        def slowly(_: int) -> None:
            end = time.monotonic() + (0.03 if barrier else PATIENCE_SECONDS)
            while time.monotonic() < end and not attached.ckpt._iterations.steps:
                time.sleep(0.001)

        before_blocks(patch, slowly)
        if not barrier:
            patch.setattr(tierckpt.Checkpointer, "_barrier", lambda self: None)
        job = make_job(**options, **many_buckets)
        attached = attach(job, place, release="backward")
        train(job, attached.ckpt, range(3))
        expected = job.replicated()
        job.iterate(3)
        attached.ckpt._active.finish()
        attached.ckpt.abandon()
    job = make_job(**options, seed=2)
    attached = attach(job, place)
    restored = attached.ckpt.restore()
    attached.ckpt.abandon()
    return restored.version, exact.differences(expected, job.replicated())


def test_no_tensor_changes_before_it_is_copied(pool: RankPool, place: Place) -> None:
    for version, torn in pool.run(restored_from_slow_copies, "fused SGD", True, place):
        assert (version, torn) == (3, [])


def test_it_is_the_barrier_that_keeps_the_optimizer_off(pool: RankPool, place: Place) -> None:
    """The control of the test above: a fused SGD leaves no trace that a check could find."""
    for version, torn in pool.run(restored_from_slow_copies, "fused SGD", False, place):
        assert version == 3
        assert torn


def test_an_evidently_torn_copy_is_never_sealed(pool: RankPool, place: Place) -> None:
    """AdamW's step counts do leave a trace."""
    for version, _ in pool.run(restored_from_slow_copies, "fused AdamW", False, place):
        assert version < 3


@only_layers_release()
def blocks_released(job: Job, place: Place) -> tuple[int, int, int]:
    """The number of blocks that may be copied after the boundary, after backward, and in all."""
    attached = attach(job, place, release="backward")
    train(job, attached.ckpt, range(3))
    snapshot = attached.ckpt._active.snapshot
    assert snapshot is not None
    striped = len(snapshot.plan.striped_blocks)
    at_boundary = striped - len(snapshot.held_blocks())
    job.optimizer.zero_grad()
    job.loss(3).backward()
    after_backward = striped - len(snapshot.held_blocks())
    job.optimizer.step()
    attached.ckpt.abandon()
    return at_boundary, after_backward, striped


def layers_released_by_backward(place: Place) -> tuple[int, int, int]:
    return blocks_released(make_job(**many_buckets), place)


def test_layers_are_copied_while_their_gradients_are_reduced(pool: RankPool, place: Place) -> None:
    told = pool.run(layers_released_by_backward, place)
    for at_boundary, after_backward, striped in told:
        assert (at_boundary, after_backward) == (0, striped)
        assert striped > 0
