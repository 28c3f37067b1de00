"""Tensors, parameters and layers that are replaced while a job runs, or before it restores."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tierckpt
from tierckpt.errors import StateMismatchError, UnsupportedStateError
from tierckpt.snapshot import copy_plan


class Net(nn.Module):
    def __init__(self, rows: int = 6, columns: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.register_buffer("seen", torch.arange(6.0))
        self.register_buffer("late", None)
        self.register_buffer("square", torch.arange(4.0).reshape(2, 2))
        self.register_buffer("volatile", torch.zeros(6), persistent=False)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Job:
    """One process; every step is a version on disk."""

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        model: nn.Module,
        make: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
        **more: Any,
    ) -> None:
        self.model, self.optimizer = model, make(model)
        self.events: list[tierckpt.Event] = []
        self.checkpointer = tierckpt.Checkpointer(
            model,
            self.optimizer,
            path=path,
            agent="inline",
            local_every_steps=1,
            when_busy="wait",
            on_event=self.events.append,
            **settings,
            **more,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpointer.close()

    @property
    def params(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def run(self, steps: int) -> Job:
        for _ in range(steps):
            self.step()
            self.checkpointer.step()
        return self

    def step(self) -> None:
        for param in self.params:
            param.grad = torch.ones_like(param)
        self.optimizer.step()

    def failures(self) -> list[str]:
        return [str(event.message) for event in self.events if event.name == "failed"]


# --- a tensor replaced in its place --------------------------------------------------------------


def resize_buffer(job: Job) -> None:
    job.model.seen.resize_(3)


def transpose_buffer(job: Job) -> None:
    job.model.square.t_()


def cut_parameter(job: Job) -> None:
    job.model.weight.data = job.model.weight.data[:4]


def view_parameter(job: Job) -> None:
    job.model.weight.data = job.model.weight.data.view(3, 6)


def retype_buffer(job: Job) -> None:
    job.model.seen.data = job.model.seen.data.view(torch.int32)


def transpose_parameter(job: Job) -> None:
    job.model.weight.data = job.model.weight.data.t()


def drop_none_and_register(job: Job) -> None:
    del job.model.late
    job.model.register_buffer("fresh", torch.full((3,), 7.0))


def rename_buffer(job: Job) -> None:
    buffers = job.model._buffers
    buffers["fresh"] = buffers.pop("seen")


def fill_another_slot(job: Job) -> None:
    job.model.late, job.model.seen = job.model.seen, None


def make_persistent(job: Job) -> None:
    job.model.register_buffer("volatile", torch.full((6,), 5.0))


@pytest.mark.parametrize(
    "change",
    [
        resize_buffer,
        transpose_buffer,
        cut_parameter,
        transpose_parameter,
        view_parameter,
        retype_buffer,
        drop_none_and_register,
        rename_buffer,
        fill_another_slot,
        make_persistent,
    ],
)
def test_the_next_version_has_it_as_it_is(
    change: Callable[[Job], None], path: Path, settings: Any
) -> None:
    with Job(path, settings, Net(), plain) as job:
        job.checkpointer.restore()
        job.run(2)
        change(job)
        job.run(2)
        wanted = {name: t.clone() for name, t in job.model.state_dict().items()}
    assert job.failures() == []
    with Job(path, settings, Net(), plain) as again:
        change(again)
        with torch.no_grad():
            for tensor in again.model.state_dict().values():
                tensor.zero_()
        assert again.checkpointer.restore() == 4
        found = again.model.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class SwapsWeights:
    """Its state_dict() puts averages in the place of the weights for a moment."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        with torch.no_grad():
            kept = self.model.weight.clone()
            self.model.weight.fill_(9)
            found = {"mean": float(self.model.weight.mean())}
            self.model.weight.copy_(kept)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"mean": 9.0}


def test_weights_that_a_state_dict_swaps_for_a_moment_cost_no_version(
    path: Path, settings: Any
) -> None:
    model = Net()
    with Job(path, settings, model, plain, extra={"swaps": SwapsWeights(model)}) as job:
        job.checkpointer.restore()
        job.run(3)
    assert job.failures() == []


