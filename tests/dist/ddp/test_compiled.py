"""torch.compile and DDP, in both orders: the same bits, the same layers, the same names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.dist.ddp.test_barrier import blocks_released
from tests.support import exact
from tests.support.rank_pool import RankPool
from tests.support.training import (
    WIDTH,
    Job,
    Place,
    attach,
    rank,
    through_a_crash,
    train,
)

CRASH = 3
END = 5
wrap = partial(DistributedDataParallel, bucket_cap_mb=1)  # the smallest that torch.compile accepts


class Wide(nn.Module):
    """A model with several buckets of that size, normalizations and dropout."""

    def __init__(self, width: int = 400) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, width)
        layers = [nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, width)]
        self.body = nn.Sequential(*layers, nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        return self.head(self.body(self.first(x)))


def compiled(backend: str) -> Callable[[nn.Module], nn.Module]:
    return lambda module: torch.compile(module, backend=backend)


def compiled_part(net: nn.Module) -> nn.Module:
    net.body = torch.compile(net.body, backend="eager")
    return net


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile(DDP(net)), eager": lambda net: compiled("eager")(wrap(net)),
    "DDP(net with a compiled part)": lambda net: wrap(compiled_part(net)),
    "DDP(compile(net)), aot_eager": lambda net: wrap(compiled("aot_eager")(net)),
}


def make_job(way: str, seed: int = 1) -> Job:
    torch._dynamo.reset()  # torch keeps few compiled versions of a function
    torch.manual_seed(seed)
    model = WAYS[way](Wide())
    torch.manual_seed(1000 * seed + rank())
    return Job(model, [torch.optim.Adam(model.parameters(), lr=0.01)])


def trained_with_and_without(way: str, place: Place) -> dict[str, Any]:
    told = through_a_crash(partial(make_job, way), place, CRASH, END)
    return {**told, "frames": torch._dynamo.utils.counters["frames"]["ok"]}


@pytest.mark.parametrize(
    ("way", "size"),
    [("compile(DDP(net)), eager", 3), ("DDP(compile(net)), aot_eager", 2)],
)
def test_every_iteration_is_bit_for_bit_as_without(
    way: str, size: int, ranks: Any, place: Place
) -> None:
    told = ranks(size).run(trained_with_and_without, way, place)
    for found in told:
        assert found["complaints"] == []
        assert found["frames"] > 0, "something was compiled"
        assert found["restored"] == (CRASH, {"memory": size})
        assert found["course"] == found["plain"]


def layers_released_by_backward(place: Place) -> tuple[int, int, int]:
    return blocks_released(make_job("compile(DDP(net)), eager"), place)


def test_layers_are_copied_while_their_gradients_are_reduced(pool: RankPool, place: Place) -> None:
    told = pool.run(layers_released_by_backward, place)
    for at_boundary, after_backward, striped in told:
        assert (at_boundary, after_backward) == (0, striped)
        assert striped > 0


def values_of(job: Job) -> str:
    """The values by name, independent of the wrappers."""
    image = {**job.replicated(), **exact.buffers(job.bare)}
    return exact.digest(list(image.values()))


def crossed(place: Place) -> tuple[int, bool, list[str]]:
    """Restore the checkpoint of a compiled job in one not compiled."""
    job = make_job("DDP(net with a compiled part)")
    attached = attach(job, place)
    train(job, attached.ckpt, range(CRASH))
    before = values_of(job)
    job.iterate(CRASH)
    attached.ckpt.abandon()
    torch.manual_seed(3)
    model = wrap(Wide())
    job = Job(model, [torch.optim.Adam(model.parameters(), lr=0.01)])
    attached = attach(job, place)
    version = attached.ckpt.restore().version
    attached.ckpt.abandon()
    same = values_of(job) == before
    return version, same, [e.text() for e in attached.events if e.severity > 20]


def test_a_compiled_job_restores_where_nothing_is_compiled(pool: RankPool, place: Place) -> None:
    for told in pool.run(crossed, place):
        assert told == (CRASH, True, [])
