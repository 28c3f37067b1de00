"""A fleet: many small trainings, each with a model and an optimizer of its own, in one job.

All share the cost of one checkpoint. Each is proved by itself: its state at the boundary is
restored bit for bit, and its training continues exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierckpt
from tests.support import exact
from tests.support.state_matrix.proof import seed_everything

BOUNDARIES, LATER = 5, 2


@dataclass
class Ship:
    """One training."""

    model: nn.Module
    optimizer: Any
    iterate: Callable[[nn.Module, Any], None]


Maker = Callable[[], Ship]


def plain(model: nn.Module, optimizer: Any) -> None:
    """Run one iteration."""
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def with_closure(model: nn.Module, optimizer: Any) -> None:
    """A training in which the optimizer asks for gradients, and some exist before."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    state = torch.get_rng_state()
    closure()
    torch.set_rng_state(state)  # the same data again
    optimizer.step(closure)


def loss_of(model: nn.Module) -> torch.Tensor:
    """Loss on new data."""
    inputs = torch.randint(9, (5,)) if isinstance(model[0], nn.Embedding) else torch.randn(5, 6)
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


def small() -> nn.Sequential:
    """Matrices and vectors."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def image(ship: Ship) -> dict[str, Any]:
    """Its tensors, and the `state_dict()` of its optimizer. That one has no order, and a parameter
    without state may be in it or not."""
    told = ship.optimizer.state_dict()
    return {**exact.parameters(ship.model), "state_dict()": exact.image(_sorted(told))}


def _sorted(value: Any) -> Any:
    if type(value) is dict:
        each = ((k, _sorted(value[k])) for k in sorted(value, key=repr))
        return {k: v for k, v in each if v != {}}
    return [*map(_sorted, value)] if type(value) is list else value


class Fleet:
    """Images of all trainings."""

    def __init__(self, makers: Mapping[str, Maker], seed: int) -> None:
        seed_everything(seed)
        self.ships = {name: make() for name, make in makers.items()}

    def attach(self, path: Path, shm: Path, events: list[tierckpt.Event]) -> tierckpt.Checkpointer:
        return tierckpt.Checkpointer(
            nn.ModuleDict({_plain(name): ship.model for name, ship in self.ships.items()}),
            {_plain(name): ship.optimizer for name, ship in self.ships.items()},
            path=path,
            shm_dir=str(shm),
            local_every_steps=0,
            local_every_seconds=0,
            agent="inline",
            on_event=events.append,
        )

    def iterate(self) -> None:
        for ship in self.ships.values():
            ship.iterate(ship.model, ship.optimizer)

    def images(self) -> dict[str, Any]:
        return {name: image(ship) for name, ship in self.ships.items()}


def _plain(name: str) -> str:
    return name.replace(".", "_").replace("/", "_")


def differences(makers: Mapping[str, Maker], path: Path, shm: Path) -> dict[str, list[str]]:
    """Differences by name of the training, and warnings of the job under the empty name. Empty if
    there are none."""
    events: list[tierckpt.Event] = []
    fleet = Fleet(makers, seed=1)
    ckpt = fleet.attach(path, shm, events)
    for _ in range(BOUNDARIES):
        fleet.iterate()
        ckpt.step()
    at_boundary = fleet.images()
    for _ in range(LATER):
        fleet.iterate()
    later = fleet.images()
    ckpt.abandon()

    fleet = Fleet(makers, seed=2)
    ckpt = fleet.attach(path, shm, events)
    restored = ckpt.restore()
    found = {name: [] if restored == BOUNDARIES else [f"restored {restored}"] for name in makers}
    for when, wanted in (("restored", at_boundary), ("later", later)):
        for name, now in fleet.images().items():
            found[name] += [f"{when}: {n}" for n in exact.differences(wanted[name], now)]
        if when == "restored":
            for _ in range(LATER):
                fleet.iterate()
    ckpt.abandon()
    found[""] = [e.text() for e in events if e.severity >= logging.WARNING]
    return {name: told for name, told in found.items() if told}