class Deep(nn.Sequential):
    """Layers of one size each, with their momentum: the last ones are no part of a sample."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(3)))


def last(job: Job) -> Any:
    return job.optimizer.state[job.model[2].weight]


def move_parameter(job: Job) -> None:
    job.model[2].weight.data = torch.full((4, 4), 7.0)


def flatten_parameter(job: Job) -> None:
    job.model[2].weight.data = job.model[2].weight.data.view(-1)
    last(job)["momentum_buffer"] = last(job)["momentum_buffer"].view(-1)


def transpose_state(job: Job) -> None:
    last(job)["momentum_buffer"].copy_(torch.arange(16.0).view(4, 4))
    last(job)["momentum_buffer"].t_()


def replace_state(job: Job) -> None:
    last(job)["momentum_buffer"] = torch.arange(16.0).view(4, 4)


def rename_parameter(job: Job) -> None:
    held = job.model[2]._parameters
    held["more"] = held.pop("bias")


def add_state(job: Job) -> None:
    last(job)["more"] = torch.arange(3.0)


def replace_layer(job: Job) -> None:
    before, job.model[2] = job.model[2], nn.Linear(4, 4)
    params = job.optimizer.param_groups[0]["params"]
    for old, new in zip(before.parameters(), job.model[2].parameters(), strict=True):
        params[[p is old for p in params].index(True)] = new
        job.optimizer.state[new] = job.optimizer.state.pop(old)


CHANGES = [
    move_parameter,
    flatten_parameter,
    transpose_state,
    replace_state,
    rename_parameter,
    add_state,
    replace_layer,
]


@pytest.mark.parametrize("few", [0, copy_plan.FEW])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_one_of_many_tensors_is_in_the_next_version(
    change: Callable[[Job], None],
    few: int,
    path: Path,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_plan, "FEW", few)
    with Job(path, settings, Deep()) as job:
        job.checkpointer.restore()
        job.run(2).checkpointer.complete()
        change(job)
        job.run(1)
        wanted = copy.deepcopy((job.model.state_dict(), [*job.optimizer.state.values()]))
    assert job.failures() == []
    with Job(path, settings, Deep()) as again:
        again.step()
        change(again)
        assert again.checkpointer.restore() == 3
        found = (again.model.state_dict(), [*again.optimizer.state.values()])
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


# --- parameters outside the model, and groups ----------------------------------------------------


def test_a_parameter_outside_the_model_that_was_replaced(path: Path, settings: Any) -> None:
    def make(_: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(4))], lr=0.1)

    with Job(path, settings, nn.Module(), make) as job:
        job.checkpointer.restore()
        job.run(2)
        job.optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.full((4,), 100.0))
        job.run(2)
        wanted = job.params[0].detach().clone()
    with Job(path, settings, nn.Module(), make) as again:
        assert again.checkpointer.restore() == 4
        assert torch.equal(again.params[0], wanted)


def test_parameters_that_changed_their_groups(path: Path, settings: Any) -> None:
    def make(model: Any) -> torch.optim.Optimizer:
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.01}]
        return torch.optim.SGD(groups, lr=0.1)

    def swap(job: Job) -> None:
        one, other = job.optimizer.param_groups
        one["params"], other["params"] = other["params"], one["params"]

    with Job(path, settings, nn.Linear(3, 3), make) as job:
        job.checkpointer.restore()
        job.run(2)
        swap(job)
        job.run(2)
    with Job(path, settings, nn.Linear(3, 3), make) as again:
        swap(again)
        assert again.checkpointer.restore() == 4


# --- layers that are replaced before a restore ---------------------------------------------------


class Counted(nn.Linear):
    """Keeps something besides parameters and buffers."""

    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def layers() -> nn.Sequential:
    return nn.Sequential(Counted(3, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3))


def head(model: Any) -> torch.optim.Optimizer:
    return momentum(model[2])


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_layer_replaced_since_the_start_is_restored(
    replaced: int, path: Path, settings: Any
) -> None:
    with Job(path, settings, layers(), head) as job:
        job.checkpointer.restore()
        job.model(torch.randn(4, 3))
        job.model[0].count = 5
        job.run(2)
        wanted = job.model.state_dict()
    with Job(path, settings, layers(), head) as again:
        again.model[replaced] = layers()[replaced]
        assert again.checkpointer.restore() == 2
        found = again.model.state_dict()
        assert found.pop("0._extra_state") == wanted.pop("0._extra_state") == {"count": 5}
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_layer_replaced_during_the_run_is_saved_with_its_extra_state(
    path: Path, settings: Any
) -> None:
    with Job(path, settings, layers(), head) as job:
        job.checkpointer.restore()
        job.run(2)
        job.model[0] = Counted(3, 3)
        job.model[0].count = 7
        job.run(2)
    with Job(path, settings, layers(), head) as again:
        assert again.checkpointer.restore() == 4
        assert again.model[0].count == 7


def test_where_the_optimizer_still_has_the_old_layer_it_is_refused(
    path: Path, settings: Any
) -> None:
    with Job(path, settings, layers(), head) as job:
        job.checkpointer.restore()
        job.run(2)
    with Job(path, settings, layers(), head) as again:
        again.model[2] = nn.Linear(3, 3)
        with pytest.raises(StateMismatchError, match=r"optimizer\.group0\.param0"):
            again.checkpointer.restore()


# --- optimizer state other than plain tensors ----------------------------------------------------


class Keeps(torch.optim.SGD):
    """Keeps one more value for each parameter."""

    def __init__(self, model: nn.Module, more: Callable[[], Any]) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.more = more

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("more", self.more())
        return loss


@pytest.mark.parametrize(
    "more",
    [
        lambda: np.arange(5000.0),
        lambda: {"a": [np.arange(5000), torch.ones(2)]},
        lambda: {"a/b": torch.ones(3), r"a\x2fb": torch.zeros(3)},
        lambda: deque([torch.arange(3), torch.ones(2)], maxlen=4),
        lambda: (torch.ones(1), {"list": [torch.zeros(2), 3]}),
    ],
    ids=["array", "array inside", "slash in a key", "deque", "tuple"],
)
def test_it_comes_back_as_it_was(more: Callable[[], Any], path: Path, settings: Any) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Keeps(model, more)

    with Job(path, settings, nn.Linear(3, 3), make) as job:
        job.checkpointer.restore()
        job.run(3)
    assert job.failures() == []
    with Job(path, settings, nn.Linear(3, 3), make) as again:
        assert again.checkpointer.restore() == 3
        for param in again.params:
            assert again.optimizer.state[param].keys() == {"more"}
            assert repr(again.optimizer.state[param]["more"]) == repr(more())


def test_two_tensors_of_one_name_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    key = torch.ones(1)
    optimizer.state[model.weight]["more"] = {key: 1, torch.zeros(1): 2}
    with pytest.raises(UnsupportedStateError, match=r"2 tensors .* optimizer/weight/more key"):
        tierckpt.Checkpointer(model, optimizer)


def test_state_of_no_parameter_and_keys_that_are_no_text_go_when_they_were_not_there(
    path: Path, settings: Any
) -> None:
    with Job(path, settings, nn.Linear(3, 3), local_keep=9) as job:
        job.checkpointer.restore()
        job.run(2)
        job.optimizer.state["global"]["n"] = 1  # type: ignore[index]
        job.optimizer.state[job.params[0]][3] = 1
        assert job.checkpointer.restore() == 2
        assert set(job.optimizer.state) == set(job.params)
        assert job.optimizer.state[job.params[0]].keys() == {"momentum_buffer"}
        assert job.failures() == []


def test_state_but_no_dict_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = torch.ones(2)  # type: ignore[assignment]
    with pytest.raises(UnsupportedStateError, match="SGD keeps a Tensor as the state of a param"):
        tierckpt.Checkpointer(model, optimizer)


# --- options of later ----------------------------------------------------------------------------


def test_going_back_drops_options_of_later(path: Path, settings: Any) -> None:
    """Options that groups had at the start stay, as a later scheduler needs them."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = momentum(model)
        optimizer.param_groups[0]["mine"] = 1
        return optimizer

    with Job(path, settings, nn.Linear(3, 3), local_keep=9) as job:
        job.checkpointer.restore()
        job.run(2)
        job.optimizer.param_groups[0]["later"] = 1
        job.run(1)
        job.checkpointer.wait()
        job.checkpointer.restore(version=2)
        assert "later" not in job.optimizer.param_groups[0]
        assert job.optimizer.param_groups[0]["params"] == job.params
    with Job(path, settings, nn.Linear(3, 3), make) as again:
        again.checkpointer.restore()
        assert again.optimizer.param_groups[0]["mine"] == 1


# --- a replaced layer, with state that has its own check -----------------------------------------


def test_a_parameter_that_takes_anothers_place_is_reported_at_once(
    path: Path, settings: dict[str, Any]
) -> None:
    """One event reports it: the optimizer keeps the old one, which no restarted job will have."""
    model = Net()
    with Job(path, settings, model) as job:
        for _ in range(3):
            model.weight = nn.Parameter(torch.ones(6, 3))
            job.run(1)
        (said,) = [e for e in job.events if "did the forward pass replace it?" in e.message]
    assert said.message.startswith("weight: an optimizer steps this parameter")
