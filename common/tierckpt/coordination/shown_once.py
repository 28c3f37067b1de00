"""Said once: of an error that all ranks raise, one rank shows all there is to read.

All raise it, or a launch would not end, and its text is the same on all, for whoever catches it.
But where nobody does, a traceback from each of 64 ranks is a text that nobody reads: all but one
show a line then.
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
"""For the rank that shows all: launchers end the others as soon as one of them has ended."""
LONGEST_LINE = 200
_SPEAKER = "_shown_by_rank"


def said_by(error: E, speaker: int, rank: int) -> E:
    """`error`, which this `rank` is about to raise: if nobody catches it, `speaker` shows it, which
    raises one of the same text. Any thread; returns it."""
    if rank != speaker:
        setattr(error, _SPEAKER, speaker)
        if not isinstance(sys.excepthook, _OneLine):
            sys.excepthook = _OneLine(sys.excepthook)
    return error


def same_on_all(error: E, texts: Sequence[str], rank: int) -> E:
    """`error`, of which `texts` has what each rank raises: the first rank of several with the same
    text shows it."""
    return said_by(error, texts.index(texts[rank]), rank)


class _OneLine:
    """Of what another rank shows a line, by the hook that was there; all else goes to that."""

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
    """One of the same kind, to be shown: where to read on, and how the text begins."""
    line = str(error).strip().partition("\n")[0]
    if len(line) > LONGEST_LINE:
        line = f"{line[:LONGEST_LINE]}..."
    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    short: BaseException = type(kind.__name__, (Exception,), names)(f"see rank {speaker}: {line}")
    return short


__all__ = ["said_by", "same_on_all"]
