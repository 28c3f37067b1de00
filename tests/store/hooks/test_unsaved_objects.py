"""Stateful objects of the script that the checkpointer was not given: a warning names them."""

from __future__ import annotations

import copy
import functools
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR, AveragedModel

import tierckpt
from tierckpt.hooks import unsaved_objects

Optimizer = torch.optim.Optimizer


@pytest.fixture
def settings(shm_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {"shm_dir": str(shm_dir), "path": tmp_path / "c", "agent": "inline"}


@contextmanager
def attached(
    model: nn.Module, optimizers: Any, **settings: Any
) -> Iterator[tuple[tierckpt.Checkpointer, list[str]]]:
    """A checkpointer and its warnings."""
    said: list[str] = []

    def receive(event: tierckpt.Event) -> None:
        if event.severity >= logging.WARNING:
            said.append(event.message)
        assert "the search for unsaved objects failed" not in event.message

    with tierckpt.Checkpointer(model, optimizers, on_event=receive, **settings) as ckpt:
        yield ckpt, said


def build() -> tuple[nn.Linear, torch.optim.SGD]:
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, step: Callable[[], Any], ckpt: tierckpt.Checkpointer) -> None:
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    step()
    ckpt.step()


class Ramp:
    """A rate for each step; the object is callable."""

    def __call__(self, step: int) -> float:
        return 1 / (1 + step)


class WarmupSchedule:
    """Not one of torch's, like timm's and Megatron's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.at = optimizer, 0

    def step(self) -> None:
        self.at += 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda opt: lr.StepLR(opt, 3),
    "LambdaLR": lambda opt: lr.LambdaLR(opt, Ramp()),
    "ReduceLROnPlateau": lr.ReduceLROnPlateau,
    "OneCycleLR": lambda opt: lr.OneCycleLR(opt, 1.0, total_steps=9),
    "CyclicLR": lambda opt: lr.CyclicLR(opt, 0.1, 1.0),
    "SWALR": lambda opt: SWALR(opt, 0.05),
    "SequentialLR": lambda opt: lr.SequentialLR(opt, [lr.LinearLR(opt), lr.StepLR(opt, 3)], [2]),
    "ChainedScheduler": lambda opt: lr.ChainedScheduler([lr.LinearLR(opt), lr.StepLR(opt, 3)]),
    "WarmupSchedule": WarmupSchedule,
}


def test_schedulers_are_named_once_and_not_where_they_were_given(settings: dict[str, Any]) -> None:
    model, opt = build()
    every = {kind: make(opt) for kind, make in SCHEDULES.items()}
    pace = every["StepLR"]
    with attached(model, opt, **settings) as (ckpt, said):
        for _ in range(3):
            train(model, opt.step, ckpt)
    assert sorted(text.split()[0] for text in said) == sorted(every)
    (text,) = (text for text in said if text.startswith("StepLR"))
    assert text.startswith(
        "StepLR sets the learning rate of optimizer 'optimizer', SGD, and no object"
    )
    assert text.endswith("Give it, too: extra={'pace': pace}")
    settings["path"] = settings["path"].with_name("d")
    with attached(model, opt, extra=every, **settings) as (ckpt, said):  # as the message advises
        train(model, opt.step, ckpt)
        assert ckpt.version == 1
    assert said == []
    assert pace


def test_one_made_or_registered_after_the_checkpointer(settings: dict[str, Any]) -> None:
    model, opt = build()
    with attached(model, opt, **settings) as (ckpt, said):
        given = lr.StepLR(opt, 3)
        ckpt.register("given", given)
        train(model, opt.step, ckpt)
        assert said == []
        late = SWALR(opt, 0.05)
        train(model, opt.step, ckpt)
        train(model, opt.step, ckpt)
    assert [text.split()[0] for text in said] == ["SWALR"]
    assert late


def test_one_for_another_model_is_none_of_ours(settings: dict[str, Any]) -> None:
    model, opt = build()
    _, others = build()
    theirs = lr.StepLR(others, 3), AveragedModel(nn.Linear(4, 5)), torch.amp.GradScaler("cpu")
    with attached(model, opt, **settings) as (ckpt, said):
        train(model, opt.step, ckpt)
    assert said == []
    assert theirs


class Trainer:
    """A given user's class."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.epoch = scheduler, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state["scheduler"])


