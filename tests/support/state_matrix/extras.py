"""Objects for `extra`: schedulers, generators, averages, metrics, scalers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel

from tests.support.state_matrix.jobs import Cases, Job, adam, adamw, sgd, trained
from tests.support.state_matrix.models import Scaled, mlp, normalised

CASES = Cases()


def add_schedulers() -> None:
    def scheduled(make: Callable[[Any], Any], optimizer: Callable[..., Any] = sgd) -> Job:
        job = trained(mlp(), optimizer)
        job.extra["scheduler"] = make(job.optimizers["optimizer"])
        plateau = isinstance(job.extra["scheduler"], schedulers.ReduceLROnPlateau)
        job.after = plateau_step if plateau else scheduler_step
        return job

    makers: dict[str, Callable[[Any], Any]] = {
        "StepLR": lambda o: schedulers.StepLR(o, 2, 0.3),
        "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3, 3]),
        "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.7),
        "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
        "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.95),
        "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
        "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
        "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 7, 2.0),
        "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2),
        "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=9),
        "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
        "SequentialLR": lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.9)], milestones=[2]
        ),
        "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
            [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)], optimizer=o
        ),
        "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=4),
    }
    for name, make in makers.items():
        CASES.add(f"scheduler {name}", lambda m=make: scheduled(m))
    CASES.add("scheduler OneCycleLR adamw", lambda: scheduled(makers["OneCycleLR"], adamw))
    CASES.add(
        "scheduler CosineAnnealingLR learning rate in a tensor",
        lambda: scheduled(
            makers["CosineAnnealingLR"], lambda p: adam(p, lr=torch.tensor(0.01), foreach=False)
        ),
    )


def scheduler_step(job: Job, loss: torch.Tensor) -> None:
    job.extra["scheduler"].step()


def plateau_step(job: Job, loss: torch.Tensor) -> None:
    job.extra["scheduler"].step(float(loss))


class Metrics:
    """State of a hand-written metric."""

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)
        self.seen: list[torch.Tensor] = []
        self.best: tuple[int, float] | None = None
        self.confusion = np.zeros((2, 3), dtype=np.int32)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def update(self, loss: torch.Tensor) -> None:
        self.total += loss
        self.seen.append(loss.clone())
        self.best = (len(self.seen), float("inf"))
        self.confusion[len(self.seen) % 2] += 1


def add_extras() -> None:
    def noisy(generator: Any) -> Job:
        job = trained(mlp(), extra={"noise": generator})
        if isinstance(generator, torch.Generator):
            job.inputs = lambda: torch.randn(5, 6, generator=generator)
        elif isinstance(generator, random.Random):
            job.inputs = lambda: torch.tensor([[generator.gauss(0, 1) for _ in range(6)]])
        else:
            job.inputs = lambda: torch.from_numpy(generator.normal(size=(5, 6))).float()
        return job

    def averaged() -> Job:
        job = trained(normalised(), adam)
        job.extra["average"] = AveragedModel(job.model, use_buffers=True)
        job.after = lambda job, loss: job.extra["average"].update_parameters(job.model)
        return job

    def measured() -> Job:
        job = trained(mlp(), extra={"metrics": Metrics()})
        job.after = lambda job, loss: job.extra["metrics"].update(loss)
        return job

    def scaled(optimizer: Callable[..., Any]) -> Job:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=2)
        return trained(mlp(), optimizer, extra={"scaler": scaler}, update=scaled_update)

    seed = torch.initial_seed
    CASES.add("a torch generator", lambda: noisy(torch.Generator().manual_seed(seed())))
    CASES.add("a numpy generator", lambda: noisy(np.random.default_rng(seed())))
    CASES.add("numpy's old generator", lambda: noisy(np.random.RandomState(seed() % 2**32)))
    CASES.add("a generator of Python's", lambda: noisy(random.Random(seed())))
    for name in ("MT19937", "Philox", "SFC64"):
        kind = getattr(np.random, name)
        CASES.add(f"a numpy generator {name}", lambda k=kind: noisy(np.random.Generator(k(seed()))))
    CASES.add("a running average of the model", averaged)
    CASES.add("metrics with tensors", measured)
    CASES.add("a gradient scaler", lambda: scaled(sgd))
    CASES.add("a gradient scaler, fused", lambda: scaled(partial(adamw, fused=True)))
    CASES.add("extra state of modules", lambda: trained(nn.Sequential(Scaled(), mlp()), adam))


def scaled_update(job: Job, loss_now: Callable[[], torch.Tensor]) -> torch.Tensor:
    scaler, (optimizer,) = job.extra["scaler"], job.optimizers.values()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_now()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss


add_schedulers()
add_extras()
