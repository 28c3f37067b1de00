"""Horovod computes the same bits with checkpoints as without, and the same after a crash."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tests.support import exact
from tests.support.rank_pool import RankPool
from tests.support.training import (
    Attached,
    HorovodJob,
    Named,
    Net,
    Place,
    Sentences,
    Words,
    attach,
    fused_adamw,
    horovod,
    in_one,
    make_horovod_job,
    plain_options,
    rank,
    sgd,
)

CRASH = 4
END = 7
normed = partial(Net, norm=nn.BatchNorm1d)
branched = partial(Net, branch=True)


# --- ways to use Horovod -------------------------------------------------------------------------


def clip(job: HorovodJob, iteration: int) -> str:
    """The way that Horovod documents."""
    job.zero_grad()
    job.backward(iteration)
    job.optimizer.synchronize()
    nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
    with job.optimizer.skip_synchronize():
        job.step()
    return job.gradients()


def synchronize_twice(job: HorovodJob, iteration: int) -> str:
    """Without `skip_synchronize`: Horovod reduces again, and warns."""
    job.zero_grad()
    job.backward(iteration)
    job.optimizer.synchronize()
    job.step()
    return job.gradients()


def scale(job: HorovodJob, iteration: int) -> str:
    """Mixed precision; in iterations 1 and 5 an overflow on rank 1 alone makes all ranks skip the
    step."""
    scaler = job.extra["scaler"]
    job.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = job.loss(iteration)
    if iteration in (1, 5) and rank() == 1:
        loss = loss * torch.inf
    with job.in_phase("backward"):
        scaler.scale(loss).backward()
    job.optimizer.synchronize()
    before = scaler.get_scale()
    with job.optimizer.skip_synchronize(), job.in_phase("step"):
        scaler.step(job.optimizer)
    scaler.update()
    job.steps += int(scaler.get_scale() >= before)
    return job.gradients()


def with_scaler(job: HorovodJob) -> None:
    job.extra["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)


def scheduled_before(params: Any, lr: float) -> torch.optim.Optimizer:
    """With a schedule that was made for the optimizer before Horovod took it."""
    optimizer = sgd(params, lr=lr)
    optimizer.extra = {"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)}
    return optimizer


def scheduled_after(job: HorovodJob) -> None:
    job.extra["schedule"] = torch.optim.lr_scheduler.OneCycleLR(
        job.optimizer, 0.1, total_steps=20, cycle_momentum=True
    )


def follow_schedule(job: HorovodJob, iteration: int) -> str:
    gradients = job.iterate(iteration)
    job.extra["schedule"].step()
    return gradients


def broadcast(job: HorovodJob) -> None:
    """Horovod makes one step of the inner optimizer alone, to create optimizer state to send."""
    hvd = horovod()
    hvd.broadcast_parameters(job.bare.state_dict(), root_rank=0)
    for optimizer in job.optimizers:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def body_and_head(model: nn.Module) -> list[Named]:
    body = [(n, p) for n, p in model.named_parameters() if n.startswith("body")]
    head = [(n, p) for n, p in model.named_parameters() if n.startswith("head")]
    return [body, head]


def body_only(model: nn.Module) -> list[Named]:
    return body_and_head(model)[:1]


def grow(job: HorovodJob) -> None:
    if len(job.optimizer.param_groups) == 1:
        job.optimizer.add_param_group({"params": list(job.bare.head.parameters()), "lr": 0.02})


def grow_at_2(job: HorovodJob, iteration: int) -> str:
    """Horovod does not reduce parameters that were added later, so this loop does."""
    if iteration == 2:
        grow(job)
    job.model.zero_grad()
    job.backward(iteration)
    for name, param in job.bare.head.named_parameters():
        horovod().allreduce_(param.grad, name=f"by hand {name}")
    job.step()
    return job.gradients()


def pairs(hvd: Any, model: nn.Module) -> dict[str, Any]:
    """The first layer is a group, the second another, and the others are single."""
    params = list(model.parameters())
    return {"groups": [params[:2], params[2:4]]}


def compressed(hvd: Any, model: nn.Module) -> dict[str, Any]:
    return {"compression": hvd.Compression.fp16, "gradient_predivide_factor": 2.0}


def nothing(job: HorovodJob) -> None:
    pass


@dataclass(frozen=True)
class Variant:
    """A way to use Horovod."""

    options: Callable[[Any, nn.Module], dict[str, Any]] = plain_options
    net: Callable[[], nn.Module] = Net
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    parts: Callable[[nn.Module], list[Named]] = in_one
    passes: int = 1
    loop: Callable[[HorovodJob, int], str] = HorovodJob.iterate
    before: Callable[[HorovodJob], None] = nothing
    """Called with a new job before it has a checkpointer."""
    after: Callable[[HorovodJob], None] = nothing
    """Called after it has one."""
    again: Callable[[HorovodJob], None] = nothing
    """Additional work of a resumed script."""
    released: str = "in backward"
    """Or `in part`: the step launches the reductions of some layers."""

    def job(self, seed: int) -> HorovodJob:
        job = make_horovod_job(
            self.net, self.optimizer, self.options, self.parts, self.passes, seed
        )
        self.before(job)
        return job


VARIANTS: dict[str, Variant] = {
    "default": Variant(),
    "two backward passes": Variant(passes=2),
    "groups": Variant(lambda hvd, model: {"groups": 2}),
    "lists of groups": Variant(pairs),
    "compressed and scaled": Variant(compressed),
    "sparse as dense": Variant(
        lambda hvd, model: {"sparse_as_dense": True}, net=Words, optimizer=torch.optim.SparseAdam
    ),
    "sparse and dense": Variant(net=Sentences, optimizer=torch.optim.Adagrad),
    "clipping": Variant(loop=clip),
    "synchronized twice": Variant(loop=synchronize_twice),
    "gradient scaler": Variant(net=normed, optimizer=sgd, loop=scale, before=with_scaler),
    "unused parameters": Variant(net=branched, released="in part"),
    "several optimizers": Variant(
        lambda hvd, model: {"op": hvd.Sum}, optimizer=fused_adamw, parts=body_and_head
    ),
    "parameters added later": Variant(
        parts=body_only, loop=grow_at_2, again=grow, released="in part"
    ),
    "a schedule made before": Variant(optimizer=scheduled_before, loop=follow_schedule),
    "a schedule made after, and a broadcast": Variant(
        optimizer=sgd, before=scheduled_after, after=broadcast, loop=follow_schedule
    ),
}


class Watch(tierckpt.Callbacks):
    """The phases in which reductions were launched, and the versions of boundaries."""

    def __init__(self, job: HorovodJob) -> None:
        self.job = job
        self.phases: set[str] = set()
        self.versions: list[tuple[int, int]] = []

    def on_allreduce_launched(self, params: Any) -> None:
        self.phases.add(self.job.phase)

    def on_step_boundary(self, version: int) -> None:
        self.versions.append((version, self.job.steps))


def course_of(
    variant: Variant, job: HorovodJob, iterations: range, boundary: Callable[[], None]
) -> dict[int, Any]:
    """Digests of every iteration's gradients, and of the state after it."""
    course = {}
    for iteration in iterations:
        gradients = variant.loop(job, iteration)
        boundary()
        own = exact.image({k: v.state_dict() for k, v in job.extra.items()})
        course[iteration] = (gradients, job.digest(), exact.digest(own))
    return course


