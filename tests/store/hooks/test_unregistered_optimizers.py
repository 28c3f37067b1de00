"""Optimizers that the checkpointer was not given: they tear no version, and a warning names
them."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import tierckpt

STEPS = 6


@pytest.fixture
def settings(shm_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {"shm_dir": str(shm_dir), "path": tmp_path / "c", "agent": "inline"}


def build() -> tuple[nn.Sequential, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A model of two parts, and an optimizer for each: one to be given, and a fused one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64))
    given = torch.optim.SGD(model[0].parameters(), lr=0.1)
    return model, given, torch.optim.AdamW(model[2].parameters(), fused=True)


@contextmanager
def attached(
    model: nn.Module, optimizers: Any, **settings: Any
) -> Iterator[tuple[tierckpt.Checkpointer, list[tierckpt.Event]]]:
    """A checkpointer that copies at the barrier only, as with an adapter in the backward pass."""
    events: list[tierckpt.Event] = []
    with tierckpt.Checkpointer(model, optimizers, on_event=events.append, **settings) as ckpt:
        ckpt._active.release_early = False
        yield ckpt, events


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()


def image(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def warnings(events: list[tierckpt.Event]) -> list[str]:
    return [e.message for e in events if e.severity >= logging.WARNING]


def test_a_fused_step_of_an_unregistered_optimizer_tears_no_version(
    settings: dict[str, Any],
) -> None:
    model, given, stranger = build()
    at: dict[int, list[torch.Tensor]] = {}
    with attached(model, given, **settings) as (ckpt, events):
        for step in range(1, STEPS + 1):
            backward(model)
            stranger.step()
            given.step()
            ckpt.step()
            at[step] = image(model)
        backward(model)
        stranger.step()
        ckpt.abandon()  # the newest version is the one for which the other optimizer waited
    model, given, stranger = build()
    with attached(model, given, **settings) as (ckpt, _):
        restored = ckpt.restore()
        assert all(map(torch.equal, image(model), at[restored.version]))
        assert restored.version == STEPS
    (said,) = warnings(events)
    assert "AdamW changes 2.weight, 2.bias, and the checkpointer was not given it" in said


class Wrapper(torch.optim.SGD):
    """Steps another optimizer and shares its state, as libraries' wrappers do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, lr=0.1)
        self.state, self.inner = inner.state, inner

    def step(self, closure: None = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("given", ["the wrapper", "what is in it"])
def test_a_wrapper_and_its_contents_are_not_unregistered(
    given: str, settings: dict[str, Any]
) -> None:
    model = nn.Linear(8, 2)
    inner = torch.optim.Adam(model.parameters())
    wrapper = Wrapper(inner)
    with attached(model, wrapper if given == "the wrapper" else inner, **settings) as (
        ckpt,
        events,
    ):
        for _ in range(3):
            backward(model)
            wrapper.step()
            ckpt.step()
        assert ckpt.version == 3
    assert warnings(events) == []


def test_optimizers_of_other_models_are_left_alone(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given, _ = build()
    other, _, others = build()
    with attached(model, given, **settings) as (ckpt, events):
        backward(model)
        given.step()
        ckpt.step()
        backward(other)
        looked: list[object] = []
        held_by = ckpt._state.held_by
        monkeypatch.setattr(ckpt._state, "held_by", lambda o: looked.append(o) or held_by(o))
        for _ in range(3):
            others.step()
        assert ckpt._active.snapshot is not None, "no barrier"
        assert looked == [others], "looked at once"
        others.add_param_group({"params": model[2].parameters()})
        others.step()
        assert ckpt._active.snapshot is None, "now there was one"
    (said,) = warnings(events)
    assert "AdamW changes 2.weight, 2.bias" in said


def test_a_layer_that_comes_into_the_model_brings_its_optimizer(settings: dict[str, Any]) -> None:
    model, given, _ = build()
    late = nn.Linear(64, 64)
    stranger = torch.optim.SGD(late.parameters(), lr=0.1)
    with attached(model, given, **settings) as (ckpt, events):
        for step in range(3):
            backward(model)
            late(torch.ones(64)).sum().backward()
            stranger.step()
            given.step()
            if step == 0:
                model.append(late)
                assert warnings(events) == []
            ckpt.step()
    (said,) = warnings(events)
    assert "SGD changes 3.weight, 3.bias" in said


def test_each_checkpointer_has_its_own_and_none_is_left(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    before = len(_global_optimizer_pre_hooks)
    (model, given, stranger), (other, others, _) = build(), build()
    with attached(model, given, **settings) as (_, events):
        settings["path"] = tmp_path / "other"
        with attached(other, others, **settings) as (_, other_events):
            assert len(_global_optimizer_pre_hooks) == before + 2
            backward(model)
            stranger.step()
            stranger.step()
        assert len(_global_optimizer_pre_hooks) == before + 1
    assert len(_global_optimizer_pre_hooks) == before
    assert (len(warnings(events)), warnings(other_events)) == (1, [])
    stranger.step()
    assert len(warnings(events)) == 1


def test_the_hook_keeps_no_checkpointer_and_no_optimizer_alive(settings: dict[str, Any]) -> None:
    model, given, stranger = build()
    ckpt = tierckpt.Checkpointer(model, given, **settings)
    backward(model)
    stranger.step()
    gone = weakref.ref(stranger)
    del stranger
    gc.collect()
    assert gone() is None
    ckpt.abandon()
    gone = weakref.ref(ckpt)
    del ckpt
    gc.collect()
    assert gone() is None


def test_a_forked_child_that_trains_the_same_model_waits_for_nothing(
    settings: dict[str, Any],
) -> None:
    """The child has the hook, but not the copier thread."""
    model, given, stranger = build()
    with attached(model, given, **settings) as (ckpt, events):
        backward(model)
        given.step()
        ckpt.step()
        stranger.zero_grad()  # or torch would compute, with threads that a fork does not copy
        child = os.fork()
        if not child:
            stranger.step()
            os._exit(7 if ckpt._active.snapshot is not None else 8)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert warnings(events) == []
