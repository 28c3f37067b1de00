"""An error during the construction of a checkpointer leaves no traces, and the next try works."""

from __future__ import annotations

import importlib
import logging
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import ddp_ckpt
import tierckpt
from tierckpt.checkpointer import PlainAdapter, Tiers, checkpointer, node_resources
from tierckpt.coordination import JobHistory, PeerSetup, Reports
from tierckpt.errors import TierckptError, UnsupportedStateError
from tierckpt.halt import HaltController
from tierckpt.hooks import iterations
from tierckpt.snapshot import Copier, Staging
from tierckpt.storage import SlotPool

pytestmark = pytest.mark.usefixtures("inline_agent")

POINTS = {
    "the reports": (Reports, "__init__"),
    "where slots are": (node_resources.image_file, "place_for_slots"),
    "slots": (SlotPool, "__init__"),
    "room": (node_resources.NodeResources, "tell_of_room"),
    "lives": (JobHistory, "__init__"),
    "behind the agent": (PeerSetup, "__init__"),
    "the agent": (Tiers, "open"),
    "the copier": (Copier, "__init__"),
    "capture": (Staging, "__init__"),
    "hooks of optimizers": (torch.optim.Optimizer, "register_step_post_hook"),
    "hooks of the model": (nn.Module, "register_forward_pre_hook"),
    "the barrier": (iterations, "GlobalStepHook"),
    "the trace": ("tierckpt.tracing.recorder", "open_trace"),
    "signals": (HaltController, "of"),
    "the proof": (checkpointer, "order_here"),
    "the adapter": (PlainAdapter, "attached"),
}
ON_ALL_RANKS = dict.fromkeys(("where slots are", "slots"), TierckptError)
"""Points with errors that all ranks raise, hence as an error of a class that all have."""


class BrokenError(Exception):
    pass


@pytest.fixture
def settings(shm_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "shm_dir": str(shm_dir),
        "path": tmp_path / "c",
        "trace_dir": tmp_path / "traces",
        "events_dir": tmp_path / "events",
        "boundary": "forward",  # its hook is on the model from the start
    }


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def our_hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    held = (
        _global_optimizer_pre_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        model._forward_pre_hooks,
    )
    return [len(each) for each in held]


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def fail(patch: pytest.MonkeyPatch, point: str) -> None:
    where, name = POINTS[point]

    def broken(*_: Any, **__: Any) -> None:
        raise BrokenError(point)

    where = importlib.import_module(where) if isinstance(where, str) else where
    patch.setattr(where, name, broken)


