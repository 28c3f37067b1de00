"""Whatever a training state is made of comes back bit for bit, and trains on bit for bit.

Every case is a small job: three steps, a boundary after each, and a fourth step during which
version 3 finishes copying; then the job is let go, as a crash would. A second job, made with
another seed, restores version 3 and makes the fourth step too. It must find what the first one
had, and arrive where the first one arrived. Odd cases restore from memory, even ones from disk.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel

import tierckpt
from tests import exact

BOUNDARIES = 3


# --- jobs ----------------------------------------------------------------------------------------


@dataclass
class Job:
    """A training script: its objects, and what it does in one iteration."""

    model: nn.Module
    optimizers: dict[str, torch.optim.Optimizer]
    inputs: Callable[[], torch.Tensor]
    extra: dict[str, Any] = field(default_factory=dict)
    before: dict[int, Callable[[Job], None]] = field(default_factory=dict)
    """What the script does to itself before an iteration: freeze a layer, add a group, ..."""
    after: Callable[[Job, torch.Tensor], None] = lambda job, loss: None
    """After the optimizer's step: the scheduler's, and the like."""
    update: Callable[[Job, Callable[[], torch.Tensor]], torch.Tensor] | None = None
    """Replaces zero_grad, backward and step."""

    def prepare(self, iteration: int) -> None:
        if iteration in self.before:
            self.before[iteration](self)

    def iterate(self) -> None:
        x = self.inputs() * (1 + random.random()) * (1 + np.random.rand())
        loss = (self.update or plain_update)(self, lambda: loss_of(self.model(x)))
        self.after(self, loss.detach())

    def image(self) -> dict[str, Any]:
        found = {**exact.parameters(self.model), **exact.buffers(self.model), **exact.streams()}
        for label, optimizer in self.optimizers.items():
            found.update(exact.optimizer(optimizer, label))
        for name, thing in self.extra.items():
            found[f"extra {name}"] = extra_image(thing)
        return found


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
    return exact.image(thing.state_dict())


# --- models --------------------------------------------------------------------------------------


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))
    return net.to(dtype)


def flat_inputs(dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(5, 6).to(dtype)


def pictures() -> torch.Tensor:
    return torch.randn(4, 3, 6, 6)


def channels_last() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3), nn.Flatten()
    )
    return net.to(memory_format=torch.channels_last)


class Wrapped(nn.Module):
    """A linear layer and something that the case is about."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


