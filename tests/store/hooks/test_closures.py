"""If the backward pass is the closure of a step, copies overlap with it, and no version is torn."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import tierckpt
from tests.support.late_copies import copy_late
from tierckpt.hooks import optimizer_steps

pytestmark = pytest.mark.usefixtures("inline_agent")

STEPS = 3
OWN = [c for c in vars(torch.optim).values() if inspect.isclass(c) and c.__name__ != "Optimizer"]


class Sam(SGD):
    """Moves the weights before it calls the closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(1.5)
        return super().step(closure)


class Renamed(SGD):
    """A subclass with torch's own step."""


def wrapped() -> type[SGD]:
    """A library's wrapper: torch's step under its own name, with a change before it."""

    class Patched(SGD):
        pass

    step = SGD.step

    @functools.wraps(step)
    def shrinking(self: SGD, *args: Any, **kwargs: Any) -> Any:
        for param in self.param_groups[0]["params"]:
            param.data.mul_(0.5)
        return step(self, *args, **kwargs)

    vars(shrinking).pop("hooked", None)  # as where no optimizer of the class was made before
    Patched.step = shrinking  # type: ignore[method-assign]
    return Patched


@pytest.fixture(autouse=True)
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_late(monkeypatch, 0.002)


@pytest.fixture
def settings(shm_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {"shm_dir": str(shm_dir), "path": tmp_path / "c", "local_every_seconds": 0}


class Loop:
    """Its forward and backward pass are a closure, which notes whether copies were in progress."""

    def __init__(self, kind: Callable[..., Any], settings: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        self.ckpt = tierckpt.Checkpointer(self.model, self.optimizer, **settings)
        self.ckpt._active.release_early = False
        self.overlaps: list[bool] = []
        self.fails = False

    def closure(self) -> torch.Tensor:
        self.overlaps.append(self.ckpt._active.snapshot is not None)
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(2, 32)).square().mean()
        loss.backward()
        if self.fails:
            raise ArithmeticError
        return loss

    def image(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def differs(self, other: list[torch.Tensor]) -> list[int]:
        pairs = zip(self.image(), other, strict=True)
        return [i for i, (mine, theirs) in enumerate(pairs) if not torch.equal(mine, theirs)]


def torn(
    loop: Loop, settings: dict[str, Any], by_name: bool = False, steps: int = STEPS
) -> list[int]:
    """Tensors that a restore does not bring back as they were at the last boundary."""
    for _ in range(steps):
        loop.overlaps.clear()
        if by_name:
            loop.optimizer.step(closure=loop.closure)
        else:
            loop.optimizer.step(loop.closure)
        loop.ckpt.step()
    expected = loop.image()
    loop.overlaps.clear()
    loop.optimizer.step(loop.closure)
    loop.ckpt.abandon()
    again = Loop(SGD, settings)
    assert again.ckpt.restore(strict=False).version == STEPS
    again.ckpt.abandon()
    return again.differs(expected)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", [SGD, Renamed])
def test_the_barrier_comes_after_the_first_call(
    kind: type[SGD], by_name: bool, settings: dict[str, Any]
) -> None:
    loop = Loop(kind, settings)
    assert torn(loop, settings, by_name) == []
    assert loop.overlaps == [True]


def test_a_line_search_calls_it_again_after_the_barrier(settings: dict[str, Any]) -> None:
    """LBFGS makes entries in its state before the very first call, so it waits once before."""
    kind = functools.partial(torch.optim.LBFGS, max_iter=3)
    loop = Loop(kind, settings)
    loop.ckpt.save()
    loop.optimizer.step(loop.closure)
    assert not any(loop.overlaps)
    loop.ckpt.step()
    loop.overlaps.clear()
    loop.optimizer.step(loop.closure)
    assert loop.overlaps[:2] == [True, False]
    loop.ckpt.abandon()


def decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.data.mul_(0.5)


@pytest.mark.parametrize("how", ["its own step", "a wrapped step", "a hook"])
def test_a_closure_that_may_change_weights_before_the_call_waits(
    how: str, settings: dict[str, Any]
) -> None:
    kinds = {"its own step": Sam, "a wrapped step": wrapped()}
    loop = Loop(kinds.get(how, SGD), settings)
    if "hook" in how:
        loop.optimizer.register_step_pre_hook(decay)
    assert torn(loop, settings) == []
    assert loop.overlaps == [False]


def test_a_closure_that_fails_leaves_the_copy_as_it_is(settings: dict[str, Any]) -> None:
    loop = Loop(SGD, settings)
    loop.optimizer.step(loop.closure)
    loop.ckpt.step()
    loop.fails = True
    with pytest.raises(ArithmeticError):
        loop.optimizer.step(loop.closure)
    assert loop.ckpt._active.snapshot is not None
    loop.fails = False
    assert torn(loop, settings, steps=STEPS - 1) == []
    assert "failed" not in loop.ckpt._log.counts


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_torchs_own_call_it_before_they_change_anything(kind: type[torch.optim.Optimizer]) -> None:
    """Every listed step; and the list contains all optimizers of this torch."""
    param = nn.Parameter(torch.ones(4, 4))
    optimizer = kind([param])
    assert optimizer_steps._calls_it_first(type(optimizer).step)
    images: list[Any] = []

    def closure() -> torch.Tensor:
        images.append((param.detach().clone(), str(optimizer.state_dict())))
        param.grad = torch.full((4, 4), 0.5)
        if kind.__name__ == "SparseAdam":
            param.grad = param.grad.to_sparse()
        return param.sum()

    for _ in range(2):
        before = (param.detach().clone(), str(optimizer.state_dict()))
        images.clear()
        optimizer.step(closure)
        assert torch.equal(images[0][0], before[0])
        if kind.__name__ != "LBFGS" or len(before[1]) > 500:
            assert images[0][1] == before[1]
