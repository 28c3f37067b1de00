"""Boundaries that repeat the one before cast the votes, and take the versions, that a boundary with
a look at everything would.

The same course is run twice, with ranks that are threads of one process: once with a look at every
boundary, once with as few as possible.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import tierckpt
from tests.support import exact
from tierckpt.coordination import Agreement
from tierckpt.testing import ThreadGroup, run_ranks

STEPS = 40


class Course(NamedTuple):
    """What one rank has seen and done."""

    votes: list[list[int]]
    events: list[tuple[str, int | None]]
    state: str
    safe: Any


Action = Callable[[tierckpt.Checkpointer, int, int], object]
"""With the checkpointer, the rank, and the number of the step, before `step()`."""


def nothing(checkpointer: tierckpt.Checkpointer, rank: int, step: int) -> None:
    """A loop that asks for nothing."""


def one_asks(checkpointer: tierckpt.Checkpointer, rank: int, step: int) -> None:
    """One rank wants a version now and then."""
    if rank == 1 and step in (9, 23):
        checkpointer.save()


def some_wait(checkpointer: tierckpt.Checkpointer, rank: int, step: int) -> None:
    """A version on demand, which makes a boundary twice."""
    if step in (7, 20):
        checkpointer.save(now=True)


def all_unpin(checkpointer: tierckpt.Checkpointer, rank: int, step: int) -> None:
    """A collective call between two steps, which makes all ranks' numbers of votes equal."""
    if step in (18, 25):
        with contextlib.suppress(tierckpt.PinError):
            checkpointer.unpin(1)


def one_drifts(checkpointer: tierckpt.Checkpointer, rank: int, step: int) -> None:
    """A rank's weights change by themselves, which only a check of replicas sees."""
    if rank == 1 and step == 19:
        next(iter(checkpointer._state.model.parameters())).data[0, 0] += 1


def course(folder: Path, shm: Path, action: Action, settings: dict[str, Any]) -> list[Course]:
    """Two ranks' courses."""

    def train(group: ThreadGroup) -> Course:
        source = torch.Generator().manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
        with torch.no_grad():
            for param in net.parameters():
                param.copy_(torch.randn(param.shape, generator=source))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        events: list[tierckpt.Event] = []
        with tierckpt.Checkpointer(
            net,
            optimizer,
            group=group,
            path=folder / f"n{group.rank}",
            node=f"n{group.rank}",
            shm_dir=shm,
            agent="inline",
            halt_signals="",
            when_busy="wait",
            slots=3,
            on_event=events.append,
            **settings,
        ) as checkpointer:
            group.all_gather_object(None)
            votes: list[list[int]] = []
            ballots = checkpointer._agreement._ballots
            cast = ballots.all_reduce_min

            def recorded(values: list[int], own: Any = ()) -> Any:
                votes.append([*values, *own])
                return cast(values, own)

            ballots.all_reduce_min = recorded
            for step in range(STEPS):
                assert not checkpointer.should_exit()
                optimizer.zero_grad()
                x = torch.randn(3, 5, generator=torch.Generator().manual_seed(step))
                net(x).square().mean().backward()
                for param in net.parameters():
                    grads = group.all_gather_object(param.grad)
                    param.grad = sum(grads) / group.size
                if step not in (14, 31):  # skipped on all ranks
                    optimizer.step()
                action(checkpointer, group.rank, step)
                checkpointer.step()
            checkpointer.wait()
            told = [(e.name, e.version) for e in events]
            return Course(
                votes,
                told,
                exact.digest(exact.replicated(net, optimizer)),
                checkpointer._agreement.memory.safe,
            )

    return run_ranks(2, train)


MEMORY = {"local_every_seconds": 0, "replicas": "off"}


@pytest.mark.parametrize("action", [nothing, one_asks, some_wait, all_unpin, one_drifts])
@pytest.mark.parametrize(
    "settings",
    [
        {**MEMORY},
        {**MEMORY, "memory_every_steps": 0},
        {**MEMORY, "memory_every_steps": 4},
        {**MEMORY, "memory_every_steps": 10},
        {**MEMORY, "memory_every_seconds": 1000, "memory_every_steps": 0},
        {**MEMORY, "replicas": "warn every 6"},
        {**MEMORY, "replicas": "warn every 6", "memory_every_steps": 10},
    ],
    ids=["each step", "none", "each fourth", "each tenth", "by time", "replicas", "both"],
)
def test_the_votes_and_versions_are_those_of_a_full_look(
    settings: dict[str, Any],
    action: Action,
    tmp_path: Path,
    shm_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repeated: list[bool] = []
    alone: list[bool] = []

    def count(name: str, into: list[bool]) -> None:
        method = getattr(Agreement, name)

        def counted(*arguments: Any) -> bool:
            into.append(method(*arguments))
            return into[-1]

        monkeypatch.setattr(Agreement, name, counted)

    count("repeat", repeated)
    count("repeat_alone", alone)
    # From then on no part has work at each boundary.
    monkeypatch.setattr("tierckpt.hooks.unsaved_objects.OFTEN", 3)
    monkeypatch.setattr("tierckpt.checkpointer.loop.LOOK_SECONDS", -1.0)
    looked = course(tmp_path / "looked", shm_dir, action, settings)
    assert not repeated + alone
    monkeypatch.setattr("tierckpt.checkpointer.loop.LOOK_SECONDS", 1000.0)
    same = course(tmp_path / "repeated", shm_dir, action, settings)
    every = settings.get("memory_every_steps", 1)
    assert not (sum(alone) and every == 1)
    if action is not one_asks:  # each boundary looks until its version is on the disk
        assert sum(repeated + alone) > STEPS // 4
        assert sum(alone) or every not in (0, 10), "those without a version are passed at once"
    for one, other in zip(looked, same, strict=True):
        if action is not one_asks:  # how long a commit takes is seen in votes and events
            assert one.votes == other.votes
            assert one.events == other.events
        assert {*one.events} == {*other.events}
        assert (one.state, one.safe) == (other.state, other.safe)
        drifts = action is one_drifts and settings["replicas"] != "off"
        assert ("drifted" in dict(one.events)) == drifts
