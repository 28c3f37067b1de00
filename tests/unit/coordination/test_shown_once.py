"""An error that all ranks raise is shown in full once, and has the same text when it is caught."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.optim import SGD

from tierckpt import Checkpointer
from tierckpt.coordination import ErrorBarrier, agree_on_settings, error_barrier
from tierckpt.errors import (
    ConfigError,
    RestoreError,
    StateMismatchError,
    TierckptError,
    UnsupportedStateError,
)
from tierckpt.testing import ThreadGroup, run_ranks


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank waits, and the hook is Python's again afterwards."""
    monkeypatch.setattr(error_barrier, "HEAD_START_SECONDS", 0.0)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def shown(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of a script that does not catch the error."""
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


def caught(program: Any, ranks: int = 3) -> list[BaseException]:
    def catch(group: ThreadGroup) -> BaseException:
        with pytest.raises(TierckptError) as raised:
            program(group)
        return raised.value

    return run_ranks(ranks, catch)


def test_one_rank_shows_all_and_the_others_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def program(group: ThreadGroup) -> None:
        with ErrorBarrier(group):
            raise StateMismatchError("Version v7", ["model/a is another one", "model/b is gone"])

    errors = caught(program)
    assert len({str(error) for error in errors}) == 1, "for whoever catches it"
    first, *others = [shown(error, capsys) for error in errors]
    assert first.startswith("Traceback")
    assert "model/b is gone" in first
    for text in others:
        (line,) = text.splitlines()
        assert line.startswith("tierckpt.errors.StateMismatchError: see rank 0: Version v7 does")


def test_of_different_errors_each_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    def program(group: ThreadGroup) -> None:
        with ErrorBarrier(group):
            raise RestoreError(f"disk of node {group.rank // 2}")

    texts = [shown(error, capsys) for error in caught(program, 4)]
    assert [text.startswith("Traceback") for text in texts] == [True, False, True, False]
    assert "see rank 2: disk of node 1" in texts[3]


def test_where_one_failed_that_one_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    def program(group: ThreadGroup) -> None:
        with ErrorBarrier(group):
            if group.rank == 1:
                raise OSError(5, "the disk fails")

    texts = [shown(error, capsys) for error in caught(program)]
    assert [text.startswith("Traceback") for text in texts] == [False, True, False]
    assert "the disk fails" in texts[1]
    assert "see rank 1: " in texts[2]


def test_settings_that_differ_are_shown_by_the_rank_that_has_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    errors = caught(lambda group: agree_on_settings({"slots": 2 + group.rank}, None, group), 2)
    assert all(isinstance(error, ConfigError) for error in errors)
    texts = [shown(error, capsys) for error in errors]
    assert "slots=3 there" in texts[1]
    assert texts[0].count("\n") == 1


def test_all_other_errors_are_shown_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    error_barrier.said_by(RestoreError("of all"), 0, 1)
    assert shown(ValueError("the script's own"), capsys) == "ValueError: the script's own\n"
    hook = sys.excepthook
    error_barrier.said_by(RestoreError("of all"), 0, 2)
    assert sys.excepthook is hook, "once a process"


@pytest.mark.parametrize("who", [{0, 1, 2}, {1}])
def test_a_rank_with_unsupported_state_leaves_no_other_waiting(
    who: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The others already agree on settings, and raise an error of the same kind that names it."""

    def program(group: ThreadGroup) -> None:
        model: Any = torch.nn.Linear(2, 2)
        optimizer = SGD(model.parameters(), lr=0.1)
        Checkpointer(None if group.rank in who else model, optimizer, group=group)

    errors = caught(program)
    assert all(isinstance(error, UnsupportedStateError) for error in errors)
    texts = [shown(error, capsys) for error in errors]
    assert sum(text.startswith("Traceback") for text in texts) == 1
    for text in map(str, errors):
        assert "the model is a NoneType" in text
        assert text.startswith("rank 1: ") == (who == {1}), "not where all have it"
