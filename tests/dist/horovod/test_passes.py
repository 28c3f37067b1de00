"""Versions and the backward passes of a step: no version has gradients that no step has used."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import tierckpt
from tests.support.rank_pool import RankPool
from tests.support.training import (
    WIDTH,
    HorovodJob,
    Net,
    Place,
    attach,
    batch,
    horovod,
    make_horovod_job,
    rank,
    through_a_crash,
)


def ended_between_passes(place: Place, every: int, end: str) -> dict[str, Any]:
    """Call `step()` after each backward pass; two passes are a step."""
    made: list[int] = []

    def resume(job: HorovodJob, ckpt: tierckpt.Checkpointer | None, passes: range) -> None:
        for number in passes:
            made.append(number)
            job.loss(number).backward()
            if number % 2:
                job.step()
                job.zero_grad()
            if ckpt is not None:
                ckpt.step()

    alone = make_horovod_job(passes=2)
    resume(alone, None, range(8))
    made.clear()
    job = make_horovod_job(passes=2)
    settings = {"memory_every_steps": every, "local_every_steps": every, "when_busy": "wait"}
    attached = attach(job, place, **settings)
    resume(job, attached.ckpt, range(5))
    if end == "close":
        attached.ckpt.close()
    else:
        attached.ckpt.save(now=True)
        attached.ckpt.abandon()
    again = make_horovod_job(passes=2, seed=2)
    ckpt = attach(again, place, **settings).ckpt
    restored = ckpt.restore()
    resume(again, ckpt, range(restored, 8))
    ckpt.close()
    said = any("are made again" in e.message for e in attached.events if e.severity > 20)
    return {"made": made, "same": again.digest() == alone.digest(), "said": said}


@pytest.mark.parametrize(("every", "end"), [(1, "save"), (10, "close")])
def test_passes_that_no_step_has_used_are_made_again(
    every: int, end: str, pool: RankPool, place: Place
) -> None:
    """To the bit, if the version of the last step exists; otherwise at least their gradients."""
    for number, told in enumerate(pool.run(ended_between_passes, place, every, end)):
        assert told["made"] == [0, 1, 2, 3, 4, *range(4, 8)]
        assert told["same"] is (every == 1)
        assert told["said"] is (every == 10 and number == 0)


# --- several optimizers, each with passes of its own ---------------------------------------------


@dataclass
class Uneven(HorovodJob):
    """Two optimizers; the second makes a step in every second iteration."""

    lazy_rank: int = -1
    """This rank has no batch for the passes with gradients that are not reduced yet."""

    def iterate(self, iteration: int) -> str:
        first, second = self.optimizers
        first.zero_grad()
        if iteration % 2 == 0:
            second.zero_grad()
        part = [p for group in second.param_groups for p in group["params"]]
        before = [None if p.grad is None else p.grad.clone() for p in part]
        lazy = rank() == self.lazy_rank and iteration % 2 == 0
        for param in part:
            param.requires_grad_(not lazy)
        self.backward(iteration)
        for param, gradient in zip(part, before, strict=True):
            param.requires_grad_(True)
            param.grad = gradient if lazy else param.grad
        first.step()
        if iteration % 2:
            second.step()
        return ""


def make_uneven(seed: int, lazy_rank: int = -1) -> Uneven:
    hvd = horovod()
    torch.manual_seed(seed)
    model = Net()
    torch.manual_seed(1000 * seed + rank())
    named = list(model.named_parameters())
    job = Uneven(model, [], lazy_rank=lazy_rank)
    for passes, part in ((1, named[:4]), (2, named[4:])):
        plain = torch.optim.Adam([p for _, p in part], lr=0.01)
        job.optimizers.append(
            hvd.DistributedOptimizer(plain, named_parameters=part, backward_passes_per_step=passes)
        )
    return job


def cut_between_uneven_passes(place: Place) -> dict[str, Any]:
    return through_a_crash(partial(make_uneven, lazy_rank=1), place, 5, 8)


def test_no_version_is_between_the_passes_of_any_optimizer(pool: RankPool, place: Place) -> None:
    """Also if a rank without a batch does not know of the passes."""
    for told in pool.run(cut_between_uneven_passes, place):
        assert told["restored"][0] == 4
        assert told["course"] == told["plain"]


def never_between_steps(place: Place, boundaries: int, end: str) -> dict[str, Any]:
    """Boundaries at which the second optimizer has always made one pass of two."""
    job = make_uneven(seed=1)
    attached = attach(job, place, local_every_steps=1)
    for iteration in range(2 * boundaries - 1):
        job.iterate(iteration)
        if iteration % 2 == 0:
            attached.ckpt.step()
    getattr(attached.ckpt, end)()
    warnings = [e.message for e in attached.events if e.severity == logging.WARNING]
    return {"taken": attached.versions("sealed", "memory"), "said": warnings}


def test_a_loop_with_all_boundaries_skipped_is_reported(pool: RankPool, place: Place) -> None:
    first, other = pool.run(never_between_steps, place, 10, "abandon")
    assert first["taken"] == other["taken"] == []
    (said,) = first["said"]
    assert "the last 8 boundaries came between the backward passes" in said


def test_a_final_version_between_passes_reports_its_missing_gradients(
    pool: RankPool, place: Place
) -> None:
    """The final weights are the purpose of a training; no version at all would be worse."""
    first, other = pool.run(never_between_steps, place, 3, "close")
    assert first["taken"] == other["taken"] == [5]
    (said,) = first["said"]
    assert "v5 has no gradients of the backward passes that optimizer1 made" in said


# --- gradients that a loop drops -----------------------------------------------------------------


@dataclass
class Adversaries(HorovodJob):
    """A generator trained through a discriminator with three passes per step: two of its own, and
    one of the generator's; the loop drops its gradients, and keeps them from some iteration on."""

    keeps_at: int = -1
    """The iteration that starts without dropping gradients."""

    def iterate(self, iteration: int) -> str:
        first, second, *_ = self.optimizers
        maker, judge = self.bare["maker"], self.bare["judge"]  # type: ignore[index]
        if iteration != self.keeps_at:
            judge.zero_grad()
        real, noise = batch(iteration), batch(iteration, 1)
        judge(real).square().mean().backward()
        judge(maker(noise).detach()).mean().backward()
        second.step()
        maker.zero_grad()
        judge(maker(noise)).mean().backward()
        first.step()
        return ""


