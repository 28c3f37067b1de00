"""What simulated processes run. Each process has a copy of this module and of the product.

A trainer's state after version v is the same in every run, so a restart is right only if it
has exactly these bits. Beside it each version has its trail: the runs that led to it, and the
version at which each of them started. It shows which run took a version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch

from tierckpt.agent.address import AgentSettings
from tierckpt.agent.process import run as run_agent
from tierckpt.checkpointer.checkpointer import Checkpointer
from tierckpt.events import Event

PARAMETERS = 3


class Trail:
    """The runs that led to the present state: pairs of a run and the version that it started at."""

    def __init__(self, run: int) -> None:
        self.run, self.runs = run, [(run, 0)]

    def state_dict(self) -> dict[str, Any]:
        """The pairs."""
        return {"runs": [list(each) for each in self.runs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Another run's pairs."""
        self.runs = [(run, version) for run, version in state["runs"]]


def fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of the weights and of their momentum."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
        momentum = optimizer.state[parameter].get("momentum_buffer")
        found.update(b"" if momentum is None else momentum.numpy().tobytes())
    return found.hexdigest()[:16]


def train_one(model: torch.nn.Module, optimizer: torch.optim.Optimizer, version: int) -> None:
    """From `version` to the next one."""
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, ((version * 7 + number * 3) % 11) / 8 - 0.5)
    optimizer.step()


def new_state() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer at version 0."""
    model = torch.nn.Module()
    for number in range(PARAMETERS):
        value = torch.arange(4.0) + number
        model.register_parameter(f"p{number}", torch.nn.Parameter(value))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trainer(
    group: Any,
    reduce_gradients: Callable[[], None],
    run: int,
    until: int,
    settings: dict[str, Any],
    tell: Callable[..., None],
) -> None:
    """One rank: restore, train until a version, close. `tell` informs the oracle."""
    model, optimizer = new_state()
    trail = Trail(run)

    def heard(event: Event) -> None:
        tell("event", event)

    checkpointer = Checkpointer(
        model, optimizer, group=group, extra={"trail": trail}, on_event=heard, **settings
    )
    restored = int(checkpointer.restore())
    trail.runs.append((run, restored))
    tell("restored", restored, fingerprint(model, optimizer), trail.runs)
    for version in range(restored, until):
        reduce_gradients()
        train_one(model, optimizer, version)
        tell("reached", version + 1)
        checkpointer.step()
        tell("newest", dict(checkpointer.newest))
        if checkpointer.should_exit():
            break
    checkpointer.close()
    tell("closed", checkpointer.end)


def agent(arguments: list[str]) -> int:
    """A node's agent, as the product starts it."""
    settings, starter = arguments
    return run_agent(AgentSettings(**json.loads(settings)), int(starter))


__all__ = ["agent", "fingerprint", "new_state", "trainer"]