def function_of(pace: Any) -> Any:
    return SimpleNamespace(
        state_dict=lambda: {"at": pace.last_epoch}, load_state_dict=lambda state: None
    )


def partial_of(pace: Any) -> Any:
    return SimpleNamespace(
        state_dict=functools.partial(lambda each: each.state_dict(), pace), load_state_dict=print
    )


def bound_to(pace: Any) -> Any:
    return SimpleNamespace(state_dict=pace.state_dict, load_state_dict=pace.load_state_dict)


def test_a_scheduler_inside_the_users_own_objects_counts_as_given(settings: dict[str, Any]) -> None:
    model, opt = build()
    ways = (Trainer, function_of, partial_of, bound_to)
    extra = {way.__name__: way(lr.StepLR(opt, 3)) for way in ways}
    with attached(model, opt, extra=extra, **settings) as (ckpt, said):
        train(model, opt.step, ckpt)
        assert ckpt.version == 1
    assert said == []


class Forgetful(Trainer):
    """Has a scheduler and does not store it."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}


class Careful(Forgetful):
    """Stores it in ways that cannot be followed, or through other objects."""

    @property
    def parts(self) -> list[Any]:
        return [self.scheduler]

    def collected(self) -> dict[str, Any]:
        return {str(number): each.state_dict() for number, each in enumerate(self.parts)}


class ByCall(Careful):
    def state_dict(self) -> dict[str, Any]:
        return self.collected()


class ByFunction(Careful):
    def state_dict(self) -> dict[str, Any]:
        return {"all": repr(vars(self))}


class BySuper(Careful):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict()}


def test_an_object_that_has_it_and_does_not_store_it(settings: dict[str, Any]) -> None:
    model, opt = build()
    schedules = [lr.StepLR(opt, 3), *(lr.LinearLR(opt) for _ in range(3))]
    kinds = (Forgetful, ByCall, ByFunction, BySuper)
    extra = {kind.__name__: kind(it) for kind, it in zip(kinds, schedules, strict=True)}
    with attached(model, opt, extra=extra, **settings) as (ckpt, said):
        train(model, opt.step, ckpt)
    (text,) = said
    assert text.startswith("StepLR sets the learning rate")


def test_a_composed_optimizer_with_its_members_alone_given(settings: dict[str, Any]) -> None:
    """A composed scheduler has its own count until the next member; a chain has no state of its
    own."""
    for path, kind, said_of in ((1, lr.SequentialLR, ["SequentialLR"]), (2, None, [])):
        model, opt = build()
        one, two = lr.LinearLR(opt), lr.StepLR(opt, 3)
        whole = kind(opt, [one, two], [2]) if kind else lr.ChainedScheduler([one, two])
        settings["path"] = settings["path"].with_name(f"c{path}")
        with attached(model, opt, extra={"one": one, "two": two}, **settings) as (ckpt, said):
            train(model, opt.step, ckpt)
        assert [text.split()[0] for text in said] == said_of
        assert whole


def test_a_scheduler_of_a_wrapped_optimizer(settings: dict[str, Any]) -> None:
    """The given wrapper has the groups of the optimizer that the scheduler was made for."""

    class Wrapper(torch.optim.SGD):
        pass

    model, inner = build()
    pace = lr.StepLR(inner, 3)
    opt = Wrapper(inner.param_groups, lr=0.1)
    with attached(model, opt, **settings) as (ckpt, said):
        train(model, opt.step, ckpt)
    (text,) = said
    assert text.startswith("StepLR sets the learning rate of")
    assert text.endswith("{'pace': pace}")
    assert pace


class Delegating(Trainer):
    """Like Accelerate's: it has no state of its own."""

    def step(self) -> None:
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()


class DelegatingSchedule(Delegating):
    def __init__(self, scheduler: Any, optimizer: Optimizer) -> None:
        super().__init__(scheduler)
        self.optimizers = [optimizer]


def test_one_that_has_nothing_but_another_one(settings: dict[str, Any]) -> None:
    model, opt = build()
    inner = lr.StepLR(opt, 3)
    pace = DelegatingSchedule(inner, opt)
    for path, given, names in ((1, {}, ["DelegatingSchedule"]), (2, {"inner": inner}, [])):
        settings["path"] = settings["path"].with_name(f"c{path}")
        with attached(model, opt, extra=given, **settings) as (ckpt, said):
            train(model, opt.step, ckpt)
        assert [text.split()[0] for text in said] == names
    assert pace


