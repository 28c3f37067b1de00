"""The end of iterations: calls of `step()` or forward passes, by the setting.

The number that `restore()` returns counts calls or optimizer steps: one is never taken for the
other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tierckpt.hooks import STEPS_UNTIL_CALL, STEPS_UNTIL_FORWARD

PER_CALL = 40


class Loop:
    """One run of a loop that makes many optimizer steps per call of `step()`, as PPO's does."""

    def __init__(self, optimizers: int = 1, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 4)
        params = list(self.model.parameters())
        self.optimizers = [
            torch.optim.SGD(params[n::optimizers], lr=1e-3) for n in range(optimizers)
        ]
        self.events: list[tierckpt.Event] = []
        self.ckpt = tierckpt.Checkpointer(
            self.model, self.optimizers, on_event=self.events.append, **settings
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model.zero_grad()
            self.model(torch.ones(2, 8)).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()

    def calls(self, count: int) -> None:
        for _ in range(count):
            self.steps(PER_CALL)
            self.ckpt.step()

    def said(self, text: str) -> list[int]:
        """The severity of each event with this text."""
        return [e.severity for e in self.events if text in e.message]

    @property
    def warnings(self) -> list[tuple[int, str]]:
        """Warnings and errors."""
        return [(e.severity, e.message) for e in self.events if e.severity >= logging.WARNING]

    @property
    def sealed(self) -> list[int]:
        return [e.version for e in self.events if e.name == "sealed"]


@pytest.fixture
def settings(shm_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "shm_dir": str(shm_dir),
        "path": tmp_path / "c",
        "local_every_seconds": 0,
        "agent": "inline",
    }


@contextmanager
def killed(**settings: Any) -> Iterator[Loop]:
    """A run that ends with the block as if it were killed, as far as the next run can see."""
    loop = Loop(**settings)
    try:
        yield loop
    finally:
        loop.ckpt.abandon()


# --- explicit ----------------------------------------------------------------------------------


def test_steps_without_a_call_are_an_error_and_no_version(settings: dict[str, Any]) -> None:
    """The error names the remedy; the first call, however late, is the first boundary."""
    with killed(**settings) as loop:
        loop.steps(STEPS_UNTIL_CALL - 1)
        assert loop.warnings == []
        loop.steps(1)
        ((severity, said),) = loop.warnings
        assert severity == logging.ERROR
        assert f"the optimizer made {STEPS_UNTIL_CALL} steps" in said
        assert "no checkpoint is taken: the optimizer made" in said
        assert "Call checkpointer.step() once per iteration, after optimizer.step()" in said
        assert 'If you cannot change the loop, set boundary="forward"' in said
        assert "more than 16 steps in one iteration needs no change" in said
        loop.steps(3 * PER_CALL)
        assert (loop.ckpt.version, loop.ckpt.iteration) == (0, 0)
        steps = STEPS_UNTIL_CALL + 3 * PER_CALL
        loop.ckpt.step()
        assert (loop.ckpt.version, loop.ckpt.iteration) == (steps, 1)
        assert loop.said(f"the first time, after {steps} optimizer steps") == [logging.INFO]
        loop.calls(2)
        loop.ckpt.wait()
        assert loop.sealed == [steps, steps + PER_CALL, steps + 2 * PER_CALL]
        assert len(loop.warnings) == len(loop.said("for the first time")) == 1


def test_an_earlier_call_is_no_reason_for_a_word_later(settings: dict[str, Any]) -> None:
    with killed(**settings) as loop:
        loop.steps(STEPS_UNTIL_CALL - 1)
        loop.ckpt.step()
        loop.steps(10 * PER_CALL)
        loop.ckpt.step()
        assert loop.warnings == []
        assert loop.said("for the first time") == []


def test_steps_of_two_optimizers_are_not_added_up(settings: dict[str, Any]) -> None:
    with killed(**settings, optimizers=2) as loop:
        loop.steps(STEPS_UNTIL_CALL - 1)
        assert loop.warnings == []


def test_save_now_is_no_call_of_step(settings: dict[str, Any]) -> None:
    """A loop that calls nothing else has a version, but its number is not an iteration."""
    with killed(**settings) as loop:
        loop.steps(STEPS_UNTIL_CALL - 1)
        loop.ckpt.save(now=True)
        loop.steps(1)
        assert [severity for severity, _ in loop.warnings] == [logging.ERROR]


def test_a_run_killed_before_its_first_call_changes_no_number(settings: dict[str, Any]) -> None:
    """500 optimizer steps into an epoch are not 500 epochs."""
    with killed(**settings) as loop:
        loop.steps(PER_CALL)
    with killed(**settings) as loop:
        assert loop.ckpt.restore().levels == {}
        loop.calls(2)
        loop.steps(PER_CALL)
    for _ in range(2):
        with killed(**settings) as loop:
            assert int(loop.ckpt.restore()) == 2
            loop.steps(PER_CALL)
            assert len(loop.warnings) == 1
    with killed(**settings) as loop:
        restored = loop.ckpt.restore()
        assert (int(restored), restored.version) == (2, 2 * PER_CALL)


# --- forward -----------------------------------------------------------------------------------


def test_a_call_of_step_does_nothing_where_forward_passes_are_boundaries(
    settings: dict[str, Any],
) -> None:
    """One event reports it, with the required setting. The training continues."""
    with killed(**settings, boundary="forward") as loop:
        loop.steps(3)
        for _ in range(2):
            loop.ckpt.step()
            assert (loop.ckpt.version, loop.ckpt.iteration) == (2, 0)
        ((severity, said),) = loop.warnings
        assert severity == logging.ERROR
        assert "step() of the checkpointer does nothing but take `metric`" in said
        assert 'set boundary="explicit"' in said
        loop.steps(STEPS_UNTIL_FORWARD)
        loop.ckpt.step()
        loop.ckpt.wait()
        assert loop.sealed == list(range(1, STEPS_UNTIL_FORWARD + 3))
        assert len(loop.warnings) == 1
    with killed(**settings, boundary="forward") as loop:
        assert int(loop.ckpt.restore()) == STEPS_UNTIL_FORWARD + 2


def test_a_call_of_step_leaves_its_metric_for_the_next_boundary(settings: dict[str, Any]) -> None:
    with killed(**settings, boundary="forward") as loop:
        loop.steps(1)
        loop.ckpt.step(metric=0.5)
        loop.steps(1)
        loop.ckpt.wait()
        slot = loop.ckpt._pool.find(loop.ckpt._id())
        assert slot is not None
        manifest = slot.manifest()
        assert manifest is not None
        assert (manifest.id.version, manifest.facts.metric) == (1, 0.5)
        with pytest.raises(TypeError, match="metric must be one number"):
            loop.ckpt.step(metric="low")  # type: ignore[arg-type]


def test_a_call_of_step_leaves_the_generators_of_the_optimizers_step(
    settings: dict[str, Any],
) -> None:
    """The next batch is drawn before the boundary, and the next run draws it again."""
    with killed(**settings, boundary="forward") as loop:
        loop.steps(1)
        expected = torch.get_rng_state()
        torch.rand(3)
        loop.ckpt.step()
        loop.steps(1)
    with killed(**settings, boundary="forward") as loop:
        assert loop.ckpt.restore() == 1
        assert torch.equal(torch.get_rng_state(), expected)


def test_a_forward_pass_within_a_step_is_no_boundary(settings: dict[str, Any]) -> None:
    """One optimizer has stepped, and the closure of the other one's step is running."""
    with killed(**settings, optimizers=2, boundary="forward") as loop:
        loop.steps(1)
        one, other = loop.optimizers
        versions = []

        def closure() -> torch.Tensor:
            loss = loop.model(torch.ones(2, 8)).square().mean()
            versions.append(loop.ckpt.version)
            loss.backward()
            return loss

        loop.model(torch.ones(2, 8)).square().mean().backward()
        one.step()
        other.step(closure)
        assert (versions, loop.ckpt.version) == ([1], 1)


def test_a_forward_pass_that_never_comes_is_an_error(settings: dict[str, Any]) -> None:
    """A module that only contains the parts that the loop calls: nothing would ever be saved."""
    torch.manual_seed(0)
    parts = nn.ModuleDict({"one": nn.Linear(8, 4)})
    optimizer = torch.optim.SGD(parts.parameters(), lr=1e-3)
    events: list[tierckpt.Event] = []
    ckpt = tierckpt.Checkpointer(
        parts, optimizer, on_event=events.append, boundary="forward", **settings
    )
    for _ in range(2 * STEPS_UNTIL_FORWARD):
        parts["one"](torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert ckpt.version == 0
    (said,) = [e for e in events if e.severity >= logging.WARNING]
    assert said.severity == logging.ERROR
    assert "was not called in training mode" in said.message
    ckpt.abandon()


# --- the number --------------------------------------------------------------------------------


def test_calls_are_counted_with_explicit_and_steps_with_forward(settings: dict[str, Any]) -> None:
    """Each run resumes in the same mode, without a message."""
    for boundary, path, number, counts in (
        ("explicit", "a", 2, "calls"),
        ("forward", "b", 2 * PER_CALL, "steps"),
    ):
        settings.update(boundary=boundary, path=settings["path"].parent / path)
        with killed(**settings) as loop:
            if boundary == "explicit":
                loop.calls(2)
                loop.steps(1)
            else:
                loop.steps(2 * PER_CALL + 1)
        with killed(**settings) as loop:
            restored = loop.ckpt.restore()
            assert (int(restored), restored.version) == (number, 2 * PER_CALL)
            assert restored.iteration_counts == counts
            assert f"Restored({number} {counts}, version={2 * PER_CALL}" in repr(restored)
            assert loop.warnings == []


def test_a_restart_with_forward_gets_the_calls_and_a_warning(settings: dict[str, Any]) -> None:
    with killed(**settings) as loop:
        loop.calls(2)
        loop.steps(1)
    settings["boundary"] = "forward"
    with killed(**settings) as loop:
        restored = loop.ckpt.restore()
        assert (int(restored), restored.iteration_counts) == (2, "calls")
        ((severity, said),) = loop.warnings
        assert severity == logging.WARNING
        assert f"restore() returns 2: v{2 * PER_CALL} was taken with" in said
        assert 'set boundary="explicit"' in said
        loop.steps(4)
        assert loop.ckpt.version == 2 * PER_CALL + 3
    with killed(**settings) as loop:
        restored = loop.ckpt.restore()
        assert int(restored) == restored.version == 2 * PER_CALL + 3
        assert restored.iteration_counts == "steps"
        assert loop.warnings == []


def test_a_restart_with_explicit_gets_the_steps_and_a_warning(settings: dict[str, Any]) -> None:
    """Calls are counted on from there."""
    with killed(**settings, boundary="forward") as loop:
        loop.steps(PER_CALL)
    with killed(**settings) as loop:
        restored = loop.ckpt.restore()
        assert (int(restored), restored.iteration_counts) == (PER_CALL - 1, "steps")
        ((severity, said),) = loop.warnings
        assert severity == logging.WARNING
        assert f"restore() returns {PER_CALL - 1}: v" in said
        assert 'To keep counting steps, set boundary="forward"' in said
        for _ in range(2):
            loop.steps(2)
            loop.ckpt.step()
        loop.steps(1)
        assert len(loop.warnings) == 1
    with killed(**settings) as loop:
        restored = loop.ckpt.restore()
        assert (int(restored), restored.version) == (PER_CALL + 1, PER_CALL + 3)
        assert restored.iteration_counts == "calls"
        assert loop.warnings == []