def make_adversaries(
    seed: int, keeps_at: int = -1, kind: type[Adversaries] = Adversaries
) -> Adversaries:
    hvd = horovod()
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"maker": torch.nn.Linear(WIDTH, WIDTH), "judge": Net()})
    if kind is not Adversaries:
        model["beside"] = torch.nn.Linear(WIDTH, 2)
    torch.manual_seed(1000 * seed + rank())
    job = kind(model, [], keeps_at=keeps_at)
    for name, passes in zip(model, (1, 3, 6), strict=False):
        part = list(model[name].named_parameters(name))
        plain = torch.optim.Adam([p for _, p in part], lr=0.01)
        job.optimizers.append(
            hvd.DistributedOptimizer(plain, named_parameters=part, backward_passes_per_step=passes)
        )
    return job


def use_what_was_dropped_before(place: Place) -> dict[str, Any]:
    job = make_adversaries(1, keeps_at=6)
    attached = attach(job, place, when_busy="wait")
    for iteration in range(12):
        job.iterate(iteration)
        attached.ckpt.step()
    attached.ckpt.abandon()
    said = [e.message for e in attached.events if e.severity == logging.WARNING]
    return {"taken": attached.versions("sealed", "memory"), "said": said}


def test_gradients_that_are_used_after_all_are_reported(pool: RankPool, place: Place) -> None:
    """And none are assumed to be dropped, until they are dropped again."""
    for told in pool.run(use_what_was_dropped_before, place):
        assert [text.split(" used")[0] for text in told["said"]] == ["optimizer1"]
        assert "at the boundary of v6" in told["said"][0]
        assert not {7, 8, 9} & set(told["taken"])
        assert {4, 5, 10, 11, 12} <= set(told["taken"])


@dataclass
class ThreeOfThem(Adversaries):
    """And a third optimizer, which makes a step in every sixth iteration."""

    def iterate(self, iteration: int) -> str:
        super().iterate(iteration)
        beside = self.bare["beside"]  # type: ignore[index]
        beside(batch(iteration, 2)).square().mean().backward()
        if iteration % 6 == 5:
            self.optimizers[2].step()
            beside.zero_grad()
        return ""

    def image(self) -> dict[str, Any]:
        """The image without the parts that no forward pass uses any more."""
        return self.replicated()


