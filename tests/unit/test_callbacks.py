"""The list of users' callbacks: calls all, in order, and never raises."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tierckpt import Callbacks
from tierckpt.callbacks import CallbackList


class Recorder(Callbacks):
    def __init__(self, calls: list[Any], name: str) -> None:
        self.calls = calls
        self.name = name

    def on_step_boundary(self, version: int) -> None:
        self.calls.append((self.name, version))


class Failing(Callbacks):
    def on_step_boundary(self, version: int) -> None:
        raise ZeroDivisionError("the user's")


def test_all_are_called_in_the_order_in_which_they_came() -> None:
    calls: list[Any] = []
    callbacks = CallbackList([Recorder(calls, "a"), Recorder(calls, "b")])
    callbacks.add(Recorder(calls, "c"))
    callbacks.call("on_step_boundary", 7)
    assert calls == [("a", 7), ("b", 7), ("c", 7)]


def test_an_error_of_one_callback_is_logged_and_the_next_is_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[Any] = []
    callbacks = CallbackList([Failing(), Recorder(calls, "b")])
    with caplog.at_level(logging.ERROR, logger="tierckpt"):
        callbacks.call("on_step_boundary", 1)
    assert calls == [("b", 1)]
    (record,) = caplog.records
    assert "on_step_boundary" in record.getMessage()
    assert record.exc_info is not None
    assert "the user's" in str(record.exc_info[1])


def test_an_interrupt_is_no_error_of_the_callbacks() -> None:
    class Interrupted(Callbacks):
        def on_step_boundary(self, version: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CallbackList([Interrupted()]).call("on_step_boundary", 1)


def test_an_empty_list_is_reported() -> None:
    """The hot path asks before it prepares arguments."""
    callbacks = CallbackList()
    assert not callbacks
    callbacks.add(Callbacks())
    assert callbacks


def test_the_list_is_not_the_callers() -> None:
    calls: list[Any] = []
    given = [Recorder(calls, "a")]
    callbacks = CallbackList(given)
    given.clear()
    callbacks.call("on_step_boundary", 1)
    assert calls == [("a", 1)]


def test_one_that_always_fails_is_shown_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    callbacks = CallbackList([Failing(), Failing()])
    with caplog.at_level(logging.ERROR, logger="tierckpt"):
        for version in range(100):
            callbacks.call("on_step_boundary", version)
    assert [bool(r.exc_info) for r in caplog.records] == [True, True, *[False] * 4]
    assert "100 times" in caplog.records[-1].getMessage()
