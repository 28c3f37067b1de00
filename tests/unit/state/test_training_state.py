"""The training state: names, contents, and refusals with advice."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tierckpt.checkpointer import shard_bytes
from tierckpt.errors import UnsupportedStateError
from tierckpt.format import PER_RANK, UNIT_BYTES
from tierckpt.snapshot import CopyPlan
from tierckpt.state import TrainingState, label_optimizers, refuse_model, unwrap


def trained(model: nn.Module, *optimizers: torch.optim.Optimizer) -> TrainingState:
    """One step, so that there is optimizer state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
    return TrainingState(model, label_optimizers(optimizers))


def names_of(found: TrainingState) -> list[str]:
    return [name for name, _, _ in found.entries(found.walk())]


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")  # another backend's compiler is seconds away


# --- names ---------------------------------------------------------------------------------------


def test_names_are_those_of_the_users_own_module() -> None:
    model = nn.Sequential(collections.OrderedDict(body=nn.Linear(2, 2), head=nn.Linear(2, 1)))
    plain = names_of(TrainingState(model, {}))
    assert plain == ["model/body.weight", "model/body.bias", "model/head.weight", "model/head.bias"]
    assert names_of(TrainingState(compiled(model), {})) == plain
    assert names_of(TrainingState(nn.DataParallel(model), {})) == plain
    assert names_of(TrainingState(nn.DataParallel(compiled(model)), {})) == plain
    model.body = compiled(model.body)
    assert names_of(TrainingState(model, {})) == plain


def test_unwrapping_stops_at_the_users_own_module() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    mine = Mine()
    assert unwrap(nn.DataParallel(compiled(mine))) is mine


def test_tied_weights_are_there_once_under_their_first_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    found = trained(model, torch.optim.SGD(model.parameters(), lr=1, momentum=0.9))
    assert names_of(found) == ["model/0.weight", "optimizer0/0.weight/momentum_buffer"]


def test_several_optimizers_keep_their_states_apart() -> None:
    model = nn.Linear(2, 2)
    found = trained(
        model,
        torch.optim.SGD([model.weight], lr=1, momentum=0.9),
        torch.optim.Adam([model.weight, model.bias], lr=1),
    )
    assert set(names_of(found)) == {
        "model/weight",
        "model/bias",
        "optimizer0/weight/momentum_buffer",
        *(
            f"optimizer1/{param}/{key}"
            for param in ("weight", "bias")
            for key in ("step", "exp_avg", "exp_avg_sq")
        ),
    }
    assert found.structure() == {
        "optimizer0": {"class": "SGD", "groups": [["weight"]]},
        "optimizer1": {"class": "Adam", "groups": [["weight", "bias"]]},
    }


def test_optimizers_are_labelled() -> None:
    one, two = (torch.optim.SGD([torch.zeros(1, requires_grad=True)]) for _ in range(2))
    assert label_optimizers(one) == {"optimizer": one}
    assert label_optimizers([one, two]) == {"optimizer0": one, "optimizer1": two}
    assert label_optimizers({"gen": one, "disc": two}) == {"gen": one, "disc": two}


def test_a_parameter_outside_the_model_is_named_by_its_place_in_the_optimizer() -> None:
    model = nn.Linear(2, 2)
    outside = torch.zeros(2, requires_grad=True)
    found = TrainingState(
        model, {"opt": torch.optim.SGD([{"params": model.parameters()}, {"params": [outside]}])}
    )
    assert names_of(found)[-1] == "model/opt.group1.param0"


def test_a_group_added_later_is_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1, momentum=0.9)
    found = trained(model, optimizer)
    before = found.group_sizes(), found.structure()
    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [*model[1].parameters(), late], "lr": 0.5})
    trained(model, optimizer)
    found.refresh_names()
    names = names_of(found)
    assert "optimizer0/1.weight/momentum_buffer" in names
    assert "model/optimizer0.group1.param2" in names
    assert found.group_sizes() != before[0]
    assert found.structure() != before[1]


