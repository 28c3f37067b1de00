"""What `restore()` returns, where a loop makes many steps per call of `step()`, or never calls it.

Calls and steps are never mixed without a word.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tierckpt.hooks.iterations import AUTOMATIC_AFTER_STEPS as GUESSED_AFTER
from tierckpt.hooks.iterations import CALLLESS_STEPS

PER_CALL = 40


class Loop:
    """One life of a loop that makes many optimizer steps per call of `step()`, as PPO's does."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.events: list[tierckpt.Event] = []
        self.ckpt = tierckpt.Checkpointer(
            self.model, self.optimizer, on_event=self.events.append, **settings
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 8)).square().mean().backward()
            self.optimizer.step()

    def calls(self, count: int) -> None:
        for _ in range(count):
            self.steps(PER_CALL)
            self.ckpt.step()

    def said(self, text: str) -> list[int]:
        """How loudly, each time."""
        return [e.severity for e in self.events if text in e.message]

    def repeated_errors(self) -> list[str]:
        return [e.message for e in self.events if e.severity >= logging.WARNING]


@pytest.fixture
def settings(shm_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {"shm_dir": str(shm_dir), "path": tmp_path / "c", "local_every_seconds": 0}


@contextmanager
def killed(**settings: Any) -> Iterator[Loop]:
    """A life that is over when the block is, as far as the next one can see."""
    loop = Loop(**settings)
    try:
        yield loop
    finally:
        loop.ckpt.abandon()


@pytest.mark.parametrize("boundary", ["auto", "explicit"])
def test_a_life_killed_before_its_first_call_leaves_the_calls_of_the_life_before(
    boundary: str, settings: dict[str, Any]
) -> None:
    settings["boundary"] = boundary
    with killed(
        **settings,
    ) as loop:
        for _ in range(3):
            loop.steps(GUESSED_AFTER - 1)
            loop.ckpt.step()
        loop.steps(GUESSED_AFTER - 1)
    for _ in range(2):
        with killed(**settings) as loop:
            restored = loop.ckpt.restore()
            assert (int(restored), restored.version) == (3, 3 * (GUESSED_AFTER - 1))
            assert (restored.calls, restored.guessed) == (3, False)
            loop.steps(PER_CALL)
            assert loop.repeated_errors() == []
    with killed(**settings) as loop:
        loop.ckpt.restore()
        loop.calls(1)
        loop.steps(1)
    with killed(**settings) as loop:
        assert int(loop.ckpt.restore()) == 4


def test_a_first_life_killed_before_its_first_call_says_what_restore_will_return(
    settings: dict[str, Any],
) -> None:
    """Nobody can know yet that calls will come; but the number is never taken for one of calls."""
    with killed(**settings) as loop:
        loop.steps(PER_CALL)
        (said,) = loop.repeated_errors()
    assert 'boundary="explicit"' in said
    assert "restore() will return the number of optimizer steps" in said
    with killed(**settings) as loop:
        restored = loop.ckpt.restore()
        assert int(restored) == restored.version == PER_CALL - 1
        assert (restored.calls, restored.guessed) == (0, True)
        (said,) = loop.repeated_errors()
    assert 'start it again with boundary="explicit", and restore() returns 0' in said
    with killed(**settings, boundary="explicit") as loop:
        restored = loop.ckpt.restore()
        assert (int(restored), restored.version, restored.guessed) == (0, PER_CALL - 1, True)
        assert loop.said("maybe in the middle of an iteration") == [logging.WARNING]
        loop.calls(2)
        loop.steps(1)
        assert len(loop.repeated_errors()) == 1
    with killed(**settings) as loop:
        restored = loop.ckpt.restore()
        assert (int(restored), restored.guessed) == (2, False)
        assert loop.repeated_errors() == []


def test_a_call_after_guessed_boundaries_counts_calls_and_says_so(
    settings: dict[str, Any],
) -> None:
    with killed(**settings) as loop:
        loop.calls(1)
        loop.calls(1)
        loop.steps(1)
        (_, said) = loop.repeated_errors()
    assert f"versions up to v{PER_CALL - 1} tell restore() optimizer steps" in said
    assert "later ones calls of step(), 1 with this one." in said
    with killed(**settings) as loop:
        restored = loop.ckpt.restore()
        assert (int(restored), restored.version, restored.guessed) == (2, 2 * PER_CALL, False)
        assert loop.repeated_errors() == []


def test_calls_go_on_from_the_number_that_the_loop_was_told(settings: dict[str, Any]) -> None:
    with killed(**settings) as loop:
        loop.steps(PER_CALL)
    with killed(**settings) as loop:
        told = int(loop.ckpt.restore())
        loop.calls(2)
        loop.steps(1)
        counted_on = loop.said(f"counted on from the {told} that restore() returned")
        assert counted_on == [logging.WARNING]
    with killed(**settings) as loop:
        assert int(loop.ckpt.restore()) == told + 2
        assert loop.repeated_errors() == []


def test_a_loop_that_never_calls_is_told_its_steps_and_complains_of_nothing_where_that_is_said(
    settings: dict[str, Any],
) -> None:
    settings["boundary"] = "forward"
    with killed(**settings) as loop:
        loop.steps(PER_CALL)
    with killed(**settings) as loop:
        restored = loop.ckpt.restore()
        assert (int(restored), restored.guessed) == (PER_CALL - 1, True)
        loop.steps(2)
        assert loop.repeated_errors() == []
    with killed(**settings) as loop:
        assert int(loop.ckpt.restore()) == PER_CALL


def test_asking_for_the_forward_pass_wins_over_the_calls_of_the_life_before(
    settings: dict[str, Any],
) -> None:
    with killed(**settings, boundary="explicit") as loop:
        loop.calls(2)
        loop.steps(1)
    with killed(**settings, boundary="forward") as loop:
        assert int(loop.ckpt.restore()) == 2
        (said,) = loop.repeated_errors()
        assert said.startswith("restore() returns 2, the calls of step()")
        loop.steps(4)
    with killed(**settings, boundary="forward") as loop:
        restored = loop.ckpt.restore()
        assert int(restored) == restored.version == 2 * PER_CALL + 3
        assert restored.calls == 2


@pytest.mark.parametrize("per_call", [1, PER_CALL])
def test_versions_that_do_not_tell_count_calls_where_they_are_no_steps(
    per_call: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an older writer: where both numbers are one, a loop that never calls is found out."""
    head = tierckpt.Checkpointer._head
    settings["boundary"] = "explicit"
    with monkeypatch.context() as patch:
        patch.setattr(
            tierckpt.Checkpointer, "_head", lambda self: dataclasses.replace(head(self), calls=None)
        )
        with killed(**settings) as loop:
            for _ in range(3):
                loop.steps(per_call)
                loop.ckpt.step()
            loop.steps(1)
    settings["boundary"] = "auto"
    with killed(**settings) as loop:
        restored = loop.ckpt.restore()
        assert (int(restored), restored.calls, restored.guessed) == (3, None, False)
        loop.steps(GUESSED_AFTER + 2)
        guessed = loop.said("step() was not called in the first") == [logging.WARNING]
        assert guessed == (per_call == 1)


def test_a_forward_pass_that_never_comes_is_told_of(settings: dict[str, Any]) -> None:
    """A module that only holds the parts that the loop calls: nothing would ever be saved."""
    torch.manual_seed(0)
    parts = nn.ModuleDict({"one": nn.Linear(8, 4)})
    optimizer = torch.optim.SGD(parts.parameters(), lr=1e-3)
    events: list[tierckpt.Event] = []
    ckpt = tierckpt.Checkpointer(parts, optimizer, on_event=events.append, **settings)
    for _ in range(3 * GUESSED_AFTER):
        parts["one"](torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert ckpt.version == 0
    (said,) = [e for e in events if e.severity >= logging.WARNING]
    assert said.severity == logging.ERROR
    assert "was not called in training mode" in said.message
    ckpt.abandon()


@pytest.mark.parametrize(
    ("boundary", "severity"), [("auto", logging.WARNING), ("explicit", logging.INFO)]
)
def test_calls_that_come_no_more_are_told_of(
    boundary: str, severity: int, settings: dict[str, Any]
) -> None:
    with killed(**settings, boundary="explicit") as loop:
        loop.calls(2)
        loop.steps(1)
    with killed(**settings, boundary=boundary) as loop:
        loop.ckpt.restore()
        loop.steps(CALLLESS_STEPS + 5)
        text = f"the optimizer made {CALLLESS_STEPS} steps, and step() of the checkpointer was not"
        assert loop.said(text) == [severity]
        assert loop.ckpt.version == 2 * PER_CALL