@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_left_and_the_next_try_works(
    point: str, settings: dict[str, Any], shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    before, threads = our_hooks(model, optimizer), set(threading.enumerate())
    with monkeypatch.context() as patch:
        if point.startswith("hooks of optimizers"):
            patch.setattr("tierckpt.state.optimizers._refuse_hollow", lambda optimizer: None)
        fail(patch, point)
        with pytest.raises(ON_ALL_RANKS.get(point, BrokenError), match=point):
            tierckpt.Checkpointer(model, optimizer, **settings)
        assert our_hooks(model, optimizer) == before
        assert set(threading.enumerate()) == threads
        assert list(shm_dir.rglob("*")) == []
    with tierckpt.Checkpointer(model, optimizer, **settings):
        iterate(model, optimizer)
    with tierckpt.Checkpointer(model, optimizer, **settings) as ckpt:
        assert ckpt.restore() == 1


def test_versions_of_the_previous_run_are_still_there(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings["local_every_seconds"] = 0  # only in memory
    model, optimizer = build()
    ckpt = tierckpt.Checkpointer(model, optimizer, **settings)
    iterate(model, optimizer)
    iterate(model, optimizer)
    ckpt.abandon()
    with monkeypatch.context() as patch:
        fail(patch, "signals")
        with pytest.raises(BrokenError):
            tierckpt.Checkpointer(model, optimizer, **settings)
    with tierckpt.Checkpointer(model, optimizer, **settings) as ckpt:
        restored = ckpt.restore()
        assert (int(restored), restored.levels) == (1, {"memory": 1})


class Hollow(torch.optim.Optimizer):
    """A wrapper that forwards everything and never ran the base's `__init__`, as in some
    libraries."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.held = inner

    param_groups = property(lambda self: self.held.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.held.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.held.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.held.step(closure)


def test_a_wrapper_without_hooks_and_its_contents(settings: dict[str, Any], shm_dir: Path) -> None:
    model, optimizer = build()
    hidden = Hollow(optimizer)
    hidden.held = Hollow(optimizer)  # type: ignore[assignment]
    hidden.held.held = None  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedStateError) as caught:
        tierckpt.Checkpointer(model, hidden, **settings)
    assert "Hollow was made without" in str(caught.value)
    assert list(shm_dir.rglob("*")) == []
    for given in (optimizer, Hollow(optimizer)):
        with tierckpt.Checkpointer(model, given, **settings) as ckpt:
            before = ckpt.version
            iterate(model, Hollow(optimizer))
            model(torch.ones(2, 8))
            assert ckpt.version == before + 1


def test_buffers_that_are_not_persistent_are_named_quietly(settings: dict[str, Any]) -> None:
    model, optimizer = build()
    for number in range(5):
        model.register_buffer(f"cache{number}", torch.zeros(2), persistent=False)
    events: list[tierckpt.Event] = []
    with tierckpt.Checkpointer(model, optimizer, on_event=events.append, **settings):
        pass
    (said,) = [e for e in events if "not persistent" in e.message]
    assert "cache0, cache1, cache2 and 2 more" in said.message
    assert said.severity == logging.INFO
    model, optimizer = build()
    del events[:]
    with tierckpt.Checkpointer(model, optimizer, on_event=events.append, **settings):
        pass
    assert [e for e in events if "not persistent" in e.message] == []


SCHEDULE = "a StepLR; give a dict of names and objects"


@pytest.mark.parametrize("make", [tierckpt.Checkpointer, ddp_ckpt.Checkpointer])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda model, opt, _: ((opt, model), {}), "the model is a SGD"),
        (lambda model, opt, _: ((model.parameters(), opt), {}), "the model is a generator"),
        (lambda model, opt, _: ((model, model), {}), "the optimizer is a Linear"),
        (lambda model, opt, _: ((model, 3), {}), "the optimizer is a int"),
        (lambda model, opt, _: ((model, []), {}), "the list of optimizers is empty"),
        (lambda model, opt, _: ((model, {}), {}), "the dict of optimizers is empty"),
        (lambda model, opt, s: ((model, opt), {"extra": s}), f"extra is {SCHEDULE}"),
        (lambda model, opt, s: ((model, opt), {"extra": [s]}), "extra is a list"),
        (lambda model, opt, s: ((model, opt), {"extra_per_rank": s}), f"per_rank is {SCHEDULE}"),
        (
            lambda model, opt, _: ((model, opt), {"extra_per_rank": {"loader": 3}}),
            re.escape("extra_per_rank['loader'] is a int without state_dict()"),
        ),
    ],
)
def test_an_argument_in_the_place_of_another_is_named(
    make: Any, given: Any, said: str, settings: dict[str, Any]
) -> None:
    model, optimizer = build()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    positional, named = given(model, optimizer, schedule)
    with pytest.raises(UnsupportedStateError, match=said):
        make(*positional, **named, **settings)


class Watch(tierckpt.Callbacks):
    pass


@pytest.mark.parametrize("make", [tierckpt.Checkpointer, ddp_ckpt.Checkpointer])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"callbacks": [3]}, r"3 is not a tierckpt\.Callbacks"),
        ({"callbacks": [Watch]}, r"Watch'> is not a tierckpt\.Callbacks"),
        ({"callbacks": [Watch(), print]}, "a function that receives events is on_event"),
        ({"callbacks": Watch()}, r"give a list of them, callbacks=\[Watch\(\)\]"),
        ({"callbacks": Watch}, "give a list of them"),
        ({"callbacks": 3}, "callbacks is 3; give a list of them"),
        ({"on_event": 3}, "on_event is 3; give a function"),
        ({"on_event": []}, r"on_event is \[\]; give a function"),
    ],
)
def test_an_object_without_a_call_is_refused_at_the_start(
    make: Any, given: dict[str, Any], said: str, settings: dict[str, Any]
) -> None:
    model, optimizer = build()
    with pytest.raises(TypeError, match=said):
        make(model, optimizer, **given, **settings)
    with (
        make(model, optimizer, **settings) as ckpt,
        pytest.raises(TypeError, match="not a tierckpt"),
    ):
        ckpt.add_callbacks(3)


def test_one_line_without_an_optimizer(settings: dict[str, Any]) -> None:
    model, _ = build()
    with pytest.raises(UnsupportedStateError, match="of optimizers is empty"):
        ddp_ckpt.wrap([], model, **settings)


def test_one_line_with_both_swapped(settings: dict[str, Any]) -> None:
    model, optimizer = build()
    with pytest.raises(UnsupportedStateError, match=r"wrap\(optimizer, model"):
        ddp_ckpt.wrap(model, optimizer, **settings)  # type: ignore[type-var, arg-type]


def test_a_metric_is_a_number(settings: dict[str, Any]) -> None:
    model, optimizer = build()
    with tierckpt.Checkpointer(model, optimizer, **settings) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of a tensor that requires a gradient
        ckpt.step(metric=model(torch.ones(2, 8)).sum())
        for wrong in ({"loss": 1.0}, [1.0], torch.ones(2), "much"):
            with pytest.raises(TypeError, match="metric must be one number"):
                ckpt.step(metric=wrong)  # type: ignore[arg-type]
