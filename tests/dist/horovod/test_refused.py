"""Horovod scripts that are refused, with the reason and the solution."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.support import exact
from tests.support.rank_pool import HOROVODRUN, MPIRUN
from tests.support.training import Net, Place, horovod, import_adapter, make_horovod_job, sgd

Way = Callable[[torch.nn.Module, dict[str, str]], None]
ELASTIC = ["HOROVOD_ELASTIC=1", "horovod_ckpt.elastic.TorchState"]


def plain_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def without_a_model(model: torch.nn.Module, where: dict[str, str]) -> None:
    import_adapter().DistributedOptimizer(plain_sgd(model), **where)


def with_a_list(model: torch.nn.Module, where: dict[str, str]) -> None:
    named = list(model.named_parameters())
    import_adapter().DistributedOptimizer(plain_sgd(model), named, **where)


def with_a_part(model: torch.nn.Module, where: dict[str, str]) -> None:
    head = model.get_submodule("head")
    import_adapter().DistributedOptimizer(plain_sgd(head), head.named_parameters(), **where)


def with_a_plain_optimizer(model: torch.nn.Module, where: dict[str, str]) -> None:
    import_adapter().Checkpointer(model, {"left": plain_sgd(model)}, **where)


def without_init(model: torch.nn.Module, where: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(horovod(), "is_initialized", lambda: False)
        import_adapter().Checkpointer(model, plain_sgd(model), **where)


def with_all(model: torch.nn.Module, where: dict[str, str]) -> None:
    import_adapter().DistributedOptimizer(plain_sgd(model), model.named_parameters(), **where)


def with_horovods(function: str, model: torch.nn.Module, where: dict[str, str]) -> None:
    optimizer = horovod().DistributedOptimizer(plain_sgd(model), model.named_parameters())
    given = [model, optimizer] if function == "Checkpointer" else [optimizer, model]
    getattr(import_adapter(), function)(*given, **where)


def in_an_elastic_job(way: Way, model: torch.nn.Module, where: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_ELASTIC", "1")  # as its launcher does
        way(model, where)


def with_adasum(model: torch.nn.Module, where: dict[str, str]) -> None:
    named = model.named_parameters()
    op = horovod().Adasum
    import_adapter().DistributedOptimizer(plain_sgd(model), named, op=op, **where)


def refusal(case: str, place: Place) -> str:
    """The text of the ConfigError. It comes before any collective: no rank waits for this one."""
    with pytest.raises(tierckpt.ConfigError) as caught:
        REFUSED[case][0](Net(), {"path": place.path, "shm_dir": place.shm})
    return str(caught.value)


REFUSED: dict[str, tuple[Way, list[str]]] = {
    "no model": (without_a_model, ["pass model=", "model.named_parameters()"]),
    "a list of parameters": (with_a_list, ["pass model=", "model.named_parameters()"]),
    "a part of the model": (with_a_part, ["(Linear)", "(Net)", "body.0.weight", "model=..."]),
    "a plain optimizer": (with_a_plain_optimizer, ["'left'", "SGD", "hvd.DistributedOptimizer"]),
    "no hvd.init()": (without_init, ["hvd.init()"]),
    "Adasum": (with_adasum, ["Adasum", "hvd.Average"]),
    "an elastic job": (partial(in_an_elastic_job, with_all), ELASTIC),
    **{
        f"{name} in an elastic job": (
            partial(in_an_elastic_job, partial(with_horovods, name)),
            ELASTIC,
        )
        for name in ("Checkpointer", "install")
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_error_names_the_problem_and_the_remedy(
    case: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for text in ranks(2, HOROVODRUN).run(refusal, case, Place.under(tmp_path, shm_dir)):
        for part in REFUSED[case][1]:
            assert part in text


def elastic_process_set(place: Place) -> str:
    hvd, model = horovod(), Net()
    some = hvd.add_process_set([0, 1])
    try:
        optimizer = hvd.DistributedOptimizer(
            plain_sgd(model), named_parameters=model.named_parameters(), process_set=some
        )
        elastic = importlib.import_module("horovod_ckpt.elastic")
        with pytest.raises(tierckpt.ConfigError) as caught:
            elastic.TorchState(model, optimizer, tierckpt={"path": place.path})
    finally:
        hvd.remove_process_set(some)
    return str(caught.value)


def test_an_elastic_state_of_some_ranks_is_refused(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    for text in ranks(3, HOROVODRUN).run(elastic_process_set, Place.under(tmp_path, shm_dir)):
        assert "process set of optimizer 'optimizer' is [0, 1]" in text
        assert "leave process_set out" in text


class HalfMade(torch.nn.Module):
    """An object that never became a module, but is alive."""

    def __init__(self) -> None:
        pass


def known_models() -> dict[str, bool]:
    """Whether the whole model is found by its parameters, independent of other live objects."""
    model_of = importlib.import_module("horovod_ckpt.adapter")._model_of
    model = Net()
    wrapper = torch.nn.Sequential(model)
    found = {"wrapped": model_of(model.named_parameters()) is model}
    given_up = torch.nn.ModuleList([wrapper, torch.nn.Linear(1, 1)])
    given_up.cycle = [given_up]
    del given_up
    found["part of a dead one"] = model_of(model.named_parameters()) is model
    half_made = HalfMade()
    found["beside a half-made one"] = model_of(model.named_parameters()) is model
    return {**found, "which cannot be asked": not vars(half_made)}


def test_the_whole_model_is_known_by_its_parameters(ranks: Any) -> None:
    for told in ranks(2, HOROVODRUN).run(known_models):
        assert all(told.values()), told


def momentum_under_adasum() -> tuple[str, str]:
    """The reason why Adasum is refused."""
    hvd = horovod()
    job = make_horovod_job(
        optimizer=sgd,
        options=lambda hvd, model: {"op": hvd.Adasum},
    )
    hvd.broadcast_parameters(job.bare.state_dict(), root_rank=0)
    job.zero_grad()
    job.backward(0)
    job.step()
    return exact.digest(exact.parameters(job.bare)), exact.digest(exact.optimizer(job.optimizer))


def test_adasum_keeps_other_momentum_on_every_rank(ranks: Any) -> None:
    """If Horovod changes that, it need not be refused any more."""
    (weights, momentum), (same_weights, other) = ranks(2, MPIRUN).run(momentum_under_adasum)
    assert weights == same_weights
    assert momentum != other


def elastic_beside_a_plain_one(place: Place) -> str:
    hvd, model, own = horovod(), Net(), torch.nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(
        plain_sgd(model), named_parameters=model.named_parameters()
    )
    elastic = importlib.import_module("horovod_ckpt.elastic")
    with pytest.raises(tierckpt.ConfigError) as caught:
        elastic.TorchState(
            model, optimizer, tierckpt={"path": place.path}, own=own, opt_own=plain_sgd(own)
        )
    return str(caught.value)


def test_an_elastic_state_with_a_plain_optimizer_is_refused(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """At its creation, and not only when the ranks meet."""
    place = Place.under(tmp_path, shm_dir)
    for text in ranks(2, HOROVODRUN).run(elastic_beside_a_plain_one, place):
        assert "optimizer 'opt_own' is a SGD of torch.optim.sgd" in text
        assert "ranks that join an elastic job" in text