def test_frozen_parameters_and_buffers_belong_to_the_state_and_volatile_buffers_do_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    model.register_buffer("none", None)
    found = TrainingState(model, {})
    assert "model/0.weight" in names_of(found)
    buffers = [name for name, _ in found.buffer_entries(found.walk())]
    assert buffers == [
        "buffer/1.running_mean",
        "buffer/1.running_var",
        "buffer/1.num_batches_tracked",
    ]


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD,
        partial(torch.optim.SGD, momentum=0.9),
        torch.optim.AdamW,
        partial(torch.optim.Adam, amsgrad=True),
    ],
)
def test_room_is_asked_for_before_an_optimizer_has_its_state(make: Any) -> None:
    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(512, 512)
        return model, make(model.parameters(), lr=0.1)

    model, optimizer = new()
    estimated = shard_bytes(TrainingState(model, {"o": optimizer}), 1)
    found = trained(*new())
    taken = CopyPlan(found, found.walk(), 0, 1).layout.nbytes
    assert estimated == pytest.approx(taken, abs=2 * UNIT_BYTES)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_weights_that_the_forward_pass_scales_are_every_ranks_own(kind: Any) -> None:
    """With their optimizer state; and the room requested equals the need of the shards."""
    model = nn.Sequential(kind(9000, 8, max_norm=1.0), nn.Linear(64, 4096), kind(40, 8))
    found = trained(model, torch.optim.Adam(model.parameters()))
    ranks = 4
    plan = CopyPlan(found, found.walk(), 1, ranks)
    own = {piece.spec.name for piece in plan.layout.pieces if piece.placement is PER_RANK}
    kept = [f"optimizer0/0.weight/{key}" for key in ("step", "exp_avg", "exp_avg_sq")]
    assert own == {"model/0.weight", *kept}
    taken = [CopyPlan(found, found.walk(), rank, ranks).layout.nbytes for rank in range(ranks)]
    assert shard_bytes(found, ranks) == pytest.approx(max(taken), abs=2 * UNIT_BYTES)


def test_a_change_during_a_copy_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plan = CopyPlan(found, found.walk(), 0, 1)
    before = plan.counters()
    assert plan.changed_since(before) == []
    with torch.no_grad():
        model[1].bias.zero_()
    assert plan.changed_since(before) == ["model/1.bias"]


def test_a_shared_buffer_is_there_once() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[1].running_mean = model[0].running_mean
    found = TrainingState(model, {})
    names = [name for name, _ in found.buffer_entries(found.walk())]
    assert len(names) == len(set(names)) == 5


# --- refusals and their messages -----------------------------------------------------------------


def refused(make: Callable[[], Any]) -> str:
    with pytest.raises(UnsupportedStateError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["FullyShardedDataParallel", "FSDPModule"])
def test_sharded_models_are_refused(kind: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1), type(kind, (nn.Module,), {})())
    said = refused(lambda: refuse_model(model))
    assert "'1'" in said
    assert "torch.distributed.checkpoint" in said


def test_a_subclass_of_a_sharded_model_is_refused() -> None:
    base = type("FSDPModule", (nn.Module,), {})
    said = refused(lambda: refuse_model(type("Mine", (base,), {})()))
    assert "(root)" in said


def test_a_sharding_optimizer_is_refused() -> None:
    param = torch.zeros(1, requires_grad=True)
    kind = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    said = refused(lambda: TrainingState(nn.Linear(1, 1), {"o": kind([param])}))
    assert "inner optimizer class" in said


def test_none_as_optimizer_is_refused() -> None:
    said = refused(lambda: TrainingState(nn.Linear(1, 1), {"o": object()}))  # type: ignore[dict-item]
    assert "object is not a torch.optim.Optimizer" in said