def attached(job: HorovodJob, place: Place, **settings: Any) -> tuple[Attached, Watch]:
    watch = Watch(job)
    return attach(job, place, extra=job.extra, callbacks=[watch], **settings), watch


def lose_memory(place: Place) -> None:
    """Remove the memory, as a reboot would; all ranks call it."""
    horovod().barrier()
    if rank() == 0:
        shutil.rmtree(place.shm)
        Path(place.shm).mkdir()
    horovod().barrier()


def trained_with_and_without(name: str, place: Place, local: bool = False) -> dict[str, Any]:
    variant = VARIANTS[name]
    job = variant.job(1)
    variant.after(job)
    plain = course_of(variant, job, range(END), lambda: None)

    job = variant.job(1)
    every = {"local_every_steps": 1, "slots": 3, "when_busy": "wait"} if local else {}
    first, watch = attached(job, place, **every)
    variant.after(job)
    course = course_of(variant, job, range(CRASH), first.ckpt.step)
    variant.loop(job, CRASH)
    if local:
        first.ckpt.wait()
    first.ckpt.abandon()
    if local:
        lose_memory(place)

    job = variant.job(2)
    variant.again(job)
    second, again = attached(job, place)
    variant.after(job)
    restored = second.ckpt.restore()
    job.steps = restored.version
    found = job.digest()
    course.update(course_of(variant, job, range(restored, END), second.ckpt.step))
    second.ckpt.close()
    return {
        "plain": plain,
        "course": course,
        "found": found,
        "restored": (int(restored), restored.levels),
        "sealed": first.versions("sealed", "memory"),
        "versions": watch.versions + again.versions,
        "phases": watch.phases,
        "complaints": [e.text() for e in first.events + second.events if e.severity > 20],
    }


def check(name: str, size: int, level: str, told: dict[str, Any]) -> None:
    assert [text for text in told["complaints"] if "trained now, and not reduced" not in text] == []
    if name != "parameters added later":
        assert told["complaints"] == []
    assert told["restored"] == (CRASH, {level: size})
    assert told["found"] == told["plain"][CRASH - 1][1]
    assert told["course"] == told["plain"]
    assert all(version == steps for version, steps in told["versions"])
    assert told["sealed"] == sorted({v for v, _ in told["versions"] if v <= told["sealed"][-1]})
    if size == 1:
        assert told["phases"] == set()
    elif VARIANTS[name].released == "in backward" and name != "synchronized twice":
        assert told["phases"] == {"backward"}
    else:
        assert "backward" in told["phases"]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "gradient scaler"])
def test_every_iteration_is_bit_for_bit_as_without(name: str, pool: RankPool, place: Place) -> None:
    """As plain Horovod without a disturbance, through a crash; and versions are steps."""
    for told in pool.run(trained_with_and_without, name, place):
        check(name, 2, "memory", told)


def test_so_it_is_from_disk(pool: RankPool, losable: Place) -> None:
    name = "gradient scaler"
    for told in pool.run(trained_with_and_without, name, losable, local=True):
        check(name, 2, "local", told)
