"""Parameters that Horovod does not reduce: each rank's own, or refused, but never a mix of
ranks."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import exact
from tests.support.rank_pool import RankPool
from tests.support.training import HorovodJob, Net, Place, attach, batch, horovod

STEPS = 4
LEVELS = {"local_every_steps": 0, "local_every_seconds": 0.0}


class Training(HorovodJob):
    """A net that Horovod reduces, and centres that it does not reduce."""

    def __init__(self, case: str, seed: int) -> None:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"net": Net(), "centres": nn.Linear(3, 8)})
        part = model if case == "frozen at first" else model["net"]
        model["centres"].requires_grad_(part is not model)
        optimizer = horovod().DistributedOptimizer(
            torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9),
            named_parameters=part.named_parameters(),
        )
        if case == "in a group that was added later":  # Horovod does not know it
            optimizer.add_param_group({"params": list(model["centres"].parameters())})
        plain = torch.optim.SGD(model["centres"].parameters(), lr=0.1, momentum=0.9)
        self.given = [optimizer, plain] if case == "by an optimizer that was given" else [optimizer]
        super().__init__(model, [optimizer, plain] if "an optimizer" in case else [optimizer])

    def loss(self, iteration: int, part: int = 0) -> torch.Tensor:
        return self.model["centres"](self.model["net"](batch(iteration))).square().mean()

    def centres(self) -> str:
        """Each rank's own values, and their optimizer's state, if it is stored."""
        kept = self.given[-1].state.get(self.model["centres"].weight, {})
        return exact.digest(dict(self.model["centres"].state_dict()) | dict(kept))


def in_turn(place: Place, case: str) -> tuple[int, bool, bool, list[bool], list[str]]:
    """Centres are each rank's own from the moment on at which they are trained."""
    job = Training(case, 1)
    first = attach(job, place, optimizer=job.given, when_busy="wait")
    for iteration in range(STEPS):
        if iteration == STEPS // 2:
            job.model["centres"].requires_grad_(True)
        job.iterate(iteration)
        first.ckpt.step()
    before = job.centres()
    first.ckpt.abandon()
    again = Training(case, 2)
    second = attach(again, place, optimizer=again.given, when_busy="wait")
    restored = int(second.ckpt.restore())
    same = again.centres() == before
    second.ckpt.close()
    text = "centres.weight, centres.bias: trained now, and not reduced by Horovod"
    said = [e.severity > 20 for e in first.said(text)]
    others = [e.text() for e in first.events if e.severity > 20 and text not in e.text()]
    return restored, same, len(set(horovod().allgather_object(before))) == 2, said, others


@pytest.mark.parametrize(
    ("case", "is_said"),
    [
        ("by an optimizer that was given", False),
        ("by an optimizer that was not given", True),
        ("frozen at first", True),
        ("in a group that was added later", False),
    ],
)
def test_parameters_that_horovod_does_not_reduce_are_each_ranks_own(
    case: str, is_said: bool, pool: RankPool, place: Place
) -> None:
    """If that is not known at the start, rank 0 warns of it once."""
    for number, (*told, others) in enumerate(pool.run(in_turn, place, case)):
        assert told == [STEPS, True, True, [number == 0] if is_said else []]
        warned = number == 0 and case == "by an optimizer that was not given"
        assert ["the checkpointer was not given it" in text for text in others] == [True] * warned


# --- after a restore -----------------------------------------------------------------------------


def own_momentum_broadcast(place: Place) -> tuple[int, bool, bool]:
    """`max_norm`: a weight that a forward pass rescales is each rank's own, and so is its
    momentum."""
    drop_in = importlib.import_module("horovod_ckpt.torch")
    hvd = horovod()

    def life(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(40, 8, max_norm=0.5), nn.Linear(8, 2))
        optimizer = drop_in.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
            named_parameters=model.named_parameters(),
            path=place.path,
            shm_dir=place.shm,
            boundary="explicit",
            when_busy="wait",
            close_at_exit=False,
            **LEVELS,
        )
        return model, optimizer

    def momentum(model: Any, optimizer: Any) -> str:
        return exact.digest(dict(optimizer.state[model[0].weight]))

    model, optimizer = life(1)
    for iteration in range(STEPS):
        optimizer.zero_grad()
        of_this_rank = torch.Generator().manual_seed(10 * iteration + hvd.rank())
        model(torch.randint(0, 40, (5,), generator=of_this_rank)).square().mean().backward()
        optimizer.step()
        optimizer.checkpointer.step()
    before = momentum(model, optimizer)
    optimizer.checkpointer.abandon()
    model, optimizer = life(2)
    drop_in.broadcast_parameters(model.state_dict(), 0)
    drop_in.broadcast_optimizer_state(optimizer, 0)
    after = momentum(model, optimizer)
    version = optimizer.checkpointer.restored.version
    optimizer.checkpointer.close()
    return version, before == after, len(set(hvd.allgather_object(before))) == 2


def test_a_broadcast_after_the_restore_leaves_each_rank_its_own_momentum(
    pool: RankPool, place: Place
) -> None:
    assert pool.run(own_momentum_broadcast, place) == [(STEPS, True, True)] * 2