def test_frozen_objects_are_not_found_but_torchs_mark_is(settings: dict[str, Any]) -> None:
    model, opt = build()
    pace = lr.StepLR(opt, 3)
    gc.freeze()
    try:
        with attached(model, opt, **settings) as (ckpt, said):
            train(model, opt.step, ckpt)
    finally:
        gc.unfreeze()
    (text,) = said
    assert text.endswith("Give it, too: extra={'scheduler': scheduler}")
    assert pace


@pytest.mark.parametrize("given", [True, False])
def test_a_scaler_that_makes_the_steps(given: bool, settings: dict[str, Any]) -> None:
    model, opt = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step() -> None:
        scaler.scale(torch.zeros(()))
        scaler.step(opt)
        scaler.update()

    extra = {"scaler": scaler} if given else {}
    with attached(model, opt, extra=extra, **settings) as (ckpt, said):
        train(model, step, ckpt)
        train(model, step, ckpt)
        assert ckpt.version == 2
    if given:
        assert said == []
        return
    (text,) = said
    assert text.startswith("GradScaler scales the loss, and no object given")
    assert text.endswith("Give it, too: extra={'scaler': scaler}")


class ShadowEMA:
    """Like torch_ema's and diffusers'; averages of the trained parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow_params = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow_params": self.shadow_params}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow_params = state["shadow_params"]


@pytest.mark.parametrize("given", [False, True])
def test_a_copy_of_the_model_that_the_loop_averages(given: bool, settings: dict[str, Any]) -> None:
    model, opt = build()
    teacher, reference = (copy.deepcopy(model).requires_grad_(False) for _ in range(2))
    other = copy.deepcopy(model)
    others_opt = torch.optim.SGD(other.parameters(), lr=0.1)

    def step() -> None:
        opt.step()
        other(torch.ones(2, 4)).sum().backward()
        others_opt.step()
        for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.1)  # torch counts no change of it

    if given:
        settings["extra"] = {"teacher": teacher}
    with attached(model, opt, **settings) as (ckpt, said):
        for _ in range(3):
            train(model, step, ckpt)
    assert [text.partition("Give it, too: ")[2] for text in said] == (
        [] if given else ["extra={'teacher': teacher}"]
    )
    assert reference is not teacher


@pytest.mark.parametrize("kind", [AveragedModel, ShadowEMA])
def test_averaged_weights(kind: Callable[[nn.Module], Any], settings: dict[str, Any]) -> None:
    model, opt = build()
    model.bias.requires_grad_(False)
    mean, other = kind(model), kind(nn.Linear(4, 5))
    both = nn.ModuleDict({"a": model, "b": nn.Linear(3, 3)})
    with attached(both, opt, **settings) as (ckpt, said):
        train(model, opt.step, ckpt)
    (text,) = said
    assert "has averages of the model's weights, and no object" in text
    assert text.endswith("Give it, too: extra={'mean': mean}")
    settings["path"] = settings["path"].with_name("d")
    with attached(both, opt, extra={"mean": mean}, **settings) as (ckpt, said):
        train(model, opt.step, ckpt)
    assert said == []
    assert other


@pytest.mark.filterwarnings("ignore:'set_vital'")  # torchdata, with a torch so new
@pytest.mark.parametrize("given", [(), ("data",), ("seeded",), ("wrapped",)])
def test_a_loader_that_knows_its_place(given: tuple[str, ...], settings: dict[str, Any]) -> None:
    """The loader that the training iterates is named, of several; if one is given, the others are
    ignored. A given one that draws seeds from torch's generator again is named, too."""
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    model, opt = build()
    data, held_out = kind(range(8)), kind(range(8))
    seeded = kind(range(8), generator=torch.Generator())
    every = {"data": data, "seeded": seeded, "wrapped": tierckpt.ResumableLoader(data)}
    list(held_out)
    started = iter(every[given[0] if given else "data"])
    next(started)
    ours = {"extra_per_rank": {name: every[name] for name in given}}
    with attached(model, opt, **ours, **settings) as (ckpt, said):
        train(model, opt.step, ckpt)
    if given in [("wrapped",), ("seeded",)]:
        assert said == []
        return
    (text,) = said
    if given:
        assert text.startswith("a StatefulDataLoader was given itself: it stores its place in")
        return
    assert text.startswith("StatefulDataLoader is in the middle of a pass, and no object given")
    assert "Wrap it, data = tierckpt.ResumableLoader(data), and give" in text
    assert text.endswith("give that: extra_per_rank={'data': data}")


