"""Parameters that Horovod does not reduce: each rank's own, or refused, but never a mix of
ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tests.support import exact
from tests.support.rank_pool import HOROVODRUN
from tests.support.training import Net, Place, batch, horovod, import_adapter

STEPS = 4
LEVELS = {"local_every_steps": 0, "local_every_seconds": 0.0}


class Training:
    """A net that Horovod reduces, and centres that it does not reduce."""

    def __init__(self, seed: int, trained: Callable[[nn.ModuleDict], nn.Module]) -> None:
        """`trained`: the part that Horovod's optimizer steps."""
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"net": Net(), "centres": nn.Linear(3, 8)})
        part = trained(self.model)
        self.optimizer = horovod().DistributedOptimizer(
            torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9),
            named_parameters=part.named_parameters(),
        )
        self.plain = torch.optim.SGD(self.model["centres"].parameters(), lr=0.1, momentum=0.9)

    def iterate(self, iteration: int, *optimizers: Any) -> None:
        self.model.zero_grad()
        self.model["centres"](self.model["net"](batch(iteration))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    def centres(self) -> str:
        kept = self.plain.state.get(self.model["centres"].weight, {})
        return exact.digest(dict(self.model["centres"].state_dict()) | dict(kept))


def net_of(model: nn.ModuleDict) -> nn.Module:
    return model["net"]


def whole(model: nn.ModuleDict) -> nn.Module:
    model["centres"].requires_grad_(False)
    return model


def attached(place: Place, job: Training, *optimizers: Any) -> tuple[tierckpt.Checkpointer, Any]:
    events: list[tierckpt.Event] = []
    ckpt = import_adapter().Checkpointer(
        job.model,
        list(optimizers),
        path=place.path,
        shm_dir=place.shm,
        when_busy="wait",
        on_event=events.append,
        **LEVELS,
    )
    return ckpt, events


def plain_one_given_along(place: Place) -> tuple[bool, bool, list[str]]:
    job = Training(1, net_of)
    ckpt, events = attached(place, job, job.optimizer, job.plain)
    for iteration in range(STEPS):
        job.iterate(iteration, job.optimizer, job.plain)
        ckpt.step()
    before = job.centres()
    ckpt.abandon()
    again = Training(2, net_of)
    ckpt, _ = attached(place, again, again.optimizer, again.plain)
    same = ckpt.restore() == STEPS and again.centres() == before
    ckpt.close()
    everyone = horovod().allgather_object(before)
    return same, len(set(everyone)) == 2, [e.text() for e in events if e.severity > 20]


def test_a_plain_optimizer_beside_horovods_has_parameters_of_each_rank(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    assert ranks(2, HOROVODRUN).run(plain_one_given_along, place) == [(True, True, [])] * 2


def said_once(events: list[tierckpt.Event]) -> bool:
    text = "centres.weight, centres.bias: trained now, and not reduced by Horovod"
    said = [e for e in events if text in e.message]
    return len(said) == 1 and (said[0].severity > 20) == (horovod().rank() == 0)


def in_turn(
    place: Place, stepped: Callable[[nn.ModuleDict], nn.Module], thaw_at: int, *plain: str
) -> tuple[bool, bool, bool, list[str]]:
    """Centres are each rank's own from the moment on at which they are trained."""
    job = Training(1, stepped)
    ckpt, events = attached(place, job, job.optimizer)
    for iteration in range(STEPS):
        if iteration == thaw_at:
            job.model["centres"].requires_grad_(True)
        job.iterate(iteration, job.optimizer, *(getattr(job, name) for name in plain))
        ckpt.step()
    before = exact.digest(dict(job.model["centres"].state_dict()))
    ckpt.abandon()
    again = Training(2, stepped)
    ckpt, _ = attached(place, again, again.optimizer)
    restored = ckpt.restore()
    after = exact.digest(dict(again.model["centres"].state_dict()))
    ckpt.close()
    failed = [e.text() for e in events if e.name == "failed"]
    differ = len(set(horovod().allgather_object(before))) == 2
    return restored == STEPS and before == after, differ, said_once(events), failed


@pytest.mark.parametrize(
    "course",
    [
        pytest.param((net_of, -1, "plain"), id="by an optimizer that was not given"),
        pytest.param((whole, 2), id="frozen at first"),
    ],
)
def test_parameters_trained_later_are_per_rank_from_then_on(
    course: tuple[Any, ...], ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    told = ranks(2, HOROVODRUN).run(in_turn, Place.under(tmp_path, shm_dir), *course)
    assert told == [(True, True, True, [])] * 2


def added_later(place: Place) -> tuple[bool, bool]:
    """A parameter group that Horovod does not know."""

    def new(seed: int) -> Training:
        job = Training(seed, net_of)
        job.optimizer.add_param_group({"params": list(job.model["centres"].parameters())})
        return job

    job = new(1)
    ckpt, _ = attached(place, job, job.optimizer)
    for iteration in range(STEPS):
        job.iterate(iteration, job.optimizer)
        ckpt.step()
    before = exact.digest(dict(job.model["centres"].state_dict()))
    ckpt.abandon()
    again = new(2)
    ckpt, _ = attached(place, again, again.optimizer)
    restored = ckpt.restore()
    after = exact.digest(dict(again.model["centres"].state_dict()))
    ckpt.close()
    everyone = horovod().allgather_object(before)
    return restored == STEPS and after == before, len(set(everyone)) == 2


def test_a_group_that_was_added_later_is_each_ranks_own(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    assert ranks(2, HOROVODRUN).run(added_later, place) == [(True, True)] * 2


def what_is_refused(place: Place) -> list[str]:
    job = Training(1, net_of)
    wrapped = torch.optim.SGD(job.model["net"].parameters(), lr=0.1)
    told = []
    for optimizers in ([job.plain], [job.optimizer, wrapped]):
        with pytest.raises(tierckpt.ConfigError) as error:
            attached(place, job, *optimizers)
        told.append(str(error.value))
    return told


def test_a_plain_optimizer_in_the_place_of_horovods_is_refused(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for told in ranks(2, HOROVODRUN).run(what_is_refused, Place.under(tmp_path, shm_dir)):
        assert all("not a result of hvd.DistributedOptimizer" in text for text in told)


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
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    assert ranks(2, HOROVODRUN).run(own_momentum_broadcast, place) == [(STEPS, True, True)] * 2


def a_second_one_by_import(place: Place) -> str:
    drop_in = importlib.import_module("horovod_ckpt.torch")
    model = Net()

    def made(part: nn.Module, name: str, path: str) -> Any:
        return drop_in.DistributedOptimizer(
            torch.optim.SGD(part.parameters(), lr=0.1),
            [(f"{name}.{n}", p) for n, p in part.named_parameters()],
            model=model,
            path=path,
            shm_dir=place.shm,
            close_at_exit=False,
        )

    first = made(model.body, "body", place.path)
    try:
        with pytest.raises(tierckpt.ConfigError) as error:
            made(model.head, "head", f"{place.path}-of-the-second")
    finally:
        first.checkpointer.close()
    return str(error.value)


def test_the_second_optimizer_of_a_model_is_refused(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for told in ranks(2, HOROVODRUN).run(a_second_one_by_import, Place.under(tmp_path, shm_dir)):
        assert "this model has a checkpointer already" in told
        assert "horovod_ckpt.install" in told
