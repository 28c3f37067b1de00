"""A training script under an elastic state, for tests over two real ranks.

Horovod's launcher is not elastic there, so ranks fail by the exception that Horovod would raise,
and all stay. tests/crash/horovod/test_elastic.py has real kills.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tests.support import exact
from tests.support.training import Net, Place, batch, horovod, rank

BATCHES = 5
SAMPLES = 80
RATE = 1e-2


def elastic() -> Any:
    return importlib.import_module("horovod_ckpt.elastic")


def failure() -> Any:
    """The error class that Horovod raises on the remaining ranks."""
    return importlib.import_module("horovod.common.exceptions").HorovodInternalError


def interrupt() -> Any:
    """The error class that a commit raises when hosts came or left."""
    return importlib.import_module("horovod.common.exceptions").HostsUpdatedInterrupt


def start_again() -> None:
    """Restart Horovod as Python sees it: work in progress is dropped. Ranks stay connected."""
    horovod().init()


class Script:
    """A training script's objects and its loop; `told` has the events that it received."""

    def __init__(self, place: Place, seed: int, **settings: Any) -> None:
        self.told: list[tierckpt.Event] = []
        self.settings = {
            "path": place.path,
            "shm_dir": place.shm,
            "agent": "inline",
            "local_every_seconds": 0,
            "on_event": self.told.append,
            **settings,
        }
        torch.manual_seed(seed)
        self.state = self.make()

    def make(self) -> Any:
        """The elastic state, with all its objects."""
        model = self.net()
        optimizer = self.distribute(model)
        sampler = elastic().ElasticSampler(range(SAMPLES))
        objects = {"schedule": self.schedule(optimizer), "sampler": sampler}
        values = {"batch": 0, "seen": []}
        return elastic().TorchState(model, optimizer, **objects, **values, tierckpt=self.settings)

    def net(self) -> nn.Module:
        return Net(norm=nn.BatchNorm1d)

    def distribute(self, model: nn.Module) -> Any:
        return distributed(model, "")

    def schedule(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=1000)

    def start(self, seed: int = 100) -> Script:
        """Random streams differ by rank, unless a version is restored."""
        torch.manual_seed(seed + rank())
        self.state.sync()
        return self

    def forward(self) -> torch.Tensor:
        self.state.optimizer.zero_grad()
        return self.state.model(batch(self.state.batch)).square().mean()

    def update(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.state.optimizer.step()
        self.state.schedule.step()
        self.state.sampler.record_batch(0, 4)

    def train_to(self, end: int) -> dict[int, dict[str, str]]:
        """Digests of the state at every commit."""
        course = {}
        while self.state.batch < end:
            self.update(self.forward())
            self.state.seen = [*self.state.seen, self.state.batch]
            self.state.batch += 1
            course[self.state.batch] = self.digests()
            self.state.commit()
        return course

    def replicated(self) -> dict[str, Any]:
        return exact.replicated(self.state.model, self.state.optimizer)

    def digests(self) -> dict[str, str]:
        """Digest of every bit that a next step would depend on."""
        found = {
            **self.replicated(),
            **exact.buffers(self.state.model),
            **exact.streams(),
            "schedule": exact.image(self.state.schedule.state_dict()),
            "sampler": exact.image(self.state.sampler.state_dict()),
            "values": exact.image([self.state.batch, self.state.seen]),
        }
        return {name: exact.digest(value) for name, value in found.items()}

    def fail(self) -> None:
        """Handle the state as Horovod's loop does after the loss of a rank."""
        try:
            raise failure()
        except failure():
            self.state.restore()
        assert self.state.checkpointer is None
        start_again()

    def hosts_change(self) -> None:
        """Handle the state as Horovod's loop does when ranks come or leave, and none is lost."""
        self.state.on_hosts_updated(1, 2)
        with pytest.raises(interrupt()):
            self.state.check_host_updates()
        assert self.state.checkpointer is None
        start_again()

    def end(self) -> None:
        self.state.checkpointer.close()
        self.state.checkpointer = None

    def said(self, text: str) -> list[tierckpt.Event]:
        return [event for event in self.told if text in event.message]


def distributed(
    model: nn.Module, prefix: str, kind: Callable[..., Any] = torch.optim.AdamW, **options: Any
) -> Any:
    named = [(prefix + name, param) for name, param in model.named_parameters()]
    return horovod().DistributedOptimizer(
        kind(model.parameters(), lr=RATE), named_parameters=named, **options
    )


def lose(*paths: str) -> None:
    """Remove memory, as the loss of machines does; all ranks call it, with nothing attached."""
    horovod().barrier()
    if rank() == 0:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
    horovod().barrier()
    Path(paths[0]).mkdir(exist_ok=True)
    horovod().barrier()


class Adversaries(Script):
    """Two models that are trained against each other, by two optimizers."""

    def __init__(self, named: bool, place: Place, seed: int) -> None:
        self.named = named
        super().__init__(place, seed)

    def make(self) -> Any:
        g, d = nn.Linear(6, 24), nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 1))
        opt_g, opt_d = distributed(g, "g."), distributed(d, "d.")
        self.parts = (g, d, opt_g, opt_d)
        state = elastic().TorchState
        if self.named:
            given = {"generator": g, "discriminator": d, "opt_g": opt_g, "opt_d": opt_d}
            return state(batch=0, tierckpt=self.settings, **given)
        return state(g, opt_g, type=d, opt_d=opt_d, batch=0, tierckpt=self.settings)

    def train_to(self, end: int) -> dict[int, dict[str, str]]:
        g, d, opt_g, opt_d = self.parts
        course = {}
        while self.state.batch < end:
            made = g(torch.randn(3, 6))
            opt_d.zero_grad()
            (d(made.detach()).mean() - d(batch(self.state.batch)).mean()).backward()
            opt_d.step()
            opt_g.zero_grad()
            d.requires_grad_(False)
            (-d(made)).mean().backward()
            d.requires_grad_(True)
            opt_g.step()
            self.state.batch += 1
            course[self.state.batch] = self.digests()
            self.state.commit()
        return course

    def replicated(self) -> dict[str, Any]:
        g, d, opt_g, opt_d = self.parts
        one, other = exact.replicated(g, opt_g), exact.replicated(d, opt_d)
        return {f"g {k}": v for k, v in one.items()} | {f"d {k}": v for k, v in other.items()}

    def digests(self) -> dict[str, str]:
        found = {**self.replicated(), **exact.streams(), "batch": self.state.batch}
        return {name: exact.digest(exact.image(value)) for name, value in found.items()}
