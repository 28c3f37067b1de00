"""The times at which layers are copied under Horovod: after their reduction, and before the
step."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import tierckpt
from tests.dist.horovod.test_training import VARIANTS, clip
from tests.support import exact
from tests.support.late_copies import before_blocks
from tests.support.rank_pool import RankPool
from tests.support.training import (
    HorovodJob,
    Place,
    attach,
    horovod,
    init_again,
    make_horovod_job,
    only_layers_release,
    rank,
    sgd,
    train,
)
from tierckpt.snapshot import Snapshot

PATIENCE_SECONDS = 120.0
silent = partial(sgd, fused=True)  # this changes no version counter: only the barrier can help


# --- released by layer ---------------------------------------------------------------------------


@only_layers_release()
def layers_released_by_backward(name: str, place: Place) -> list[tuple[int, int]]:
    """The number of blocks that are held back at the boundary, and after each backward pass of the
    iteration."""
    job = VARIANTS[name].job(1)
    ckpt = attach(job, place, release="backward", extra=job.extra).ckpt
    train(job, ckpt, range(3))
    snapshot = ckpt._active.snapshot
    assert snapshot is not None
    held = [len(snapshot.held_blocks())]
    job.zero_grad()
    for part in range(job.passes):
        job.loss(3, part).backward()
        held.append(len(snapshot.held_blocks()))
    if not held[-1]:
        # No thread is at the barrier: the copier completes the version alone, beside the reductions
        snapshot.wait_done()
        assert snapshot.sealed
        assert snapshot.clock.barrier == 0
    job.step()
    ckpt.abandon()
    striped = len(snapshot.plan.striped_blocks)
    return [(count, striped) for count in held]


@pytest.mark.parametrize(
    "name", ["default", "lists of groups", "several optimizers", "two backward passes"]
)
def test_layers_are_copied_while_their_gradients_are_reduced(
    name: str, pool: RankPool, place: Place
) -> None:
    """The version is sealed before the step; with accumulation, in the last pass."""
    check_released(name, pool.run(layers_released_by_backward, name, place))


def check_released(name: str, told: list[list[tuple[int, int]]]) -> None:
    for held in told:
        striped = held[0][1]
        assert striped > 0
        before_last = 2 if name == "two backward passes" else 1
        assert [count for count, _ in held] == [striped] * before_last + [0]


# --- the barrier ---------------------------------------------------------------------------------


@contextmanager
def copies_held_back(patch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is copied before the training thread is at the barrier, or the event is set."""
    may_copy = threading.Event()
    barrier = Snapshot.barrier

    def wait(_: int) -> None:
        assert may_copy.wait(PATIENCE_SECONDS)

    def barrier_first(self: Snapshot) -> None:
        may_copy.set()
        barrier(self)

    before_blocks(patch, wait)
    patch.setattr(Snapshot, "barrier", barrier_first)
    yield may_copy
    may_copy.set()


def no_barrier(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tierckpt.Checkpointer, "_barrier", lambda self: None)


def never_the_last_chance(patch: pytest.MonkeyPatch) -> None:
    """Treat every step as if it contained another one."""
    reductions = importlib.import_module("horovod_ckpt.adapter").Reductions
    step_starts = reductions.step_starts
    patch.setattr(reductions, "step_starts", lambda self: step_starts(self) or True)


def intact(patch: pytest.MonkeyPatch) -> None:
    pass


def restored_from_late_copies(
    loop: Callable[[HorovodJob, int], str],
    breakage: Callable[[pytest.MonkeyPatch], None],
    place: Place,
) -> tuple[int, list[str]]:
    with pytest.MonkeyPatch.context() as patch, copies_held_back(patch) as may_copy:
        breakage(patch)
        job = make_horovod_job(optimizer=silent)
        ckpt = attach(job, place, release="backward").ckpt
        for iteration in range(3):
            loop(job, iteration)
            ckpt.step()
        expected = job.replicated()
        may_copy.clear()
        loop(job, 3)
        may_copy.set()
        ckpt.complete()
        ckpt.abandon()
    job = make_horovod_job(optimizer=silent, seed=2)
    ckpt = attach(job, place).ckpt
    restored = ckpt.restore()
    ckpt.abandon()
    return restored.version, exact.differences(expected, job.replicated())


def in_a_closure(job: HorovodJob, iteration: int, seen: Callable[[], None] = lambda: None) -> str:
    """Forward and backward pass are the step's closure, which waits for the reductions itself."""

    def closure() -> float:
        job.zero_grad()
        job.backward(iteration)
        job.optimizer.synchronize()
        seen()
        return 0.0

    with job.optimizer.skip_synchronize():
        job.optimizer.step(closure)
    return job.gradients()


