"""A restore shows its bar, and moves it with its progress."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.restore.test_progress import Terminal
from tierckpt.checkpointer import checkpointer
from tierckpt.restore import Progress
from tierckpt.testing import TinyJob

LAST = 3


class Impatient(Progress):
    """The bar of a long restore; it records the progress of each phase."""

    reached: dict[str, tuple[int, int]]

    def __init__(self, shown: bool) -> None:
        super().__init__(shown, patience_seconds=0.0)
        Impatient.reached = {}

    def _show(self) -> None:
        super()._show()
        self.reached[self._phase] = self._done, self._total


@pytest.fixture
def restored_with(path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`restored_with(progress)`: the terminal's output during the restore, and the restored
    bytes."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(checkpointer, "Progress", Impatient)
    with TinyJob(path, **settings) as job:
        job.run(LAST)

    def restore(progress: bool | None) -> tuple[str, int]:
        terminal = Terminal()
        with TinyJob(path, seed=9, **settings) as job, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            restored = job.checkpointer.restore(progress=progress)
        assert int(restored) == LAST
        return terminal.getvalue(), restored.nbytes

    return restore


@pytest.mark.parametrize("asked", [True, None])
def test_a_restore_shows_how_far_it_is(asked: bool | None, restored_with: Any) -> None:
    text, nbytes = restored_with(asked)
    assert nbytes > 0
    assert Impatient.reached == {
        f"verifying v{LAST}": (nbytes, 0),
        f"loading v{LAST}": (nbytes, nbytes),
    }
    assert f"verifying v{LAST}" in text
    assert re.search(rf"loading v{LAST} .*{nbytes / 1000:.1f}/{nbytes / 1000:.1f} kB", text), text


def test_a_restore_without_a_bar_shows_none(restored_with: Any) -> None:
    text, _ = restored_with(False)
    assert text == ""
    assert Impatient.reached == {}