def with_weight(weight: torch.Tensor) -> TrainingState:
    model = nn.Linear(2, 2)
    del model.weight
    model._parameters["weight"] = weight  # type: ignore[assignment]
    return TrainingState(model, {})


def nested(*parts: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        return torch.nested.nested_tensor(list(parts))


@pytest.mark.parametrize(
    ("make", "way_out"),
    [
        (lambda: nn.Parameter(torch.eye(2).to_sparse()), "Keep it dense"),
        (lambda: nn.Parameter(torch.empty(2, 2, device="meta")), "Materialise"),
        (lambda: nested(torch.ones(2), torch.ones(3)), "unbind()"),
        (lambda: torch.ones(1).expand(2, 2), "clone"),
        (lambda: torch.ones(2, 2, dtype=torch.complex64).conj(), "resolve_conj()"),
        (lambda: torch._neg_view(torch.ones(2, 2)), "resolve_neg()"),
        (nn.parameter.UninitializedParameter, "Run one forward pass"),
        (lambda: torch.ones(2).as_subclass(type("Odd", (torch.Tensor,), {})), "extra="),
    ],
    ids=["sparse", "meta", "nested", "expanded", "conjugate", "negative", "lazy", "subclass"],
)
def test_a_parameter_that_cannot_be_taken_is_named_with_a_way_out(
    make: Callable[[], torch.Tensor], way_out: str
) -> None:
    found = with_weight(make())
    said = refused(lambda: found.entries(found.walk()))
    assert said.startswith("model/weight is ")
    assert way_out in said


def test_a_buffer_that_cannot_be_taken_is_named() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1).expand(3))
    found = TrainingState(model, {})
    assert refused(lambda: found.buffer_entries(found.walk())).startswith("buffer/mask is expanded")
    model.mask = torch.ones(2, 3, dtype=torch.complex64).mH
    said = refused(lambda: found.buffer_entries(found.walk()))
    assert said.startswith("buffer/mask is a view, and its memory holds other values")


def test_optimizer_state_that_cannot_be_taken_is_named() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.bias]["odd"] = torch.eye(2).to_sparse()
    found = TrainingState(model, {"opt": optimizer})
    said = refused(lambda: found.entries(found.walk()))
    assert said.startswith("SGD.state['bias']['odd'] is of layout")


def test_a_sharded_tensor_is_refused_with_a_way_out() -> None:
    import torch.distributed as dist
    import torch.distributed.tensor
    from torch.distributed.device_mesh import init_device_mesh

    if not hasattr(torch.distributed.tensor, "DTensor"):
        pytest.skip("torch 2.4 has DTensor at a place that is not public")
    from torch.distributed.tensor import DTensor, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
        found = with_weight(nn.Parameter(sharded))
        said = refused(lambda: found.entries(found.walk()))
        assert "DTensor" in said
        assert "torch.distributed.checkpoint" in said
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("thing", [object(), 3, {"state_dict": 1}], ids=["object", "3", "dict"])
def test_an_extra_without_state_is_refused_by_name(thing: Any) -> None:
    said = refused(lambda: TrainingState(nn.Linear(1, 1), {}, {"loader": thing}))
    assert "extra['loader']" in said
    assert "load_state_dict" in said


def test_the_layout_does_not_depend_on_the_order_in_which_an_optimizer_made_its_state() -> None:
    """A restored optimizer has its values in another order than one that made them itself; ranks of
    both kinds must cut the same shards."""
    names = []
    for keys in (("step", "exp_avg", "exp_avg_sq"), ("exp_avg_sq", "step", "exp_avg")):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        for param in model.parameters():
            made = {key: torch.zeros(() if key == "step" else param.shape) for key in keys}
            optimizer.state[param] = made
        taken = TrainingState(model, label_optimizers(optimizer), None, None)
        names.append([name for name, _, _ in taken.entries(taken.walk())])
    assert names[0] == names[1]
