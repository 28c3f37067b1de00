"""Errors shown once: of an error that all ranks raise, one rank shows the full traceback.

All ranks raise it, as the launch would not end otherwise, and its text is the same on all for code
that catches it. But if nothing catches it, nobody reads the tracebacks of 64 ranks: then all ranks
but one show a single line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

HEAD_START_SECONDS = 1.0
"""Delay that lets one rank show all: launchers end the others as soon as one has ended."""
LONGEST_LINE = 200
_SPEAKER = "_shown_by_rank"


def said_by(error: E, speaker: int, rank: int) -> E:
    """Mark `error`, which this `rank` will raise: if it is not caught, rank `speaker`, which raises
    one with the same text, shows it. Returns the error. Any thread."""
    if rank != speaker:
        setattr(error, _SPEAKER, speaker)
        if not isinstance(sys.excepthook, _OneLine):
            sys.excepthook = _OneLine(sys.excepthook)
    return error


def same_on_all(error: E, texts: Sequence[str], rank: int) -> E:
    """Mark `error`, given each rank's text in `texts`: of several ranks with the same text, the
    first shows it. Returns the error."""
    return said_by(error, texts.index(texts[rank]), rank)


class _OneLine:
    """A hook that shortens errors shown by another rank; the previous hook shows all others."""

    def __init__(self, before: Hook) -> None:
        self._before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        speaker = getattr(error, _SPEAKER, None)
        if speaker is None:
            self._before(kind, error, trace)
            return
        time.sleep(HEAD_START_SECONDS)
        self._before(kind, _short(error, speaker), None)


def _short(error: BaseException, speaker: int) -> BaseException:
    """Return an error of the same kind to show: the rank to read, and the start of the text."""
    line = str(error).strip().partition("\n")[0]
    if len(line) > LONGEST_LINE:
        line = f"{line[:LONGEST_LINE]}..."
    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    short: BaseException = type(kind.__name__, (Exception,), names)(f"see rank {speaker}: {line}")
    return short


__all__ = ["said_by", "same_on_all"]