def cut_among_three(place: Place) -> dict[str, Any]:
    make = partial(make_adversaries, kind=ThreeOfThem)
    return through_a_crash(make, place, 11, 12, when_busy="wait")


def test_a_loop_that_drops_gradients_reports_none_of_others(pool: RankPool, place: Place) -> None:
    for told in pool.run(cut_among_three, place):
        assert told["restored"][0] == 6
        assert told["course"] == told["plain"]


# --- ends, and ways back -------------------------------------------------------------------------


def told_to_end(place: Place) -> dict[str, Any]:
    """The job has to end, as from a scheduler, after iteration 2, between the passes of a step;
    started again, it makes eight."""
    alone = make_uneven(seed=1)
    for iteration in range(8):
        alone.iterate(iteration)
    job = make_uneven(seed=1)
    ckpt = attach(job, place, local_every_steps=1, local_every_seconds=0, when_busy="wait").ckpt
    for iteration in range(8):
        job.iterate(iteration)
        if iteration == 2 and rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        ckpt.step()
        if ckpt.should_exit():
            break
    ckpt.close()
    again = make_uneven(seed=2)
    ckpt = attach(again, place).ckpt
    restored = ckpt.restore()
    for iteration in range(restored, 8):
        again.iterate(iteration)
    ckpt.abandon()
    return {"at": int(restored), "same": again.digest() == alone.digest()}


def test_a_job_that_receives_a_signal_resumes_exactly(pool: RankPool, place: Place) -> None:
    told = pool.run(told_to_end, place)
    assert told == [{"at": 4, "same": True}] * 2


def back_from_between(place: Place) -> dict[str, Any]:
    """A boundary after the first pass of the next step, and then a restore of the version before
    it."""
    job = make_horovod_job(passes=2)
    attached = attach(job, place, local_every_steps=1, local_every_seconds=0, when_busy="wait")
    ckpt = attached.ckpt

    def one_pass(number: int) -> None:
        job.loss(number).backward()
        if number % 2:
            job.step()
            job.zero_grad()

    for number in range(4):
        one_pass(number)
        ckpt.step()
    job.loss(4).backward()
    job.loss(5).backward()
    job.step()
    job.zero_grad()
    job.loss(6).backward()
    ckpt.step()  # between the passes
    back = ckpt.restore()
    one_pass(4)
    ckpt.step()
    ckpt.save(now=True)  # between them again
    ckpt.abandon()
    again = make_horovod_job(passes=2, seed=2)
    ckpt = attach(again, place).ckpt
    restored = ckpt.restore()
    ckpt.abandon()
    said = [e.message for e in attached.events if "made again" in e.message]
    return {"back": int(back), "at": int(restored), "said": len(said)}


def test_partial_passes_before_a_restore_are_discarded(pool: RankPool, place: Place) -> None:
    first, other = pool.run(back_from_between, place)
    assert first == other == {"back": 4, "at": 4, "said": 1}


# --- ranks that are not at the same place --------------------------------------------------------


def a_pass_ahead(place: Place | None) -> dict[str, Any]:
    """The boundary comes after the first pass of the next step, for which one rank has no batch in
    every third iteration."""
    job = make_horovod_job(passes=2)
    attached = attach(job, place, local_every_steps=1) if place is not None else None
    for iteration in range(12):
        if iteration and iteration % 2 == 0:
            job.step()
            job.zero_grad()
        if rank() != 1 or iteration % 3:
            job.loss(iteration).backward()
        if attached is not None:
            attached.ckpt.step()
    if attached is not None:
        attached.ckpt.close()
    return {"digest": job.digest(), "safe": attached and attached.ckpt._agreement.local.safe}


def test_a_rank_without_a_batch_keeps_nobody_waiting(pool: RankPool, place: Place) -> None:
    alone, told = pool.run(a_pass_ahead, None), pool.run(a_pass_ahead, place)
    assert [each["digest"] for each in told] == [each["digest"] for each in alone]
    assert [each["safe"].version for each in told] == [5, 5], "the final one"
