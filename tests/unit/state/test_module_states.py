"""Modules' own state: refusals, reports, and when it is looked up again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tests.support.state_matrix.layers import Filled
from tests.support.state_matrix.models import mlp
from tests.support.state_matrix.ownstates import (
    Overridden,
    add_hooks,
    give_count,
    hooked,
    take_count,
)
from tierckpt.checkpointer import check_state
from tierckpt.errors import StateMismatchError, StateTornError, UnsupportedStateError
from tierckpt.state import MODULE_STATES, Arena, ModuleStates, TrainingState


@pytest.fixture
def settings(tmp_path: Path, shm_dir: Path) -> dict[str, Any]:
    return {"path": tmp_path / "ckpts", "shm_dir": shm_dir, "agent": "inline"}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()


def run(model: nn.Module, settings: Any, steps: int = 1) -> nn.Module:
    optimizer = optimizer_of(model)
    with tierckpt.Checkpointer(model, optimizer, **settings) as ckpt:
        for _ in range(steps):
            iterate(model, optimizer)
            ckpt.step()
    return model


def count_within(model: nn.Module) -> int:
    return model[1].count  # type: ignore[return-value,union-attr]


# --- refused -------------------------------------------------------------------------------------


class Given(nn.Linear):
    """Has the result of `give` in its state_dict."""

    def __init__(self, give: Callable[[], Any]) -> None:
        super().__init__(6, 6)
        self.give = give

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}own"] = self.give()


def raising() -> Any:
    raise RuntimeError("not before the first batch")


SHOWN = {"times": 0}


def counted() -> Any:
    SHOWN["times"] += 1
    return SHOWN


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an object": (lambda: object(), "cannot be stored without pickle"),
    "a sparse tensor": (lambda: torch.eye(2).to_sparse(), "Keep it dense"),
    "raises": (raising, "raises RuntimeError: not before the first batch. Fix it"),
    "changes what it gave": (counted, "other values when it is called again"),
    "not the same twice": (lambda: time.perf_counter(), "other values when it is called again"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_cannot_be_stored_is_refused_with_the_modules_name(name: str) -> None:
    give, why = REFUSED[name]
    model = nn.Sequential(nn.Linear(6, 6), Given(give))
    with pytest.raises(UnsupportedStateError, match=r"module '1' \(a Given\)") as caught:
        check_state(TrainingState(model, {"optimizer": optimizer_of(model)}))
    assert why in str(caught.value)
    model[1].give = lambda: 1.5  # the advice: a value that can be stored, or none
    check_state(TrainingState(model, {"optimizer": optimizer_of(model)}))


def test_a_model_without_a_state_dict_is_refused() -> None:
    model = mlp()
    model.state_dict = lambda *_, **__: ["not", "a", "dict"]
    with pytest.raises(UnsupportedStateError, match=r"the model \(a Sequential\).*returns a list"):
        check_state(TrainingState(model, {}))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`", "ignore::DeprecationWarning")
def test_scripts_are_refused_and_the_modules_they_were_made_of_are_accepted(settings: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    script = torch.jit.script(model)
    with pytest.raises(UnsupportedStateError, match="is a ScriptModule") as caught:
        tierckpt.Checkpointer(script, optimizer_of(script), **settings)
    assert "Give the original module" in str(caught.value)
    optimizer = optimizer_of(model)
    with tierckpt.Checkpointer(model, optimizer, **settings) as ckpt:
        iterate(script, optimizer)
        ckpt.step()
    loaded = tierckpt.load(settings["path"]).model
    for name, tensor in script.state_dict().items():
        assert torch.equal(loaded[name], tensor)


def test_the_name_that_the_checkpoint_needs_is_refused() -> None:
    with pytest.raises(tierckpt.ConfigError, match="this name is reserved"):
        TrainingState(Overridden(), {}, extra={MODULE_STATES: Overridden()})


# --- reports -------------------------------------------------------------------------------------


def test_much_beside_the_tensors_is_reported() -> None:
    states = ModuleStates(nn.Sequential(Given(lambda: torch.zeros(300_000))))
    states.check()
    large = states.notes[0]
    assert "module '0' (a Given) has 1200000 bytes in its state_dict()" in large
    assert "0.own" in large


def test_state_that_nothing_loads_is_reported_and_a_restore_compares_it(settings: Any) -> None:
    model = run(nn.Sequential(nn.Linear(6, 6), Given(lambda: 1)), settings)
    events: list[tierckpt.Event] = []
    again = nn.Sequential(nn.Linear(6, 6), Given(lambda: 1))
    with tierckpt.Checkpointer(
        again, optimizer_of(again), on_event=events.append, **settings
    ) as ckpt:
        assert ckpt.restore() == 1  # it is the same
        assert torch.equal(again[1].weight, model[1].weight)
    assert [e for e in events if "no code that loads it" in e.message]
    other = nn.Sequential(nn.Linear(6, 6), Given(lambda: 2))
    ckpt = tierckpt.Checkpointer(other, optimizer_of(other), on_event=events.append, **settings)
    with pytest.raises(StateTornError, match=r"module '1' \(a Given\) did not take .*1\.own"):
        ckpt.restore()
    assert ckpt.restore(strict=False) == 1
    assert [e for e in events if "accepted (strict=False): module '1'" in e.message]
    ckpt.abandon()


# --- looked at again -----------------------------------------------------------------------------


def test_hooks_that_come_later_are_followed(settings: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), hooked())
    bare = model[1]
    bare._state_dict_hooks.clear()
    optimizer = optimizer_of(model)
    with tierckpt.Checkpointer(model, optimizer, **settings) as ckpt:
        iterate(model, optimizer)
        ckpt.step()
        add_hooks(bare, give_count, take_count)
        iterate(model, optimizer)
        ckpt.step()
    assert tierckpt.load(settings["path"]).model["1.count"] == count_within(model)


def test_a_state_dict_replaced_later_is_followed(settings: Any) -> None:
    """As in scripts that train adapters."""
    for where in (0, ""):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        optimizer = optimizer_of(model)
        with tierckpt.Checkpointer(model, optimizer, **settings) as ckpt:
            iterate(model, optimizer)
            ckpt.step()
            one = model if where == "" else model[where]
            plain = one.state_dict
            one.state_dict = lambda *a, plain=plain, **k: (d := plain(*a, **k)).update(own=3) or d
            iterate(model, optimizer)
            ckpt.step()
        assert tierckpt.load(settings["path"], version=2).model["own"] == 3
        settings = {**settings, "path": f"{settings['path']}-too"}


def test_one_that_raises_later_costs_versions_and_no_step(settings: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Given(lambda: 1))
    optimizer = optimizer_of(model)
    events: list[tierckpt.Event] = []
    with tierckpt.Checkpointer(model, optimizer, on_event=events.append, **settings) as ckpt:
        for give in (lambda: 1, raising, lambda: 2):
            model[1].give = give
            iterate(model, optimizer)
            ckpt.step()
            ckpt.wait()
        assert ckpt.version == 3
    said = "\n".join(event.text() for event in events)
    assert "failed v2 memory" in said
    assert "module '1' (a Given): its state_dict() raises RuntimeError" in said
    assert tierckpt.load(settings["path"]).model["1.own"] == 2


def test_nothing_is_asked_of_a_model_without_such_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(nn.Module, "state_dict", lambda *_, **__: asked.append(1))
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.LSTM(6, 6))
    state = TrainingState(model, {})
    state.look_again()
    assert state.pack_module_states(Arena()) == {}
    assert not state.module_states
    assert not asked


def test_a_hook_on_the_outside_asks_no_module_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    add_hooks(model, lambda _, state, *__: state.update(total=len(state)), lambda *_: None)
    state = TrainingState(model, {})
    monkeypatch.setattr(nn.Linear, "state_dict", None)
    node = state.pack_module_states(Arena())[MODULE_STATES]
    assert node[""]["given"] == {"total": 7}


# --- the way back --------------------------------------------------------------------------------


def test_versions_without_it_are_refused_by_name(settings: Any) -> None:
    plain = nn.Sequential(nn.Linear(6, 6), hooked())
    plain[1]._state_dict_hooks.clear()
    plain[1]._load_state_dict_pre_hooks.clear()
    run(plain, settings)
    model = nn.Sequential(nn.Linear(6, 6), hooked())
    ckpt = tierckpt.Checkpointer(model, optimizer_of(model), **settings)
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore()
    assert "1.count, which module '1' (a Counting) has in its state_dict(), is in the model" in str(
        caught.value
    )
    before = count_within(model)
    assert ckpt.restore(strict=False) == 1
    assert count_within(model) == before
    ckpt.abandon()


def test_state_that_the_model_no_longer_has_is_refused_by_name(settings: Any) -> None:
    run(nn.Sequential(nn.Linear(6, 6), hooked()), settings)
    model = nn.Sequential(nn.Linear(6, 6), hooked())
    model[1]._state_dict_hooks.clear()
    ckpt = tierckpt.Checkpointer(model, optimizer_of(model), **settings)
    with pytest.raises(StateMismatchError, match=r"1\.count, which module '1' has in its state_d"):
        ckpt.restore()
    assert ckpt.restore(strict=False) == 1
    ckpt.abandon()


def test_another_size_is_another_model_still(settings: Any) -> None:
    run(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), settings)
    for other in (nn.BatchNorm1d(6, track_running_stats=False), nn.BatchNorm1d(5)):
        model = nn.Sequential(nn.Linear(6, 6), other)
        ckpt = tierckpt.Checkpointer(model, optimizer_of(model), **settings)
        with pytest.raises(StateMismatchError, match=r"buffer/1\.running_mean"):
            ckpt.restore()
        ckpt.abandon()


def test_going_back_to_when_a_buffer_was_small_or_none(settings: Any) -> None:
    model = nn.Sequential(Filled())
    optimizer = optimizer_of(model)
    found = {}
    options = {**settings, "local_every_steps": 1, "local_keep": 9}
    with tierckpt.Checkpointer(model, optimizer, **options) as ckpt:
        for version in (1, 2, 3):
            iterate(model, optimizer)
            ckpt.save(now=True)
            ckpt.step()
            found[version] = {n: t.clone() for n, t in model.state_dict().items()}
        for version in (3, 1, 2):
            assert ckpt.restore(version).version == version
            now = model.state_dict()
            assert now.keys() == found[version].keys()
            assert all(torch.equal(now[name], tensor) for name, tensor in found[version].items())


class Sized(Overridden):
    """Has a buffer of a given size, and may take another one when it is loaded."""

    def __init__(self, size: int, takes: bool) -> None:
        super().__init__()
        self.register_buffer("more", torch.zeros(size))
        self.takes, self.loaded = takes, 0

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.loaded += 1
        if self.takes:
            self.more.resize_(state_dict[f"{prefix}more"].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize("takes", [False, True])
def test_a_module_says_itself_whether_it_takes_another_size(takes: bool, settings: Any) -> None:
    """Without proof that the buffer was as the live one is. The attempt leaves no trace."""
    first = nn.Sequential(nn.Linear(6, 6), Sized(3, takes))
    first[1].more.fill_(5)
    run(first, settings)
    model = nn.Sequential(nn.Linear(6, 6), Sized(2, takes))
    named = [*model.named_parameters(), *model.named_buffers()]
    before = [(name, id(tensor), tensor.detach().clone()) for name, tensor in named]
    ckpt = tierckpt.Checkpointer(model, optimizer_of(model), **settings)
    if takes:
        assert ckpt.restore() == 1
        assert model[1].more.tolist() == [5, 5, 5]
        assert count_within(model) == count_within(first)
    else:
        with pytest.raises(StateMismatchError, match=r"buffer/1\.more is float32\[3\] in the"):
            ckpt.restore()
        assert model[1].loaded == 0
        named = [*model.named_parameters(), *model.named_buffers()]
        for (name, kept, value), (again, tensor) in zip(before, named, strict=True):
            assert (name, kept) == (again, id(tensor))
            assert torch.equal(value, tensor)
    ckpt.abandon()
