"""Horovod scripts that are refused, with the reason and the solution."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import tierckpt
from tests.support.rank_pool import RankPool
from tests.support.training import Net, Place, horovod, import_adapter

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


def elastic_beside_a_plain_one(model: torch.nn.Module, where: dict[str, str]) -> None:
    own = torch.nn.Linear(2, 2)
    optimizer = horovod().DistributedOptimizer(
        plain_sgd(model), named_parameters=model.named_parameters()
    )
    elastic = importlib.import_module("horovod_ckpt.elastic")
    elastic.TorchState(model, optimizer, tierckpt=where, own=own, opt_own=plain_sgd(own))


def with_horovods_and_its_own(model: torch.nn.Module, where: dict[str, str]) -> None:
    optimizer = horovod().DistributedOptimizer(plain_sgd(model), model.named_parameters())
    import_adapter().Checkpointer(model, [optimizer, plain_sgd(model)], **where)


def with_a_second_one(model: torch.nn.Module, where: dict[str, str]) -> None:
    """By the replaced import, which makes a checkpointer for each optimizer."""
    drop_in = importlib.import_module("horovod_ckpt.torch")

    def made(name: str, **settings: str) -> Any:
        part = model.get_submodule(name)
        named = [(f"{name}.{n}", p) for n, p in part.named_parameters()]
        return drop_in.DistributedOptimizer(
            plain_sgd(part), named, model=model, close_at_exit=False, **settings
        )

    first = made("body", **where)
    try:
        made("head", **{**where, "path": f"{where['path']}-of-the-second"})
    finally:
        first.checkpointer.close()


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
    "the plain one that Horovod's was made from": (
        with_horovods_and_its_own,
        ["not a result of hvd.DistributedOptimizer"],
    ),
    "a second optimizer of the model": (
        with_a_second_one,
        ["this model has a checkpointer already", "horovod_ckpt.install"],
    ),
    "an elastic state with a plain optimizer": (
        elastic_beside_a_plain_one,
        ["optimizer 'opt_own' is a SGD of torch.optim.sgd", "ranks that join an elastic job"],
    ),
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
def test_an_error_names_the_problem_and_the_remedy(case: str, pool: RankPool, place: Place) -> None:
    for text in pool.run(refusal, case, place):
        for part in REFUSED[case][1]:
            assert part in text


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


def test_the_whole_model_is_known_by_its_parameters(pool: RankPool) -> None:
    for told in pool.run(known_models):
        assert all(told.values()), told