class OddShapes(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 7))
        self.single = nn.Parameter(torch.randn(1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.scale + self.nothing.sum() + self.single.sum()


class Unused(Wrapped):
    """Parameters that never get a gradient, and one that may not."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.steps = nn.Parameter(torch.randint(0, 9, (4,)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.frozen


class Tied(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


class Buffers(Wrapped):
    """Buffers of many types, each changed by every forward pass."""

    TYPES = (torch.int64, torch.int8, torch.uint8, torch.float16, torch.bfloat16, torch.float64)

    def __init__(self) -> None:
        super().__init__()
        for dtype in self.TYPES:
            name = f"of_{str(dtype).removeprefix('torch.')}"
            self.register_buffer(name, torch.zeros(3, dtype=dtype))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("complex", torch.randn(2, 2, dtype=torch.complex64))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for dtype in self.TYPES:
                getattr(self, f"of_{str(dtype).removeprefix('torch.')}").add_(1)
            self.mask.logical_not_()
            self.complex.mul_(1j)
            self.count += 1
        return self.first(x) * self.count


class Float8(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("e4m3", torch.randn(9).to(torch.float8_e4m3fn))
        self.register_buffer("e5m2", torch.randn(3, 3).to(torch.float8_e5m2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.first(x)
        with torch.no_grad():
            self.e4m3.copy_(torch.randn(9).to(torch.float8_e4m3fn))
            self.e5m2.copy_(out[:3, :3].to(torch.float8_e5m2))
        return out


class Replaced(Wrapped):
    """A buffer that is another tensor after every forward pass, like many hand-written averages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.first(x) - self.mean


class Late(Wrapped):
    """A branch that joins in only later, so that its optimizer state is created then."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(6, 6)
        self.joined = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + (self.late(x) if self.joined else 0)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((7 * x.abs()).long() % 20)


class Renormed(nn.Module):
    """Weights that the forward pass changes: it scales the rows that it looks up."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, max_norm=0.7, **options)
        self.bag = nn.EmbeddingBag(30, 4, max_norm=0.5, norm_type=1.0, mode="sum", **options)
        self.last = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (7 * x.abs()).long() % 20
        return self.last(self.table(words).mean(1)) + self.bag(words)


class TiedRenormed(nn.Module):
    """Such a weight that is another layer's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, max_norm=0.7)
        self.last = nn.Linear(6, 20)
        self.last.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table((7 * x.abs()).long() % 20))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.complex64) @ self.weight


class Transposed(nn.Module):
    """Weights stored column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(6, 5, num_layers=2, dropout=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x[None])[0]


class Scaled(nn.Module):
    """Remembers the largest values that it saw, as layers of 8 bits do."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[float] = []
        self.newest = torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.newest = x.detach().abs().max()
        self.largest = [*self.largest[-3:], float(self.newest)]
        return x / max(self.largest)

    def get_extra_state(self) -> dict[str, Any]:
        return {"largest": self.largest, "newest": self.newest}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.largest, self.newest = list(state["largest"]), state["newest"]


def partly_compiled() -> nn.Module:
    net = mlp()
    net[0] = torch.compile(net[0], backend="eager")
    return net


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 2))


# --- cases ---------------------------------------------------------------------------------------

Case = Callable[[], Job]
CASES: dict[str, Case] = {}

sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
adam = partial(torch.optim.Adam, lr=0.01)
adamw = partial(torch.optim.AdamW, lr=0.01)


def trained(model: nn.Module, optimizer: Callable[..., Any] = sgd, **job: Any) -> Job:
    job.setdefault("inputs", flat_inputs())
    return Job(model, {"optimizer": optimizer(model.parameters())}, **job)


def case(name: str, make: Case) -> None:
    assert name not in CASES
    CASES[name] = make


def add_optimizers() -> None:
    optim = torch.optim
    plain: dict[str, Callable[..., Any]] = {
        "sgd": partial(optim.SGD, lr=0.05),
        "sgd momentum": sgd,
        "sgd nesterov": partial(sgd, nesterov=True, weight_decay=0.01),
        "sgd foreach": partial(sgd, foreach=True),
        "sgd fused": partial(sgd, fused=True),
        "sgd maximize": partial(sgd, maximize=True, lr=1e-4),
        "adam": adam,
        "adam amsgrad": partial(adam, amsgrad=True),
        "adam foreach": partial(adam, foreach=True),
        "adam fused": partial(adam, fused=True),
        "adam fused amsgrad": partial(adam, fused=True, amsgrad=True),
        "adam learning rate in a tensor": lambda p: adam(p, lr=torch.tensor(0.01)),
        "adamw": adamw,
        "adamw foreach": partial(adamw, foreach=True),
        "adamw fused": partial(adamw, fused=True),
        "adagrad": partial(optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
        "adagrad fused": partial(optim.Adagrad, lr=0.05, fused=True),
        "rmsprop": partial(optim.RMSprop, lr=0.01),
        "rmsprop centered momentum": partial(
            optim.RMSprop, lr=0.01, centered=True, momentum=0.9, foreach=True
        ),
        "nadam": partial(optim.NAdam, lr=0.01),
        "nadam decoupled": partial(
            optim.NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1
        ),
        "radam": partial(optim.RAdam, lr=0.01),
        "adadelta": optim.Adadelta,
        "adamax": optim.Adamax,
        "asgd": partial(optim.ASGD, t0=1),
        "rprop": optim.Rprop,
    }
    if hasattr(optim, "Adafactor"):
        plain["adafactor"] = optim.Adafactor
    # In turn over models that differ in memory order, types and dead parameters.
    models = (mlp, OddShapes, Unused, Tied, Recurrent, channels_last)
    for index, (name, optimizer) in enumerate(plain.items()):
        model = models[index % len(models)]
        if "fused" in name and model is OddShapes:
            model = mlp
        inputs = pictures if model is channels_last else flat_inputs()
        case(
            f"optimizer {name}",
            lambda m=model, o=optimizer, i=inputs: trained(m(), o, inputs=i),
        )
    case(
        "optimizer lbfgs",
        lambda: trained(
            mlp(), partial(optim.LBFGS, max_iter=4, history_size=3), update=closure_update
        ),
    )
    case(
        "optimizer lbfgs line search",
        lambda: trained(
            nn.Linear(6, 2),
            partial(optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe"),
            update=closure_update,
        ),
    )
    case(
        "optimizer sparse adam",
        lambda: trained(Bag(), optim.SparseAdam),
    )
    if hasattr(optim, "Muon"):
        case(
            "optimizer muon beside adamw",
            lambda: muon_and_adamw(mlp()),
        )
    case("optimizer with options of its own", lambda: trained(mlp(), Homemade))


class Homemade(torch.optim.Optimizer):
    """State of kinds that torch's own optimizers do not have."""

    def __init__(self, params: Any) -> None:
        defaults = {"schedule": (0.1, [1, 2]), "name": "mine", "warm": None, "nan": float("nan")}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                seen = state.setdefault("seen", 0)
                history = state.setdefault("history", [])
                history.append(p.grad.clone())
                state["last"] = {"norm": float(p.grad.norm()), "at": (seen, None)}
                state["seen"] = seen + 1
                p.sub_(sum(history) * 0.01)


def muon_and_adamw(model: nn.Module) -> Job:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = {"muon": torch.optim.Muon(matrices, lr=0.01), "adamw": adamw(others)}
    return Job(model, optimizers, flat_inputs())


def add_models() -> None:
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    for name, dtype in half.items():
        case(f"{name} sgd", lambda d=dtype: trained(mlp(d), inputs=flat_inputs(d)))
        case(f"{name} adamw", lambda d=dtype: trained(mlp(d), adamw, inputs=flat_inputs(d)))
    case("mixed types", lambda: trained(mixed(), adamw))
    case("complex sgd", lambda: trained(Complex(), sgd))
    case("complex adam", lambda: trained(Complex(), adam))
    case("channels_last adam", lambda: trained(channels_last(), adam, inputs=pictures))
    case(
        "channels_last rmsprop foreach",
        lambda: trained(
            channels_last(), partial(torch.optim.RMSprop, foreach=True), inputs=pictures
        ),
    )
    case("weights stored column by column", lambda: trained(Transposed(), adam))
    case("buffers of many types", lambda: trained(Buffers(), sgd))
    case("float8 buffers", lambda: trained(Float8(), adam))
    case("a buffer replaced by every forward", lambda: trained(Replaced(), sgd))
    case("batch norm cumulative", lambda: trained(normalised(), adamw))
    case("parametrized by spectral norm", lambda: trained(spectral(), adam))
    case("odd shapes adamw", lambda: trained(OddShapes(), adamw))
    case("tied weights adam", lambda: trained(Tied(), adam))
    case("unused and frozen parameters adam", lambda: trained(Unused(), adam))
    case("compiled", lambda: trained(torch.compile(mlp(), backend="eager"), adam))
    case(
        "compiled through autograd",
        lambda: trained(torch.compile(normalised(), backend="aot_eager"), sgd),
    )
    case("a compiled submodule", lambda: trained(partly_compiled(), adam))
    case("several thousand small tensors", lambda: trained(many_small(), adam))
    case("tensors larger than a block", lambda: trained(large(), adam))
    case("a parameter outside the model", outside)
    for name, optimizer in {"sgd": sgd, "adam": partial(adam, weight_decay=0.1)}.items():
        case(f"embeddings with a largest norm {name}", lambda o=optimizer: trained(Renormed(), o))
    case("a tied embedding with a largest norm", lambda: trained(TiedRenormed(), adam))
    case(
        "sparse embeddings with a largest norm",
        lambda: trained(Renormed(sparse=True), partial(torch.optim.SGD, lr=0.05)),
    )


def mixed() -> nn.Module:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.bfloat16)

    return nn.Sequential(nn.Linear(6, 8), Cast(), nn.Linear(8, 4).to(torch.bfloat16))


def many_small() -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(400)))


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 1500), nn.Linear(1500, 400, bias=False))


