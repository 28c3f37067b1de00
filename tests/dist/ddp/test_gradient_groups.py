"""Layers are released by hooks on parameters, and DDP reduces the gradients itself where it can."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import tierckpt
from ddp_ckpt.comm_hook import _groups
from tests.support.rank_pool import RankPool
from tests.support.training import Job, Place, attach, make_job

many_buckets = {"bucket_cap_mb": 0.003}


def has_our_hook(job: Job) -> bool:
    """True if DDP has a communication hook; ours has an empty name."""
    return "comm_hook" in job.model._get_ddp_logging_data()


class Released(tierckpt.Callbacks):
    """The number of elements of each group that was released."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_allreduce_launched(self, params: Any) -> None:
        self.sizes.append(sum(param.numel() for param in params))


def released_in_passes(place: Place) -> dict[str, Any]:
    job = make_job(**many_buckets)
    watch = Released()
    ckpt, released = attach(job, place, callbacks=[watch]).ckpt, watch.sizes
    told: dict[str, Any] = {"hooked": has_our_hook(job)}
    for iteration in range(3):
        job.iterate(iteration)
        ckpt.step()
        told[f"pass {iteration}"] = len(released)
    with job.model.no_sync():
        job.loss(3).backward()
    told["no_sync"] = len(released)
    job.iterate(3)
    ckpt.step()
    told["after"] = len(released)
    job.iterate(4)  # the last version is complete before this step
    groups = len(_groups(list(job.bare.parameters()), int(0.003 * 2**20)))
    told["all"] = sum(released[:groups]) == sum(p.numel() for p in job.bare.parameters())
    told["sealed"] = ckpt._log.counts["sealed"]
    ckpt.abandon()
    job.iterate(5)
    told["left"] = [n for n, p in job.bare.named_parameters() if p._post_accumulate_grad_hooks]
    return {**told, "groups": groups}


def test_each_reduced_pass_releases_every_group_once(pool: RankPool, place: Place) -> None:
    (told, other) = pool.run(released_in_passes, place)
    groups = told["groups"]
    assert groups > 1
    passes = [told[f"pass {i}"] for i in range(3)]
    assert passes == [groups, 2 * groups, 3 * groups]
    assert told["no_sync"] == 3 * groups
    assert told["after"] == 4 * groups
    assert told["all"]
    assert not told["hooked"]
    assert told["sealed"] == 4
    assert told["left"] == []
    assert other == told


def registered_in_the_middle(place: Place) -> dict[str, Any]:
    """The user registers a hook after DDP has made its buckets."""
    told: dict[str, Any] = {}
    for ours in (False, True):
        job = make_job(**many_buckets)
        ckpt = attach(job, Place(f"{place.path} {ours}", place.shm)).ckpt if ours else None
        course = []
        for iteration in range(6):
            if iteration == 3:
                job.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
            course.append((job.iterate(iteration), job.digest()))
            if ckpt is not None:
                ckpt.step()
                (of_the_module,) = ckpt.adapter.pack().values()
                told.setdefault("orders", []).append(sorted(of_the_module["buckets"]))
        told[f"course {ours}"] = course
        if ckpt is not None:
            told["sealed"] = ckpt._log.counts.get("sealed", 0)
            ckpt.abandon()
    return told


def test_a_hook_can_be_registered_after_the_first_passes(pool: RankPool, place: Place) -> None:
    for told in pool.run(registered_in_the_middle, place):
        assert told["course True"] == told["course False"]
        assert told["orders"] == [told["orders"][0]] * 6
        assert told["orders"][0]
        assert told["sealed"] >= 5


NEEDED = {
    "find_unused_parameters": {"find_unused_parameters": True},
    "a static graph": {"static_graph": True},
    "gradients that may be kept": {"gradient_as_bucket_view": True},
}


def hooked(place: Place) -> list[str]:
    """Ways to make a job after which DDP has no communication hook."""
    without = []
    for name in (*NEEDED, "passes before", "a trace"):
        job = make_job(**NEEDED.get(name, {}))
        if name == "passes before":
            job.iterate(0)
        settings = {"trace_dir": place.path} if name == "a trace" else {}
        ckpt = attach(job, Place(f"{place.path} {name}", place.shm), **settings).ckpt
        if not has_our_hook(job):
            without.append(name)
        ckpt.abandon()
    return without


def test_ddp_gets_a_hook_where_it_is_needed(ranks: Any, place: Place) -> None:
    assert ranks(3).run(hooked, place) == [[]] * 3


def orders(place: Place) -> list[Any]:
    """The stored order, and the one in DDP's log, after each of three passes."""
    job = make_job(**many_buckets)
    ckpt = attach(job, place).ckpt
    told = []
    for iteration in range(3):
        with job.model.no_sync():  # another pass before, which DDP does not reduce
            job.loss(iteration).backward()
        job.iterate(iteration)
        ckpt.step()
        (of_the_module,) = ckpt.adapter.pack().values()
        told.append(of_the_module["buckets"])
    text = job.model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
    ckpt.abandon()
    assert not has_our_hook(job)
    return [told, [int(number) for number in text.replace(",", " ").split()]]


def test_the_stored_order_is_the_one_of_ddps_buckets(pool: RankPool, place: Place) -> None:
    for told, ddps in pool.run(orders, place):
        assert told == [ddps] * 3


def test_groups_are_as_large_as_buckets() -> None:
    class Of:
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

    params: Any = [Of(n) for n in (5, 1 << 20, 3 << 20, 3 << 20, 1 << 19, 1 << 19)]
    sizes = partial(map, lambda group: [each.nbytes for each in group])
    assert [*sizes(_groups(params, 5 << 20))] == [[1 << 19] * 2, [3 << 20] * 2, [1 << 20, 5]]
    assert [*sizes(_groups(params, 1))] == [[each.nbytes] for each in reversed(params)]
    assert _groups([], 1) == []
