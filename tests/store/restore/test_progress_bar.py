"""A restore shows its bar, and moves it with its progress."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.progress import Terminal, at_once
from tierckpt.restore import Progress
from tierckpt.testing import TinyJob

pytestmark = pytest.mark.usefixtures("inline_agent")

LAST = 3


Reached = dict[str, tuple[int, int]]


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Reached:
    """The progress of each phase, as the bar of a long restore shows it."""
    found: Reached = {}
    show = Progress._show

    def shown(self: Progress) -> None:
        show(self)
        found[self._phase] = self._done, self._total

    monkeypatch.setattr(Progress, "_show", shown)
    at_once(monkeypatch)
    return found


@pytest.fixture
def restored_with(
    path: Path, settings: dict[str, Any], reached: Reached, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """`restored_with(progress)`: the terminal's output during the restore, and the restored
    bytes."""
    monkeypatch.setenv("TERM", "xterm")
    with TinyJob(path, **settings) as job:
        job.run(LAST)

    def restore(progress: bool | None) -> tuple[str, int]:
        terminal = Terminal()
        reached.clear()
        with TinyJob(path, seed=9, **settings) as job, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            restored = job.checkpointer.restore(progress=progress)
        assert int(restored) == LAST
        return terminal.getvalue(), restored.nbytes

    return restore


@pytest.mark.parametrize("asked", [True, None])
def test_a_restore_shows_how_far_it_is(
    asked: bool | None, restored_with: Any, reached: Reached
) -> None:
    text, nbytes = restored_with(asked)
    assert nbytes > 0
    assert reached == {
        f"verifying v{LAST}": (nbytes, 0),
        f"loading v{LAST}": (nbytes, nbytes),
    }
    assert f"verifying v{LAST}" in text
    assert re.search(rf"loading v{LAST} .*{nbytes / 1000:.1f}/{nbytes / 1000:.1f} kB", text), text


def test_a_restore_without_a_bar_shows_none(restored_with: Any, reached: Reached) -> None:
    text, _ = restored_with(False)
    assert text == ""
    assert reached == {}
