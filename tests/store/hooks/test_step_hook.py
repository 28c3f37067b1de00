"""A user's hooks that change weights: the barrier comes before them, whenever they are
registered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import tierckpt
from tests.support.late_copies import copy_late
from tierckpt.hooks import optimizer_steps

pytestmark = pytest.mark.usefixtures("inline_agent")

STEPS = 3
LAYERS = 8

Register = Callable[[torch.optim.Optimizer, Callable[..., None]], Any]


def of_the_optimizer(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    return optimizer.register_step_pre_hook(hook)


def of_all_optimizers(_: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    return register_optimizer_step_pre_hook(hook)


def decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A weight decay without a trace: `.data` changes no version counter."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data.mul_(0.5)


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(2, 64)).square().mean().backward()


def image(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def settings(shm_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {"shm_dir": str(shm_dir), "path": tmp_path / "c", "local_every_seconds": 0}


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_late(monkeypatch, 0.02)


def restored_differs(register: Register, settings: dict[str, Any]) -> list[int]:
    """The layers that a restore did not bring back as they were at the boundary."""
    model, optimizer = build()
    hook = register(optimizer, decay)
    ckpt = tierckpt.Checkpointer(model, optimizer, **settings)
    ckpt._active.release_early = False
    for _ in range(STEPS):
        backward(model)
        optimizer.step()
        ckpt.step()
    expected = image(model)
    backward(model)
    optimizer.step()
    ckpt.abandon()
    hook.remove()
    model, optimizer = build()
    ckpt = tierckpt.Checkpointer(model, optimizer, **settings)
    assert ckpt.restore().version == STEPS
    ckpt.abandon()
    pairs = zip(image(model), expected, strict=True)
    return [i for i, (found, wanted) in enumerate(pairs) if not torch.equal(found, wanted)]


WAYS = pytest.mark.parametrize("register", [of_the_optimizer, of_all_optimizers])


@WAYS
def test_a_hook_that_was_there_before_tears_nothing(
    register: Register, settings: dict[str, Any], late_copies: None
) -> None:
    assert restored_differs(register, settings) == []


def test_it_is_the_place_in_front_that_keeps_it_off(
    settings: dict[str, Any], late_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: after the user's hook the version is torn, and nothing notices."""
    monkeypatch.setattr(optimizer_steps, "_put_first", lambda handle: None)
    assert restored_differs(of_all_optimizers, settings) != []


def test_it_comes_before_every_hook_and_leaves_with_its_checkpointer(
    settings: dict[str, Any],
) -> None:
    model, optimizer = build()
    order: list[str] = []
    hooks = [
        of_all_optimizers(optimizer, lambda *_: order.append("of all")),
        of_the_optimizer(optimizer, lambda *_: order.append("its own")),
    ]
    ckpt = tierckpt.Checkpointer(model, optimizer, **settings)
    barrier = ckpt._before_step
    ckpt._iterations._before_step = lambda label: (order.append("barrier"), barrier(label))[1]
    backward(model)
    optimizer.step()
    assert order == ["barrier", "of all", "its own"]
    ckpt.abandon()
    del order[:]
    optimizer.step()
    assert order == ["of all", "its own"]
    for hook in hooks:
        hook.remove()


def test_where_hooks_are_kept_in_another_way_it_runs_after_the_step_and_works(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch with other handles: the barrier works as far as possible."""
    register = optimizer_steps.register_optimizer_step_pre_hook

    class Handle:
        def __init__(self, hook: Any) -> None:
            self.remove = register(hook).remove

    monkeypatch.setattr(optimizer_steps, "register_optimizer_step_pre_hook", Handle)
    before = len(_global_optimizer_pre_hooks)
    model, optimizer = build()
    with tierckpt.Checkpointer(model, optimizer, **settings) as ckpt:
        for step in range(1, STEPS + 1):
            backward(model)
            optimizer.step()
            ckpt.step()
            assert ckpt.version == step
    assert len(_global_optimizer_pre_hooks) == before
