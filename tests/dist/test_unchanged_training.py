"""Training computes the same bits with checkpoints as without, and the same after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import ddp_ckpt
import tierckpt
from tests import exact
from tests.dist import hooks
from tests.dist.syncnorm import SyncNorm1d
from tests.dist.training import (
    Job,
    Net,
    Place,
    Words,
    attach,
    course_of,
    crash_after,
    fused_adamw,
    make_job,
    only_layers_release,
    rank,
    sgd,
    train,
)
from tierckpt.copyplan import Binding

CRASH = 4
END = 7

many_buckets = {"bucket_cap_mb": 0.003}
normed = partial(Net, norm=nn.BatchNorm1d)

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "many buckets, rebuilt after the first iteration": many_buckets,
    "gradients are views of buckets": {"gradient_as_bucket_view": True, **many_buckets},
    "gradients that are kept": {"keeps_gradients": True, **many_buckets},
    "gradients that stay views of buckets": {
        "gradient_as_bucket_view": True,
        "keeps_gradients": True,
        **many_buckets,
    },
    "gradients that stay views, unused parameters": {
        "gradient_as_bucket_view": True,
        "keeps_gradients": True,
        "find_unused_parameters": True,
        "net": partial(Net, branch=True),
        **many_buckets,
    },
    "static graph": {"static_graph": True, **many_buckets},
    "unused parameters": {
        "find_unused_parameters": True,
        "net": partial(Net, branch=True),
        **many_buckets,
    },
    "fused AdamW": {"optimizer": fused_adamw, **many_buckets},
    "float64": {"dtype": torch.float64, "optimizer": sgd},
    "bfloat16": {"dtype": torch.bfloat16, "optimizer": sgd, **many_buckets},
    "float16": {"dtype": torch.float16, "optimizer": sgd},
    "sparse gradients": {"net": Words, "optimizer": torch.optim.SparseAdam},
    "sparse gradients, and views": {
        "net": Words,
        "optimizer": torch.optim.SparseAdam,
        "gradient_as_bucket_view": True,
    },
    "BatchNorm": {"net": normed, "optimizer": sgd},
    "BatchNorm of each rank its own": {"net": normed, "broadcast_buffers": False},
    "SyncBatchNorm": {"net": partial(Net, norm=SyncNorm1d), **many_buckets},
}


def no_boundary() -> None:
    pass


def plainly_restarted(options: dict[str, Any], job: Job) -> Job:
    """A new job that got its state from `job` by nothing but torch."""
    model, optimizer = job.bare.state_dict(), job.optimizer.state_dict()
    stream = torch.get_rng_state()
    again = make_job(**options, seed=3)
    again.bare.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    torch.set_rng_state(stream)
    return again


def trained_with_and_without(variant: str, crash: int, place: Place) -> dict[str, Any]:
    options = VARIANTS[variant]
    job = make_job(**options)
    plain = course_of(job, range(crash), no_boundary)
    restarted = course_of(plainly_restarted(options, job), range(crash, END), no_boundary)
    job = make_job(**options)
    plain = course_of(job, range(END), no_boundary)

    job = make_job(**options)
    first = attach(job, place)
    course = course_of(job, range(crash), first.ckpt.step)
    job.iterate(crash)
    first.ckpt.abandon()

    job = make_job(**options, seed=2)
    second = attach(job, place)
    restored = second.ckpt.restore()
    found = job.digest()
    resumed = course_of(job, range(restored, END), second.ckpt.step)
    second.ckpt.close()
    return {
        "plain": plain,
        "restarted": {**{i: plain[i] for i in range(crash)}, **restarted},
        "found": found,
        "course": {**course, **resumed},
        "restored": (int(restored), restored.levels),
        "sealed": first.ckpt.log.counts.get("sealed", 0),
        "complaints": [e.text() for e in first.events + second.events if e.severity > 20],
    }


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_iteration_is_bit_for_bit_as_without(
    variant: str, size: int, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """As plain DDP that was never disturbed, from the first iteration to the last.

    Where DDP cannot be shown its buckets before the first pass: as plain DDP, whose state was
    copied to new objects where ours crashed. On three ranks it sums in another order then.
    """
    primed = variant not in ("static graph", "unused parameters") and "sparse" not in variant
    place = Place.under(tmp_path, shm_dir)
    for told in ranks(size).run(trained_with_and_without, variant, CRASH, place):
        assert told["complaints"] == []
        assert told["restored"] == (CRASH, {"memory": size})
        assert told["found"] == told["plain"][CRASH - 1][1]
        assert told["course"] == told["plain" if primed else "restarted"]
        assert told["sealed"] == CRASH


FIRST = ["many buckets, rebuilt after the first iteration", "BatchNorm"]


@pytest.mark.parametrize("variant", FIRST)
def test_also_from_the_first_version_on(
    variant: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """When DDP has not made its final buckets yet."""
    place = Place.under(tmp_path, shm_dir)
    for told in ranks(3).run(trained_with_and_without, variant, 1, place):
        assert told["restored"] == (1, {"memory": 3})
        assert told["course"] == told["plain"]


# --- communication hooks -------------------------------------------------------------------------


def power() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


Hook = tuple[Callable[[], Any], Callable[..., Any], dict[str, Any]]

HOOKS: dict[str, Hook] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook, many_buckets),
    "fp16 compression": (lambda: None, default_hooks.fp16_compress_hook, many_buckets),
    "bf16 compression": (lambda: None, hooks.in_bfloat16, many_buckets),
    # One bucket: with more, its callbacks talk over one gloo group in any order, and collide.
    "PowerSGD": (power, powerSGD_hook.powerSGD_hook, {}),
    "PowerSGD in fp16": (
        power,
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        {},
    ),
    "a function of the user's": (dict, hooks.sum_of_clamped, many_buckets),
}


def trained_with_hook(name: str, place: Place) -> dict[str, Any]:
    """By plain DDP, and in the three ways to have a hook and checkpoints."""
    make_state, hook, options = HOOKS[name]
    told = {}
    for way in ("plain", "given", "registered later", "registered before"):
        job = make_job(**options)
        state = make_state()
        if way in ("plain", "registered before"):
            job.model.register_comm_hook(state, hook)
        course, notices = [], []
        if way == "plain":
            course = [(job.iterate(i), job.digest()) for i in range(END)]
        else:
            given = {"comm_hook": (state, hook)} if way == "given" else {}
            attached = attach(job, Place(f"{place.path} {way}", place.shm), **given)
            if way == "registered later":
                job.model.register_comm_hook(state, hook)
            for iteration in range(END):
                gradients = job.iterate(iteration)
                attached.ckpt.step()
                course.append((gradients, job.digest()))
            attached.ckpt.abandon()
            assert attached.ckpt.log.counts["sealed"] == END - 1
            notices = [e.message for e in attached.events if e.name == "notice"]
        calls = state.get("calls") if isinstance(state, dict) else None
        told[way] = (course, calls)
        told[f"notices {way}"] = notices
    return told


def resumed_with_error_feedback(kept: bool, place: Place) -> dict[str, Any]:
    """PowerSGD's course undisturbed, and as resumed in new objects."""

    def begin(seed: int) -> tuple[Job, Any, dict[str, Any]]:
        state = power()
        given = {"comm_hook": (state, powerSGD_hook.powerSGD_hook)}
        extra = {"extra_per_rank": {"hook": ddp_ckpt.HookState(state)}} if kept else {}
        return make_job(seed=seed), state, {**given, **extra}

    job, state, _ = begin(1)
    job.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    plain = course_of(job, range(END), no_boundary)
    job, _, settings = begin(1)
    first = attach(job, place, **settings)
    course = course_of(job, range(CRASH), first.ckpt.step)
    job.iterate(CRASH)
    first.ckpt.abandon()
    job, state, settings = begin(2)
    second = attach(job, place, **settings)
    restored = second.ckpt.restore()
    iterations = state.iter
    course |= course_of(job, range(restored, END), second.ckpt.step)
    second.ckpt.close()
    return {
        "same": course == plain,
        "restored": (int(restored), iterations),
        "warned": [e.message for e in first.events if e.severity > 20],
    }


