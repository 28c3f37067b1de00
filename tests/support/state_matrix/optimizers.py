"""Torch's optimizers with their options, and one with state of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.support.state_matrix.jobs import (
    Cases,
    Job,
    adam,
    adamw,
    closure_update,
    flat_inputs,
    pictures,
    sgd,
    trained,
)
from tests.support.state_matrix.models import (
    Bag,
    OddShapes,
    Recurrent,
    Tied,
    Unused,
    channels_last,
    mlp,
)

CASES = Cases()


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
    # Alternating over models that differ in memory order, types and dead parameters.
    models = (mlp, OddShapes, Unused, Tied, Recurrent, channels_last)
    for index, (name, optimizer) in enumerate(plain.items()):
        model = models[index % len(models)]
        if "fused" in name and model is OddShapes:
            model = mlp
        inputs = pictures() if model is channels_last else flat_inputs()
        CASES.add(
            f"optimizer {name}",
            lambda m=model, o=optimizer, i=inputs: trained(m(), o, inputs=i),
        )
    CASES.add(
        "optimizer lbfgs",
        lambda: trained(
            mlp(), partial(optim.LBFGS, max_iter=4, history_size=3), update=closure_update
        ),
    )
    CASES.add(
        "optimizer lbfgs line search",
        lambda: trained(
            nn.Linear(6, 2),
            partial(optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe"),
            update=closure_update,
        ),
    )
    CASES.add(
        "optimizer sparse adam",
        lambda: trained(Bag(), optim.SparseAdam),
    )
    if hasattr(optim, "Muon"):
        CASES.add(
            "optimizer muon beside adamw",
            lambda: muon_and_adamw(mlp()),
        )
    CASES.add("optimizer with options of its own", lambda: trained(mlp(), Homemade))
    CASES.add("optimizer around another", lambda: trained(mlp(), Climbing, update=closure_update))
    CASES.add("optimizer with a counter of its own", lambda: trained(mlp(), Counting))


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


class Climbing(torch.optim.Optimizer):
    """SAM: steps another optimizer, with gradients of a nearby point. It saves its own counter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05, "lr": 0.05})
        self.base_optimizer = adamw(self.param_groups, lr=0.05)
        self.param_groups = self.base_optimizer.param_groups
        self.climbs = 0

    def step(self, closure: Any) -> Any:
        loss = torch.enable_grad()(closure)()
        self.climbs += 1
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        with torch.no_grad():
            for p in params:
                self.state[p]["climb"] = p.grad * (0.05 / self.climbs)
                p.add_(self.state[p]["climb"])
        torch.enable_grad()(closure)()
        with torch.no_grad():
            for p in params:
                p.sub_(self.state[p]["climb"])
        self.base_optimizer.step()
        return loss

    def state_dict(self) -> Any:
        return {**super().state_dict(), "climbs": self.climbs}

    def load_state_dict(self, told: Any) -> None:
        super().load_state_dict({k: told[k] for k in ("state", "param_groups")})
        self.climbs = told["climbs"]
        self.base_optimizer.param_groups = self.param_groups


class Counting(torch.optim.Adam):
    """Its learning rate depends on a counter, no option; a sum has a key, no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        kept: Any = self.state
        kept["sum"] = kept.get("sum", torch.zeros(2)) + self.count / 7
        for group in self.param_groups:
            group["lr"] = 0.01 / self.count + 0.001 * float(kept["sum"][0])
        return super().step(closure)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, told: Any) -> None:
        super().load_state_dict({k: told[k] for k in ("state", "param_groups")})
        self.count = told["count"]


def muon_and_adamw(model: nn.Module) -> Job:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = {"muon": torch.optim.Muon(matrices, lr=0.01), "adamw": adamw(others)}
    return Job(model, optimizers, flat_inputs())


add_optimizers()