def with_a_hook(job: HorovodJob, iteration: int) -> str:
    """A script's own pre-hook changes weights; Horovod's step calls it before it waits for the
    reductions."""

    def decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.data.mul_(0.9)

    if iteration == 0:
        job.optimizer.register_step_pre_hook(decay)
    return job.iterate(iteration)


LOOPS = {
    "outer and inner step": HorovodJob.iterate,
    "with a hook before the step": with_a_hook,
    "synchronized before": clip,
    "in a closure": in_a_closure,
}


def overlaps_in_a_closure(place: Place) -> list[bool]:
    """Whether copies were in progress after each closure's backward pass."""
    job = make_horovod_job(optimizer=silent)
    ckpt = attach(job, place, release="backward").ckpt
    overlaps: list[bool] = []
    for iteration in range(3):
        in_a_closure(job, iteration, lambda: overlaps.append(ckpt._active.snapshot is not None))
        ckpt.step()
    ckpt.abandon()
    return overlaps


def test_a_closures_passes_come_before_the_barrier(pool: RankPool, place: Place) -> None:
    told = pool.run(overlaps_in_a_closure, place)
    assert told == [[False, True, True]] * 2


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_no_weight_changes_before_it_is_copied(loop: Any, pool: RankPool, place: Place) -> None:
    for version, torn in pool.run(restored_from_late_copies, loop, intact, place):
        assert (version, torn) == (3, [])


@pytest.mark.parametrize(
    ("loop", "breakage"),
    [(LOOPS["synchronized before"], no_barrier), (LOOPS["in a closure"], never_the_last_chance)],
)
def test_it_is_the_barrier_that_keeps_the_optimizer_off(
    loop: Any, breakage: Any, pool: RankPool, place: Place
) -> None:
    """The control of the test above."""
    told = pool.run(restored_from_late_copies, loop, breakage, place)
    for version, torn in told:
        assert version == 3
        assert torn


# --- interrupted iterations ----------------------------------------------------------------------


class CutShortError(Exception):
    """The failure in the tests below."""


def before_the_step(job: HorovodJob, iteration: int) -> None:
    """Fail on all ranks; with unused parameters each has launched other reductions."""
    job.zero_grad()
    job.backward(iteration)
    raise CutShortError


def before_the_step_of_rank_0(job: HorovodJob, iteration: int) -> None:
    """Fail on rank 0; the others complete the iteration, and vote at its boundary."""
    job.zero_grad()
    job.backward(iteration)
    if rank() == 0:
        raise CutShortError
    job.step()


def in_the_backward_of_rank_0(job: HorovodJob, iteration: int) -> None:
    """Fail on rank 0 after the last layer's launch; the others have launched all reductions."""

    def fail(*_: Any) -> None:
        raise CutShortError

    job.zero_grad()
    if rank() == 0:
        job.bare.body[6].register_full_backward_hook(fail)
    job.backward(iteration)
    raise CutShortError


def before_the_forward_of_rank_0(job: HorovodJob, iteration: int) -> None:
    job.zero_grad()
    if rank() != 0:
        job.backward(iteration)
    raise CutShortError


def inside_the_step(job: HorovodJob, iteration: int) -> None:
    """Fail after the reductions and before the change of weights."""

    def fail(*_: Any) -> None:
        handle.remove()
        raise CutShortError

    job.zero_grad()
    job.backward(iteration)
    handle = job.optimizer.register_step_pre_hook(fail)
    job.step()


CUTS = {
    c.__name__: c
    for c in (
        before_the_step,
        before_the_step_of_rank_0,
        in_the_backward_of_rank_0,
        before_the_forward_of_rank_0,
        inside_the_step,
    )
}
FAILS_AT, LAST = 4, 9