def test_persistent_workers(settings: dict[str, Any]) -> None:
    """Also of an evaluation's loader; once."""
    model, opt = build()
    kind = torch.utils.data.DataLoader
    loaders = [kind(range(8), num_workers=1, persistent_workers=True) for _ in range(2)]  # type: ignore[type-var]
    with attached(model, opt, **settings) as (ckpt, said):
        train(model, opt.step, ckpt)
    (text,) = said
    assert text.startswith("a DataLoader has persistent_workers=True: random numbers that samples")
    assert text.endswith("set persistent_workers=False, also for the loader of an evaluation.")
    del loaders


def test_nothing_is_no_object(settings: dict[str, Any]) -> None:
    """A script that may have a scaler gives its variable."""
    model, opt = build()
    none = {"scaler": None}
    with attached(model, opt, extra=none, extra_per_rank=none, **settings) as (ckpt, said):
        train(model, opt.step, ckpt)
    assert said == []


def test_an_optimizer_with_groups_that_never_stop_changing(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is not repeated without end, as it takes a while."""
    model, opt = build()
    looks: list[int] = []
    look = unsaved_objects.look
    monkeypatch.setattr(unsaved_objects, "look", lambda: looks.append(1) or look())
    with attached(model, opt, **settings) as (ckpt, _):
        for step in range(12):
            opt.param_groups[0][f"key {step}"] = step
            train(model, opt.step, ckpt)
    assert len(looks) == 8


def test_an_object_that_cannot_be_inspected_costs_no_checkpoint(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt = build()
    monkeypatch.setattr(unsaved_objects, "look", lambda: 1 / 0)
    events: list[tierckpt.Event] = []
    with tierckpt.Checkpointer(model, opt, on_event=events.append, **settings) as ckpt:
        train(model, opt.step, ckpt)
        assert ckpt.version == 1
    assert any(
        "the search for unsaved objects failed: ZeroDivisionError" in event.message
        for event in events
    )


def test_a_half_gone_object_does_not_end_the_search(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other threads leave them for a moment: one without its attributes, and any other error."""
    model, opt = build()
    looks: list[int] = []
    look = unsaved_objects.look

    def fails_once() -> Any:
        looks.append(1)
        return look() if len(looks) > 1 else 1 / 0

    monkeypatch.setattr(unsaved_objects, "look", fails_once)
    half = type(model).__new__(type(model))
    pace = lr.StepLR(opt, 3)
    with attached(model, opt, **settings) as (ckpt, said):
        train(model, opt.step, ckpt)
    assert len(looks) == 2
    assert any("StepLR" in text for text in said)
    assert not any("the search" in text for text in said)
    del half, pace


@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_a_checkpointer_by_hand_in_a_framework(package: str, settings: dict[str, Any]) -> None:
    """Its integration is shown; no part of the training is, which it would store."""
    model, opt = build()
    name = unsaved_objects.TRAINERS[package]
    pace = lr.StepLR(opt, 3)

    def steps(self: Any, ckpt: tierckpt.Checkpointer) -> None:
        train(model, opt.step, ckpt)

    base = type(name, (), {"__module__": f"{package}.it", "train": steps})
    framework = type("Own", (base,), {})()
    if package == "accelerate":
        framework._optimizers = [SimpleNamespace(optimizer=opt)]
    with attached(model, opt, **settings) as (ckpt, said):
        framework.train(ckpt) if package == "transformers" else steps(None, ckpt)
    (text,) = said
    assert text.startswith(f"this training belongs to {package}'s {name}, and the checkpointer was")
    assert (
        f"the integration in its place: {'ckpt = ' * (name != 'Trainer')}tierckpt.{package}."
        in text
    )
    settings["path"] = settings["path"].with_name("d")
    with attached(model, opt, **settings) as (ckpt, said):  # a loop, not theirs
        framework._optimizers = []
        train(model, opt.step, ckpt)
    assert [each.split()[0] for each in said] == ["StepLR"]
    assert pace
