"""Parameters that DDP does not make equal on all ranks are restored to each rank's own values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tests.support import exact
from tests.support.rank_pool import RankPool
from tests.support.training import Attached, Job, Net, Place, attach, batch, through_a_crash, train

CRASH = 4
END = 7
many_buckets = {"bucket_cap_mb": 0.003}


class Centres(nn.Module):
    """A criterion with parameters that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(9000, 3))  # more than a unit of the layout
        self.register_buffer("asked", torch.zeros(()))

    def forward(self, found: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return (found - self.centres[: len(found)]).square().mean()


@dataclass
class WithCentres(Job):
    """The criterion's gradients are reduced by the loop, or not at all."""

    centres: nn.Module | None = None
    by_hand: bool = False

    def loss(self, iteration: int, part: int = 0) -> torch.Tensor:
        inner = self.model["net"] if isinstance(self.model, nn.ModuleDict) else self.model
        return self.centres(inner(batch(iteration, part)))

    def iterate(self, iteration: int) -> str:
        self.optimizer.zero_grad()
        self.loss(iteration).backward()
        gradients = exact.digest(exact.gradients(self.bare))
        if self.by_hand:
            dist.all_reduce(self.centres.centres.grad)
        self.optimizer.step()
        return gradients

    def image(self) -> dict[str, Any]:
        return {**super().image(), **exact.parameters(self.centres)}


def criterion_outside(seed: int) -> Job:
    """Parameters that only the optimizer has."""
    torch.manual_seed(seed)
    net, centres = DistributedDataParallel(Net(), **many_buckets), Centres()
    params = [{"params": net.parameters()}, {"params": centres.parameters(), "lr": 0.1}]
    return WithCentres(net, [torch.optim.Adam(params, lr=0.01)], centres=centres)


def criterion_in_the_model(seed: int) -> Job:
    torch.manual_seed(seed)
    net, centres = DistributedDataParallel(Net(), **many_buckets), Centres()
    both = nn.ModuleDict({"net": net, "centres": centres})
    optimizer = torch.optim.Adam(both.parameters(), lr=0.01)
    return WithCentres(both, [optimizer], centres=centres)


def reduced_by_hand(seed: int) -> Job:
    job = criterion_outside(seed)
    job.by_hand = True
    return job


def ignored(seed: int) -> Job:
    """The head is each rank's own, and so are the statistics before it."""
    torch.manual_seed(seed)
    net = Net(norm=nn.BatchNorm1d)
    names = ["head.weight", "head.bias", "body.3.running_mean", "body.3.running_var"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    return Job(
        DistributedDataParallel(net, **many_buckets), [torch.optim.Adam(net.parameters(), lr=0.01)]
    )


WAYS: dict[str, tuple[int, Callable[[int], Job]]] = {
    "a criterion's parameters, in the optimizer only": (3, criterion_outside),
    "a criterion's parameters, in the model": (2, criterion_in_the_model),
    "parameters that DDP is told to ignore": (3, ignored),
    "a criterion's parameters, reduced by the loop": (2, reduced_by_hand),
}
"""The number of ranks, and the job."""


def resumed(way: str, place: Place) -> dict[str, Any]:
    jobs: list[Job] = []

    def make(seed: int) -> Job:
        jobs.append(WAYS[way][1](seed))
        return jobs[-1]

    told = through_a_crash(make, place, CRASH, END)
    return {**told, "last": {name: exact.digest(each) for name, each in jobs[-1].image().items()}}


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_gets_its_own_back(way: str, ranks: Any, place: Place) -> None:
    size, _ = WAYS[way]
    told = ranks(size).run(resumed, way, place)
    for found in told:
        assert found["complaints"] == []
        assert found["restored"] == (CRASH, {"memory": size})
        assert found["found"] == found["plain"][CRASH - 1][1]
        assert found["course"] == found["plain"]
    one, other = (found["last"] for found in told[:2])
    unlike = [name for name in one if one[name] != other[name] and name.startswith("param")]
    assert bool(unlike) == ("by the loop" not in way), "ranks really differ"


# --- another number of ranks, and another way to train -------------------------------------------


def leave_behind(place: Place) -> tuple[str, str]:
    """The values that are equal on all ranks, and this rank's own ones."""
    job = criterion_in_the_model(1)
    attached = attach(job, place)
    train(job, attached.ckpt, range(CRASH))
    told = parts_of(job, job.model)
    job.iterate(CRASH)
    attached.ckpt.abandon()
    return told


def parts_of(job: Job, parts: Any) -> tuple[str, str]:
    """Parameters and optimizer state of net and centres."""
    states = [
        [(p, sorted(job.optimizer.state[p].items())) for p in parts[name].parameters()]
        for name in ("net", "centres")
    ]
    return exact.digest(exact.image(states[0])), exact.digest(exact.image(states[1]))


def take_up(place: Place) -> tuple[tuple[str, str], list[str]]:
    job = criterion_in_the_model(2)
    attached = attach(job, place)
    attached.ckpt.restore()
    told = parts_of(job, job.model)
    train(job, attached.ckpt, range(CRASH, CRASH + 2))
    attached.ckpt.abandon()
    return told, [e.text() for e in attached.events if e.severity > 20]


@pytest.mark.parametrize(("before", "now"), [(2, 3), (2, 1)])
def test_another_number_of_ranks_takes_them_in_turn(
    before: int, now: int, ranks: Any, place: Place
) -> None:
    left = ranks(before).run(leave_behind, place)
    for number, (found, repeated_errors) in enumerate(ranks(now).run(take_up, place)):
        assert found == (left[0][0], left[number % before][1])
        assert repeated_errors == []


class Whole(nn.Module):
    """The criterion and the net in one module, for one DDP module to reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.centres = Net(), Centres()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.centres(self.net(x))


def take_up_alike(place: Place) -> tuple[str, str]:
    model = DistributedDataParallel(Whole())
    job = Job(model, [torch.optim.Adam(model.parameters(), lr=0.01)])
    attached = attach(job, place)
    attached.ckpt.restore()
    attached.ckpt.abandon()
    return parts_of(job, job.bare._modules)


def test_all_ranks_take_the_first_ranks_values_if_replicas_are_equal_now(
    pool: RankPool, place: Place
) -> None:
    """The criterion was moved into the DDP module: ranks with different values would stay
    different."""
    left = pool.run(leave_behind, place)
    assert left[0][1] != left[1][1]
    for found in pool.run(take_up_alike, place):
        assert found == left[0]


# --- parameters that DDP does not know it should reduce ------------------------------------------


@dataclass
class Thawing(Job):
    """The head was frozen when DDP was made, and is trained from some iteration on."""

    thaws: int = 2

    def iterate(self, iteration: int) -> str:
        self.bare.head.requires_grad_(iteration >= self.thaws)
        return super().iterate(iteration)


def make_thawing() -> Thawing:
    torch.manual_seed(1)
    net = Net()
    net.head.requires_grad_(False)
    wrapped = DistributedDataParallel(net)
    return Thawing(wrapped, [torch.optim.Adam(net.parameters(), lr=0.01)])


def thawed(place: Place) -> dict[str, Any]:
    """A run that ends in the middle, a second run, and training without checkpoints."""
    plain = make_thawing()
    for iteration in range(END):
        plain.iterate(iteration)
    first = make_thawing()
    attached = attach(first, place)
    train(first, attached.ckpt, range(CRASH))
    attached.ckpt.abandon()
    second = make_thawing()
    again = attach(second, place)
    restored = again.ckpt.restore()
    train(second, again.ckpt, range(restored, END))
    again.ckpt.close()
    return {
        "same": exact.digest(plain.replicated()) == exact.digest(second.replicated()),
        "at": int(restored),
        "head": exact.digest(exact.parameters(second.bare.head)),
        "failed": [e.text() for e in attached.events + again.events if e.name == "failed"],
        "said": [e.message for e in attached.events if e.severity > 20],
    }


def test_parameters_that_ddp_ignores_are_per_rank_once_they_are_trained(
    pool: RankPool, place: Place
) -> None:
    """DDP is not notified when a frozen parameter is unfrozen."""
    told = pool.run(thawed, place)
    assert told[0]["head"] != told[1]["head"]
    for found in told:
        assert found["same"]
        assert found["at"] == CRASH
        assert found["failed"] == []
    assert any(
        "head.weight" in text and "each rank stores its own values" in text
        for text in told[0]["said"]
    )


def assumed(ckpt: Any) -> list[Any]:
    state = ckpt._state
    found: list[Any] = state.placements.assumed_replicated(state.walk().params)
    return found


def refused(place: Place) -> list[int]:
    """The number of parameters that count as equal: before a refused restore, after it, and
    after a successful one."""
    first = make_thawing()
    attached = attach(first, place)
    train(first, attached.ckpt, range(CRASH))
    attached.ckpt.abandon()
    again = attach(make_thawing(), place, extra={"another": nn.Linear(1, 1)})
    alike = [len(assumed(again.ckpt))]
    with pytest.raises(tierckpt.StateMismatchError):
        again.ckpt.restore()
    alike.append(len(assumed(again.ckpt)))
    again.ckpt.restore(strict=False)
    again.ckpt.abandon()
    return [*alike, len(assumed(again.ckpt))]


def test_a_refused_restore_sets_nothing_apart(pool: RankPool, place: Place) -> None:
    for before, behind, restored in pool.run(refused, place):
        assert before == behind > restored


# --- models that differ between averagings -------------------------------------------------------


def local_sgd() -> Any:
    return post_localSGD_hook.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)


def attach_with_local_sgd(way: str, place: Place) -> tuple[str, list[Path]]:
    torch.manual_seed(1)
    net = DistributedDataParallel(Net())
    job = Job(net, [torch.optim.SGD(net.parameters(), lr=0.1)])
    state, hook = local_sgd(), post_localSGD_hook.post_localSGD_hook
    attached: Attached | None = None
    if way == "before":
        net.register_comm_hook(state, hook)
    if way == "after":
        attached = attach(job, place)
    given = {"comm_hook": (state, hook)} if way == "given" else {}
    act = partial(attach, job, place, **given)
    if way == "after":
        act = partial(net.register_comm_hook, state, hook)
    with pytest.raises(tierckpt.UnsupportedStateError) as caught:
        act()
    if attached is not None:
        attached.ckpt.close()
    job.iterate(0)
    return str(caught.value), [p for p in Path(place.shm).rglob("*") if p.is_file()]


@pytest.mark.parametrize("way", ["before", "given", "after"])
def test_local_sgd_is_refused(way: str, pool: RankPool, place: Place) -> None:
    for text, left in pool.run(attach_with_local_sgd, way, place):
        assert "PostLocalSGDState" in text
        assert "the models differ" in text
        assert left == []