def held_by_horovod() -> list[tuple[int, ...]]:
    """Shapes of the float tensors of operations with results that were not taken; votes are
    integers."""

    def flat(value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            for member in value:
                yield from flat(member)

    mpi_ops = importlib.import_module("horovod.torch.mpi_ops")
    known = [t for value in mpi_ops._handle_map.values() for t in flat(value)]
    return [tuple(t.shape) for t in known if t.is_floating_point()]


def trained_after(cut: str, name: str, place: Place) -> dict[str, Any]:
    """Fail in the middle, restore in the same process, and continue with the same objects."""
    variant = VARIANTS[name]
    plain = variant.job(1)
    expected = {}
    for iteration in range(LAST):
        variant.loop(plain, iteration)
        expected[iteration + 1] = plain.digest()
    job = variant.job(1)
    attached = attach(job, place)
    course = train(job, attached.ckpt, range(FAILS_AT))
    try:
        CUTS[cut](job, FAILS_AT)
        attached.ckpt.step()
    except CutShortError:
        pass
    for module in job.model.modules():
        module._backward_hooks.clear()
    restored = attached.ckpt.restore()
    held = held_by_horovod()
    gradients = sum(p.grad is not None for p in job.bare.parameters())
    found = job.digest() == expected[restored.version]
    course = {v: c for v, c in course.items() if v <= restored.version}
    course.update(train(job, attached.ckpt, range(restored, LAST)))
    version = attached.ckpt.version
    attached.ckpt.close()
    return {
        "different": [v for v in expected if course.get(v) != expected[v]],
        "restored": (restored.version, found),
        "version": version,
        "held": held,
        "gradients": gradients,
        "complaints": [e.text() for e in attached.events if e.severity > 20],
    }


CUT_SHORT = [
    ("default", "before_the_step_of_rank_0"),
    ("default", "inside_the_step"),
    ("groups", "in_the_backward_of_rank_0"),
    ("groups", "before_the_forward_of_rank_0"),
    ("unused parameters", "before_the_step"),
    ("unused parameters", "in_the_backward_of_rank_0"),
    ("sparse and dense", "before_the_forward_of_rank_0"),
    ("sparse as dense", "before_the_forward_of_rank_0"),
]


def check_trained(told: list[dict[str, Any]]) -> None:
    assert len({found["restored"] for found in told}) == 1
    for found in told:
        version, sound = found["restored"]
        assert version in (FAILS_AT - 1, FAILS_AT)
        assert sound
        assert found["different"] == []
        assert found["version"] == LAST
        assert found["held"] == []
        assert found["gradients"] == 0


@pytest.mark.parametrize(("name", "cut"), CUT_SHORT)
def test_training_continues_from_a_restore_after_an_iteration_cut_short(
    name: str, cut: str, pool: RankPool, place: Place
) -> None:
    """From the version that was being copied, if the copier was fast; else from the one before.

    Horovod keeps none of the reductions that a rank had launched in the interrupted iteration, and
    no rank keeps gradients of it.
    """
    check_trained(pool.run(trained_after, cut, name, place))


def trained_with_another_checkpointer(
    place: Place, cut: Callable[[HorovodJob, int], None], anew: bool
) -> tuple[int, str]:
    """As after a `with` block with a caught exception; the script keeps model and optimizer, and
    with `anew` it restarts Horovod."""
    job = make_horovod_job()
    first = attach(job, place).ckpt
    train(job, first, range(3))
    with pytest.raises(CutShortError):
        cut(job, 3)
    for module in job.model.modules():
        module._backward_hooks.clear()
    first.abandon()
    if anew:
        number = rank()
        horovod().barrier()
        horovod().shutdown()
        init_again(place, number)
    second = attach(job, place).ckpt
    restored = second.restore()
    train(job, second, range(restored, 6))
    second.close()
    return int(restored), exact.digest(job.replicated())


@pytest.mark.parametrize(
    ("cut", "anew"),
    [
        pytest.param(in_the_backward_of_rank_0, False, id="in the same run of Horovod"),
        pytest.param(before_the_forward_of_rank_0, True, id="in another one"),
    ],
)
def test_another_checkpointer_may_take_over_an_interrupted_restore(
    cut: Any, anew: bool, pool: RankPool, place: Place
) -> None:
    """After a restart of Horovod no rank waits for reductions of the earlier run."""
    one, other = pool.run(trained_with_another_checkpointer, place, cut, anew)
    assert one == other
    assert one[0] == 3


def closed_after_a_step_cut_short(place: Place) -> tuple[int, list[str], int]:
    job = make_horovod_job()
    attached = attach(job, place, local_every_steps=1, when_busy="wait")
    train(job, attached.ckpt, range(4))
    with pytest.raises(CutShortError):
        inside_the_step(job, 4)
    restored = attached.ckpt.restore()
    job.iterate(4)
    attached.ckpt.step()
    attached.ckpt.close()
    found = make_horovod_job(seed=2)
    again = attach(found, place).ckpt
    version = again.restore().version
    again.close()
    return int(restored), [e.text() for e in attached.events if e.severity > 30], version


def test_a_restore_ends_the_step_that_an_exception_left(pool: RankPool, place: Place) -> None:
    """Otherwise no final checkpoint could be taken any more."""
    told = pool.run(closed_after_a_step_cut_short, place)
    assert told == [(4, [], 5)] * 2
