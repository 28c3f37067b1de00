"""Terminals and bars for tests of progress."""

from __future__ import annotations

import io
from typing import Any

import pytest

from tierckpt.restore import Progress


class Terminal(io.StringIO):
    """What would be on a terminal."""

    def isatty(self) -> bool:
        return True


def at_once(patch: pytest.MonkeyPatch) -> None:
    """Bars appear at once."""
    plain = Progress.__init__

    def impatient(self: Progress, shown: bool, **_: Any) -> None:
        plain(self, shown, patience_seconds=0.0)

    patch.setattr(Progress, "__init__", impatient)