def outside() -> Job:
    model, scale = mlp(), torch.randn((), requires_grad=True)
    optimizer = adam([*model.parameters(), scale])

    def update(job: Job, loss_now: Callable[[], torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_now() * scale.square()
        loss.backward()
        optimizer.step()
        return loss

    job = Job(model, {"optimizer": optimizer}, flat_inputs(), update=update)
    job.image = lambda: {**Job.image(job), "scale": exact.tensor_image(scale)}
    return job


def add_changes() -> None:
    """What scripts do to their state while they run."""

    def groups(optimizer: Callable[..., Any]) -> Job:
        model = mlp()
        settings = [
            {"params": model[0].parameters(), "lr": 0.02},
            {"params": [model[3].weight], "weight_decay": 0.3},
            {"params": [model[3].bias]},
        ]
        return Job(model, {"optimizer": optimizer(settings)}, flat_inputs())

    def add_group(job: Job) -> None:
        job.optimizers["optimizer"].add_param_group({"params": job.model.late.parameters()})
        job.model.joined = True

    def growing(optimizer: Callable[..., Any]) -> Job:
        model = Late()
        parts = {"optimizer": optimizer(model.first.parameters())}
        return Job(model, parts, flat_inputs(), before={1: add_group})

    def freeze(job: Job) -> None:
        job.model[0].requires_grad_(False)

    def join(job: Job) -> None:
        job.model.joined = True

    def change_options(job: Job) -> None:
        for group in job.optimizers["optimizer"].param_groups:
            group.update(lr=0.3 / 7, weight_decay=1e-17)

    def forget(job: Job) -> None:
        job.optimizers["optimizer"].state.pop(job.model[0].weight)

    case("several groups sgd", lambda: groups(sgd))
    case("several groups adamw", lambda: groups(adamw))
    case("a group added while running, sgd", lambda: growing(sgd))
    case("a group added while running, adam", lambda: growing(adam))
    for when in (1, 2):
        case(
            f"a layer frozen before iteration {when}",
            lambda w=when: trained(mlp(), adam, before={w: freeze}),
        )
        case(
            f"state created in iteration {when}",
            lambda w=when: trained(Late(), adamw, before={w: join}),
        )
    case(
        "a branch that joins after the restored version", lambda: trained(Late(), before={3: join})
    )
    case("options changed while running", lambda: trained(mlp(), before={2: change_options}))
    case("optimizer state thrown away", lambda: trained(mlp(), adam, before={3: forget}))
    case("two optimizers", two_optimizers)
    case("two optimizers by turns", lambda: two_optimizers(by_turns))


def two_optimizers(update: Any = None) -> Job:
    model = mlp()
    parts = {"first": adam(model[0].parameters()), "second": sgd(model[3].parameters())}
    return Job(model, parts, flat_inputs(), update=update)


def by_turns(job: Job, loss_now: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Two steps of the one for each of the other's."""
    for name in ("first", "first", "second"):
        job.model.zero_grad()
        loss = loss_now()
        loss.backward()
        job.optimizers[name].step()
    return loss


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
        case(f"scheduler {name}", lambda m=make: scheduled(m))
    case("scheduler OneCycleLR adamw", lambda: scheduled(makers["OneCycleLR"], adamw))
    case(
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
    """What a hand-written metric keeps."""

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
    case("a torch generator", lambda: noisy(torch.Generator().manual_seed(seed())))
    case("a numpy generator", lambda: noisy(np.random.default_rng(seed())))
    for name in ("MT19937", "Philox", "SFC64"):
        kind = getattr(np.random, name)
        case(f"a numpy generator {name}", lambda k=kind: noisy(np.random.Generator(k(seed()))))
    case("a running average of the model", averaged)
    case("metrics with tensors", measured)
    case("a gradient scaler", lambda: scaled(sgd))
    case("a gradient scaler, fused", lambda: scaled(partial(adamw, fused=True)))
    case("extra state of modules", lambda: trained(nn.Sequential(Scaled(), mlp()), adam))


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


add_optimizers()
add_models()
add_changes()
add_schedulers()
add_extras()


# --- the proof -----------------------------------------------------------------------------------


@dataclass
class Bench:
    """Where jobs run, and what they reported."""

    path: Path
    shm: Path
    on_disk: bool
    events: list[tierckpt.Event] = field(default_factory=list)

    def attach(self, job: Job) -> tierckpt.Checkpointer:
        return tierckpt.Checkpointer(
            job.model,
            job.optimizers,
            extra=job.extra,
            path=self.path / "ckpts",
            shm_dir=self.shm,
            local_every_steps=BOUNDARIES if self.on_disk else 0,
            local_every_seconds=0,
            agent="inline",  # what is written is the matter here, not by whom
            on_event=self.events.append,
        )

    def complaints(self) -> list[str]:
        return [e.text() for e in self.events if e.severity >= logging.WARNING]


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


ON_DISK = {name: index % 2 == 1 for index, name in enumerate(CASES)}


TORCH_2_4_CANNOT = {
    "optimizer adamw fused": "refuses parameters without elements",
    "scheduler SequentialLR": "warns of its own argument",
    "scheduler SWALR": "has a function in its state_dict",
}
"""What torch itself learned in 2.5."""


@pytest.mark.parametrize("name", CASES)
def test_restores_and_trains_on_bit_for_bit(name: str, tmp_path: Path, shm_dir: Path) -> None:
    if name in TORCH_2_4_CANNOT and torch.__version__.startswith("2.4."):
        pytest.skip(f"torch 2.4's {name.split()[1]} {TORCH_2_4_CANNOT[name]}")
    bench = Bench(tmp_path, shm_dir, ON_DISK[name])
    seed_everything(1)
    job = CASES[name]()
    ckpt = bench.attach(job)
    for iteration in range(BOUNDARIES):
        job.prepare(iteration)
        job.iterate()
        ckpt.step()
    version, at_boundary = ckpt.version, job.image()
    job.prepare(BOUNDARIES)
    job.iterate()
    one_step_later = job.image()
    ckpt.abandon()

    if bench.on_disk:
        shutil.rmtree(shm_dir / f"tierckpt-{os.getuid()}")
    seed_everything(2)
    again = CASES[name]()
    for iteration in range(BOUNDARIES):
        again.prepare(iteration)
    assert exact.differences(at_boundary, again.image())
    ckpt = bench.attach(again)
    restored = ckpt.restore()
    assert (restored, restored.version) == (BOUNDARIES, version)
    assert restored.levels == {"local" if bench.on_disk else "memory": 1}
    assert exact.differences(at_boundary, again.image()) == []
    again.prepare(BOUNDARIES)
    again.iterate()
    assert exact.differences(one_step_later, again.image()) == []
    ckpt.abandon()
    assert bench.complaints() == []


def test_both_levels_and_every_kind_are_in_the_matrix() -> None:
    kinds = {"optimizer": 30, "scheduler": 15}
    for kind, least in kinds.items():
        assert sum(name.startswith(kind) for name in CASES) >= least
    assert abs(sum(ON_DISK.values()) - len(CASES) / 2) <= 1
