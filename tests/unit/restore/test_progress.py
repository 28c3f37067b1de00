"""The progress bar of a restore."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr

import pytest

from tests.support.progress import Terminal
from tierckpt.restore import Progress


@pytest.mark.parametrize(
    ("rank", "asked", "there", "shown"),
    [
        (0, None, True, True),
        (0, None, False, False),
        (0, True, False, True),
        (0, False, True, False),
        (1, True, True, False),
        (1, None, True, False),
    ],
)
def test_progress_is_shown_by_rank_0_on_a_terminal_or_on_request(
    rank: int, asked: bool | None, there: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal() if there else io.StringIO())
    assert Progress.wanted(rank, asked) == shown


def shown_by(progress: Progress) -> str:
    """The terminal's output during a restore."""
    terminal = Terminal()
    with redirect_stderr(terminal):
        progress.start_phase("verifying v7")
        progress.advance(1000)
        progress.start_phase("loading v7", 2000)
        progress.advance(2000)
        progress.close()
        progress.advance(1)
    return terminal.getvalue()


@pytest.mark.parametrize("shown", [True, False])
def test_a_short_restore_shows_nothing(shown: bool) -> None:
    assert shown_by(Progress(shown, patience_seconds=1e6 if shown else 0.0)) == ""


class Gone(Terminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "the terminal is gone")


def test_a_closed_terminal_takes_the_bar_along_and_not_the_restore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error here would be raised on this rank alone, and the others would wait for it."""
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress(True, patience_seconds=0.0)
    with redirect_stderr(Gone()):
        progress.start_phase("verifying v7")
        progress.advance(1000)
        progress.close()


def test_without_standard_error_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        assert not Progress.wanted(0, None)
