"""Loops that change the trained objects as long as they run. The matrix has such changes in its
first iterations only, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.state_matrix.jobs import Job, adam, adamw, flat_inputs, loss_of, sgd
from tests.support.state_matrix.models import mlp, normalised
from tests.support.state_matrix.optimizers import Homemade

Wrap = Callable[[nn.Module], nn.Module]
CYCLE = 23
"""Iterations; prime to the lengths of rounds."""


def job(model: nn.Module, optimizer: Any, wrap: Wrap, **more: Any) -> Job:
    made = Job(model, {"optimizer": optimizer(model.parameters())}, flat_inputs(), **more)
    made.wrapper = wrap(model)
    return made


def skipped_steps(wrap: Wrap) -> Job:
    """A GradScaler that meets an infinity now and then, on all ranks by the reduction."""
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=5), [0]

    def update(this: Job, loss_now: Callable[[], torch.Tensor]) -> torch.Tensor:
        (optimizer,) = this.optimizers.values()
        seen[0] += 1
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_now() * (float("inf") if seen[0] % 7 == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return job(mlp(), adamw, wrap, extra={"scaler": scaler}, update=update)


def stepwise(
    change: Callable[[Job, int], object], model: Any = mlp, optimizer: Any = adam
) -> Callable[[Wrap], Job]:
    """With a change before each iteration."""

    def make(wrap: Wrap) -> Job:
        seen = [0]

        def update(this: Job, loss_now: Callable[[], torch.Tensor]) -> torch.Tensor:
            change(this, seen[0])
            seen[0] += 1
            (each,) = this.optimizers.values()
            each.zero_grad(set_to_none=seen[0] % 3 > 0)
            loss = loss_now()
            loss.backward()
            nn.utils.clip_grad_norm_(this.model.parameters(), 0.5)
            each.step()
            return loss

        return job(model(), optimizer, wrap, update=update)

    return make


def freeze_by_turns(this: Job, seen: int) -> None:
    for number, param in enumerate(this.model.parameters()):
        param.requires_grad_(number % 2 == 0 or seen // CYCLE % 2 == 0)


def load_its_own_state(this: Job, seen: int) -> None:
    (optimizer,) = this.optimizers.values()
    if seen % CYCLE == CYCLE - 1:
        optimizer.load_state_dict(optimizer.state_dict())


def forget_state(this: Job, seen: int) -> None:
    (optimizer,) = this.optimizers.values()
    if seen % CYCLE == CYCLE - 1:
        optimizer.state.clear()


def other_options(this: Job, seen: int) -> None:
    for group in this.optimizers["optimizer"].param_groups:
        group["lr"] = 0.01 * (1 + seen % CYCLE)


def other_tensors(this: Job, seen: int) -> None:
    """Move a parameter to other memory, as a library does that packs parameters."""
    for number, param in enumerate(this.model.parameters()):
        if seen % 5 == number:
            param.data = param.data.clone()


def shorter_lists(this: Job, seen: int) -> None:
    for state in this.optimizers["optimizer"].state.values():
        if len(state["history"]) > CYCLE:
            del state["history"][: CYCLE // 2]


def groups_that_come(wrap: Wrap) -> Job:
    """Parameters outside of the model, one more now and then; reduced by hand."""
    made, seen = job(mlp(), adam, wrap), [0]
    more: list[nn.Parameter] = []

    def update(this: Job, loss_now: Callable[[], torch.Tensor]) -> torch.Tensor:
        optimizer = this.optimizers["optimizer"]
        if seen[0] % CYCLE == CYCLE - 1 and len(more) < 20:
            more.append(nn.Parameter(torch.full((3 + len(more),), 0.5)))
            optimizer.add_param_group({"params": [more[-1]], "lr": 0.02})
        seen[0] += 1
        optimizer.zero_grad()
        loss = loss_now() + sum(each.square().sum() for each in more)
        loss.backward()
        optimizer.step()
        return loss.detach()

    made.update = update
    return made


def accumulated(wrap: Wrap) -> Job:
    def update(this: Job, loss_now: Callable[[], torch.Tensor]) -> torch.Tensor:
        optimizer, wrapper = this.optimizers["optimizer"], this.wrapper
        assert isinstance(wrapper, DistributedDataParallel)
        with wrapper.no_sync():
            loss_of(wrapper(this.inputs())).backward()
        loss = loss_now()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return job(normalised(), sgd, wrap, update=update)


def averaged(wrap: Wrap) -> Job:
    made = job(normalised(), adamw, wrap)
    ema = AveragedModel(made.model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
    made.extra["average"] = ema
    made.after = lambda this, loss: ema.update_parameters(this.model)
    return made


def scheduled(wrap: Wrap) -> Job:
    made = job(mlp(), sgd, wrap)
    kind = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
    made.extra["scheduler"] = scheduler = kind(made.optimizers["optimizer"], CYCLE)
    made.after = lambda this, loss: scheduler.step()
    return made


SCRIPTS: dict[str, Callable[[Wrap], Job]] = {
    "steps that a scaler skips": skipped_steps,
    "layers frozen and thawed by turns": stepwise(freeze_by_turns),
    "an optimizer that loads its own state": stepwise(load_its_own_state),
    "state thrown away again and again": stepwise(forget_state),
    "options that change": stepwise(other_options, optimizer=partial(sgd, nesterov=True)),
    "memory that changes": stepwise(other_tensors),
    "lists that grow and shrink": stepwise(shorter_lists, optimizer=Homemade),
    "groups that come": groups_that_come,
    "accumulation without reduction": accumulated,
    "an average of the model": averaged,
    "a scheduler": scheduled,
}
