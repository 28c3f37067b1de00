"""Parts of a case of the matrix: a small training script, and its iteration.

A case makes its job from random numbers, so that a job made with another seed is another one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support import exact


@dataclass
class Job:
    """A training script: its objects, and its iteration."""

    model: nn.Module
    optimizers: dict[str, torch.optim.Optimizer]
    inputs: Callable[[], torch.Tensor]
    extra: dict[str, Any] = field(default_factory=dict)
    before: dict[int, Callable[[Job], None]] = field(default_factory=dict)
    """Change that the script makes before an iteration: freeze a layer, add a group, ..."""
    after: Callable[[Job, torch.Tensor], None] = lambda job, loss: None
    """Work after the optimizer's step: the scheduler's step, and the like."""
    update: Callable[[Job, Callable[[], torch.Tensor]], torch.Tensor] | None = None
    """Replaces zero_grad, backward and step."""
    versions: int = 1
    """Versions per iteration: steps of one optimizer in it."""
    wrapper: nn.Module | None = None
    """Module that the forward pass calls, if not the model itself."""

    def prepare(self, iteration: int) -> None:
        if iteration in self.before:
            self.before[iteration](self)

    def iterate(self) -> None:
        x = self.inputs() * (1 + random.random()) * (1 + np.random.rand())
        loss = (self.update or plain_update)(self, lambda: loss_of((self.wrapper or self.model)(x)))
        self.after(self, loss.detach())

    def image(self) -> dict[str, Any]:
        found = {**exact.parameters(self.model), **exact.buffers(self.model), **exact.streams()}
        for label, optimizer in self.optimizers.items():
            found.update(exact.optimizer(optimizer, label))
            base = getattr(optimizer, "base_optimizer", None)
            found.update(exact.optimizer(base, f"{label} base") if base else {})
            found[f"{label} beside"] = exact.image(beside(optimizer))
        for name, thing in self.extra.items():
            found[f"extra {name}"] = extra_image(thing)
        return found


def beside(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parts of its `state_dict()` besides state of parameters and options."""
    told = optimizer.state_dict()
    others = {k: v for k, v in told["state"].items() if not isinstance(k, int)}
    return {**{k: v for k, v in told.items() if k not in ("state", "param_groups")}, **others}


def plain_update(job: Job, loss_now: Callable[[], torch.Tensor]) -> torch.Tensor:
    for optimizer in job.optimizers.values():
        optimizer.zero_grad()
    loss = loss_now()
    loss.backward()
    for optimizer in job.optimizers.values():
        optimizer.step()
    return loss


def closure_update(job: Job, loss_now: Callable[[], torch.Tensor]) -> torch.Tensor:
    (optimizer,) = job.optimizers.values()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_now()
        loss.backward()
        return loss

    return optimizer.step(closure)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    if output.is_complex():
        output = torch.view_as_real(output)
    return output.float().square().mean()


def extra_image(thing: Any) -> Any:
    if isinstance(thing, torch.Generator):
        return exact.tensor_image(thing.get_state())
    if isinstance(thing, np.random.Generator):
        return exact.image(thing.bit_generator.state)
    if isinstance(thing, np.random.RandomState):
        return repr(thing.get_state(legacy=False))
    if isinstance(thing, random.Random):
        return thing.getstate()
    return exact.image(thing.state_dict())


Case = Callable[[], Job]

sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
adam = partial(torch.optim.Adam, lr=0.01)
adamw = partial(torch.optim.AdamW, lr=0.01)


def flat_inputs(dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(5, 6).to(dtype)


def pictures(dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(4, 3, 6, 6).to(dtype)


def trained(model: nn.Module, optimizer: Callable[[Iterable[Any]], Any] = sgd, **job: Any) -> Job:
    """A job with one optimizer for all of the model."""
    job.setdefault("inputs", flat_inputs())
    return Job(model, {"optimizer": optimizer(model.parameters())}, **job)


class Cases(dict[str, Case]):
    """Cases by unique name."""

    def add(self, name: str, make: Case) -> None:
        assert name not in self
        self[name] = make