@pytest.mark.parametrize("size", [2, 3])
def test_error_feedback_goes_on_where_it_was(
    size: int, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for told in ranks(size).run(resumed_with_error_feedback, True, Place.under(tmp_path, shm_dir)):
        assert told == {"same": True, "restored": (CRASH, CRASH), "warned": []}


def test_error_feedback_that_is_not_kept_is_said(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    for told in ranks(2).run(resumed_with_error_feedback, False, Place.under(tmp_path, shm_dir)):
        assert told["restored"] == (CRASH, 0)
        assert not told["same"]
        (warning,) = told["warned"]
        assert "PowerSGDState, is not in the checkpoints" in warning
        assert "its curve is another one" in warning


def hook_state_with_a_static_graph(place: Place) -> str:
    job = make_job(static_graph=True)
    with pytest.raises(tierckpt.ConfigError) as caught:
        attach(job, place, extra_per_rank={"hook": ddp_ckpt.HookState(power())})
    return str(caught.value)


def test_what_a_hook_remembers_of_buckets_wants_the_same_buckets(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    for text in ranks(2).run(hook_state_with_a_static_graph, place):
        assert "HookState with static_graph=True" in text


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_of_the_users_computes_what_it_computes_alone(
    name: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for told in ranks(2).run(trained_with_hook, name, Place.under(tmp_path, shm_dir)):
        for way in ("given", "registered later", "registered before"):
            assert told[way] == told["plain"], way
        silent = "PowerSGD" not in name and name != "a function of the user's"
        for way in ("given", "registered later"):
            assert len(told[f"notices {way}"]) == (0 if silent else 1)
            assert all("is not in the checkpoints" in text for text in told[f"notices {way}"])
        (notice,) = told["notices registered before"]
        assert "has a communication hook already" in notice


def hook_given_to_a_model_that_has_one(place: Place) -> str:
    job = make_job()
    job.model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(tierckpt.ConfigError) as caught:
        attach(job, place, comm_hook=(None, default_hooks.fp16_compress_hook))
    return str(caught.value)


def test_two_hooks_are_refused(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    for text in ranks(2).run(hook_given_to_a_model_that_has_one, Place.under(tmp_path, shm_dir)):
        assert "has a communication hook already" in text


def hook_that_fails_once(place: Place) -> tuple[int, list[str]]:
    job = make_job()
    attached = attach(job, place, comm_hook=({}, hooks.fails_at_the_second_call))
    job.iterate(0)
    attached.ckpt.step()
    with pytest.raises(ZeroDivisionError, match="in the user's hook"):
        job.iterate(1)
    attached.ckpt.abandon()
    job = make_job(seed=2)
    attached = attach(job, place)
    restored = attached.ckpt.restore()
    attached.ckpt.abandon()
    return restored.version, [e.text() for e in attached.events if e.severity > 20]


def test_an_error_in_the_users_hook_comes_out_of_backward_as_it_is(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Nothing was released then, so version 1 never got complete; the job starts from scratch."""
    for version, complaints in ranks(2).run(hook_that_fails_once, Place.under(tmp_path, shm_dir)):
        assert version == 0
        assert complaints == []


# --- how loops are written -----------------------------------------------------------------------


def accumulate(job: Job, iteration: int) -> None:
    job.optimizer.zero_grad()
    for part in range(3):
        with job.model.no_sync() if part < 2 else nullcontext():
            job.loss(iteration, part).backward()
    job.optimizer.step()


def accumulate_over_iterations(job: Job, iteration: int) -> None:
    """Every iteration synchronises, every third one makes a step."""
    job.loss(iteration).backward()
    if iteration % 3 == 2:
        job.optimizer.step()
        job.optimizer.zero_grad()


def clip(job: Job, iteration: int) -> None:
    job.optimizer.zero_grad()
    job.loss(iteration).backward()
    nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
    job.optimizer.step()


def two_forwards(job: Job, iteration: int) -> None:
    job.optimizer.zero_grad()
    (job.loss(iteration, 0) + job.loss(iteration, 1)).backward()
    job.optimizer.step()


def evaluate_between(job: Job, iteration: int) -> None:
    """In evaluation mode, and in training mode without gradients, which moves BatchNorm."""
    job.iterate(iteration)
    with torch.no_grad():
        job.model.eval()
        job.loss(iteration, 5)
        job.model.train()
        job.loss(iteration, 6)


def fail_and_go_on(job: Job, iteration: int) -> None:
    """Errors that a loop catches: before the forward, and between backward and step."""
    for attempt in range(2):
        try:
            if attempt == 0 and iteration % 3 == 1:
                raise ValueError("a bad batch")
            job.optimizer.zero_grad()
            job.loss(iteration).backward()
            if attempt == 0 and iteration % 3 == 2:
                raise ValueError("a bad loss")
            job.optimizer.step()
        except ValueError:
            continue
        return


def rewrite_gradients(job: Job, iteration: int) -> None:
    job.model.zero_grad(set_to_none=False)
    job.loss(iteration).backward()
    for p in job.model.parameters():
        p.grad = p.grad.sign()
    job.optimizer.step()


def accumulate_into_what_is_kept(job: Job, iteration: int) -> None:
    """Views of buckets in every pass; only the first iteration begins with new gradients."""
    job.optimizer.zero_grad(set_to_none=False)
    for part in range(2):
        job.loss(iteration, part).backward()
    job.optimizer.step()


def keep_some(job: Job, iteration: int) -> None:
    """In one bucket, gradients that are views from the start beside new ones."""
    for number, param in enumerate(job.bare.parameters()):
        if param.grad is not None and number % 2:
            param.grad.zero_()
        else:
            param.grad = None
    job.loss(iteration).backward()
    job.optimizer.step()


views = {"gradient_as_bucket_view": True, **many_buckets}

Loops = dict[str, tuple[Callable[[Job, int], None], dict[str, Any]]]

LOOPS: Loops = {
    "accumulation under no_sync": (accumulate, many_buckets),
    "accumulation over iterations": (accumulate_over_iterations, many_buckets),
    "clipping": (clip, {"gradient_as_bucket_view": True}),
    "two forwards": (two_forwards, {"optimizer": sgd}),
    "evaluation between steps": (evaluate_between, {"net": normed}),
    "errors caught by the loop": (fail_and_go_on, many_buckets),
    "gradients rewritten": (rewrite_gradients, many_buckets),
}
# DDP computes the mean in two ways, which differ where the world size is no power of two.
LOOPS_OF_THREE: Loops = {
    "accumulation under no_sync": (accumulate, views),
    "accumulation over iterations": (accumulate_over_iterations, views),
    "accumulation into what is kept": (accumulate_into_what_is_kept, views),
    "some gradients kept": (keep_some, views),
    "gradients rewritten": (rewrite_gradients, views),
}


def looped_with_and_without(name: str, size: int, place: Place) -> tuple[Any, ...]:
    iterate, options = (LOOPS if size == 2 else LOOPS_OF_THREE)[name]
    plain = make_job(**options)
    expected = {}
    for iteration in range(9):
        iterate(plain, iteration)
        expected[iteration + 1] = plain.digest()

    course = {}
    job = make_job(**options)
    attached = attach(job, place)
    for iteration in range(6):
        iterate(job, iteration)
        attached.ckpt.step()
        course[iteration + 1] = job.digest()
    # As far as the next step of the optimizer, which completes the last snapshot.
    for iteration in range(6, 9):
        iterate(job, iteration)
    version = attached.ckpt.version
    attached.ckpt.abandon()

    job = make_job(**options, seed=2)
    attached = attach(job, place)
    restored = attached.ckpt.restore()
    if name == "accumulation over iterations":
        job.optimizer.zero_grad()
    for iteration in range(restored, 9):
        iterate(job, iteration)
        attached.ckpt.step()
        course[iteration + 1] = job.digest()
    attached.ckpt.close()
    return expected, course, int(restored), restored.version == version


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in LOOPS), *((name, 3) for name in LOOPS_OF_THREE)]
)
def test_the_loop_may_be_written_in_many_ways(
    name: str, size: int, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    told = ranks(size).run(looped_with_and_without, name, size, place)
    for expected, course, restored, is_newest in told:
        assert course == expected
        assert restored == 6
        assert is_newest


def scaled(place: Place | None, iterations: range) -> tuple[Any, ...]:
    """Mixed precision; in iterations 1 and 4 an overflow on rank 1 alone."""
    job = make_job(net=normed, optimizer=sgd, seed=2 if iterations.start else 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    attached = attach(job, place, extra={"scaler": scaler}) if place else None
    start = int(attached.ckpt.restore()) if attached and iterations.start else 0
    course = {}
    for iteration in range(start, iterations.stop):
        job.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = job.loss(iteration)
        if iteration in (1, 4) and rank() == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(job.optimizer)
        scaler.update()
        if attached:
            attached.ckpt.step()
        course[iteration + 1] = (job.digest(), exact.image(scaler.state_dict()))
    version = attached.ckpt.version if attached else 0
    if attached:
        attached.ckpt.abandon()
    return course, start, version


def scaled_with_and_without(place: Place) -> tuple[Any, ...]:
    expected, _, _ = scaled(None, range(8))
    course, _, version = scaled(place, range(6))
    resumed, start, _ = scaled(place, range(6, 8))
    return expected, {**course, **resumed}, start, version


def test_steps_skipped_by_the_gradient_scaler_are_no_versions(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    told = ranks(2).run(scaled_with_and_without, Place.under(tmp_path, shm_dir))
    for expected, course, start, version in told:
        assert course == expected
        assert version == 6 - 2
        # Version 4 was still being copied; version 3 is of the iteration before the overflow.
        assert start == 4


def two_networks(way: str, place: Place) -> tuple[Any, ...]:
    def networks(seed: int) -> Job:
        job = make_job(seed=seed, **many_buckets)
        parts = [job.bare.body.parameters(), job.bare.head.parameters()]
        job.optimizers = [torch.optim.AdamW(parts[0]), sgd(parts[1], lr=0.1)]
        return job

    def arranged(job: Job) -> Any:
        return dict(zip("ab", job.optimizers, strict=True)) if way == "dict" else job.optimizers

    plain = networks(1)
    expected = {}
    for iteration in range(END):
        plain.iterate(iteration)
        expected[iteration + 1] = plain.digest()
    job = networks(1)
    course = crash_after(job, attach(job, place, optimizer=arranged(job)), CRASH)
    job = networks(2)
    attached = attach(job, place, optimizer=arranged(job))
    restored = attached.ckpt.restore()
    course.update(train(job, attached.ckpt, range(restored, END)))
    attached.ckpt.close()
    return expected, course, restored.version


@pytest.mark.parametrize("way", ["dict", "list"])
def test_several_optimizers_share_one_model(
    way: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    told = ranks(2).run(two_networks, way, Place.under(tmp_path, shm_dir))
    for expected, course, version in told:
        assert (course, version) == (expected, CRASH)


@pytest.mark.parametrize("process_group", [True, False])
def test_a_job_of_one_process_is_a_job(
    process_group: bool, ranks: Any, own_ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    pool = ranks(1) if process_group else own_ranks([{}], process_group=False)
    (told,) = pool.run(trained_with_and_without, "default", CRASH, Place.under(tmp_path, shm_dir))
    assert told["complaints"] == []
    assert told["restored"] == (CRASH, {"memory": 1})
    assert told["course"] == told["plain"]


# --- the barrier ---------------------------------------------------------------------------------


SILENT = {"fused SGD": partial(sgd, fused=True), "fused AdamW": fused_adamw}


@only_layers_release()
def restored_from_slow_copies(kind: str, barrier: bool, place: Place) -> tuple[int, list[str]]:
    """Every block is copied late: without the barrier the optimizer would be first."""
    options = {"optimizer": SILENT[kind], "net": partial(Net, layers=8)}
    with pytest.MonkeyPatch.context() as patch:
        copy_block = Binding.copy_block

        def slowly(self: Binding, *args: Any) -> bytes:
            time.sleep(0.03)
            return copy_block(self, *args)

        patch.setattr(Binding, "copy_block", slowly)
        if not barrier:
            patch.setattr(tierckpt.Checkpointer, "_before_step", lambda self, *_: None)
        job = make_job(**options, **many_buckets)
        attached = attach(job, place, release="backward")
        train(job, attached.ckpt, range(3))
        expected = job.replicated()
        job.iterate(3)
        attached.ckpt._underway.finish()
        attached.ckpt.abandon()
    job = make_job(**options, seed=2)
    attached = attach(job, place)
    restored = attached.ckpt.restore()
    attached.ckpt.abandon()
    return restored.version, exact.differences(expected, job.replicated())


@pytest.mark.parametrize("kind", SILENT)
def test_no_tensor_changes_before_it_is_copied(
    kind: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    for version, torn in ranks(2).run(restored_from_slow_copies, kind, True, place):
        assert (version, torn) == (3, [])


def test_it_is_the_barrier_that_keeps_the_optimizer_off(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """The control of the test above: a fused SGD leaves no trace that a check could find."""
    place = Place.under(tmp_path, shm_dir)
    for version, torn in ranks(2).run(restored_from_slow_copies, "fused SGD", False, place):
        assert version == 3
        assert torn


def test_a_copy_that_is_evidently_torn_is_never_sealed(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """AdamW's step counts do leave a trace."""
    place = Place.under(tmp_path, shm_dir)
    for version, _ in ranks(2).run(restored_from_slow_copies, "fused AdamW", False, place):
        assert version < 3


@only_layers_release()
def layers_released_by_backward(place: Place) -> tuple[int, int, int]:
    """How many blocks are free to be copied after the boundary, after backward, and in all."""
    job = make_job(**many_buckets)
    attached = attach(job, place, release="backward")
    train(job, attached.ckpt, range(3))
    snapshot = attached.ckpt._underway.snapshot
    assert snapshot is not None
    striped = sum(not b.own for b in snapshot.plan.layout.blocks)
    at_boundary = striped - len(snapshot._held)
    job.optimizer.zero_grad()
    job.loss(3).backward()
    after_backward = striped - len(snapshot._held)
    job.optimizer.step()
    attached.ckpt.abandon()
    return at_boundary, after_backward, striped


def test_layers_are_copied_while_their_gradients_are_reduced(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    told = ranks(2).run(layers_released_by_backward, Place.under(tmp_path, shm_dir))
    for at_boundary, after_backward, striped in told:
        assert (at_boundary, after_backward) == (0, striped)
        assert striped > 0


def own_norms(place: Place) -> tuple[Any, ...]:
    job = make_job(net=normed, broadcast_buffers=False)
    attached = attach(job, place)
    train(job, attached.ckpt, range(CRASH))
    mine = exact.buffers(job.bare)
    job.iterate(CRASH)
    attached.ckpt.abandon()
    job = make_job(net=normed, broadcast_buffers=False, seed=2)
    attached = attach(job, place)
    attached.ckpt.restore()
    attached.ckpt.abandon()
    return exact.digest(mine), exact.digest(exact.buffers(job.bare))


def test_buffers_that_differ_by_rank_come_back_to_their_rank(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    told = ranks(2).run(own_norms, Place.under(tmp_path, shm_dir))
    assert told[0][0] != told[1][0]
    for before, after in told:
        assert before == after
