"""Error barrier: an error that one rank raises, all ranks raise, and one of them shows it in full.

Between two collectives a rank runs alone. If it raises there and leaves, the others wait for it in
the next collective, some of them for ever. So every gathered object carries the error of its rank:
`gather_or_raise` does that for one function, and `ErrorBarrier` for a block of several collectives,
with a gather at its end.

All ranks raise the error, as the launch would not end otherwise, and its text is the same on all
for code that catches it. But if nothing catches it, the tracebacks of 64 ranks are too many: then
all ranks but one show a single line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from tierckpt._text import error_text
from tierckpt.errors import RestoreError, TierckptError

if TYPE_CHECKING:
    import torch

    from tierckpt.group import Group

__all__ = ["ErrorBarrier", "by_rank", "gather_or_raise", "raise_any", "said_by", "same_on_all"]


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


T = TypeVar("T")


def gather_or_raise(
    group: Group | ErrorBarrier,
    work: Callable[[], T],
    error: Callable[[list[int], TierckptError], TierckptError],
) -> list[T]:
    """Return the results of `work` on every rank. Collective.

    If it raises on a rank, all ranks raise `error(ranks, theirs)`, made from the first such rank's
    error and the numbers of the ranks that raised the same. An error of another library counts as a
    TierckptError with its kind and text. A BaseException but no Exception passes at once.
    """
    result: T | None = None
    trouble: TierckptError | None = None
    cause: Exception | None = None
    try:
        result = work()
    except Exception as raised:
        cause = raised
        trouble = raised if _is_ours(raised) else TierckptError(error_text(raised, TierckptError))
    gathered = group.all_gather_object((trouble, result))
    raise_any([theirs for theirs, _ in gathered], error, group.rank, cause)
    return [value for _, value in gathered]


def raise_any(
    troubles: Sequence[T | None],
    error: Callable[[list[int], T], TierckptError],
    rank: int,
    cause: Exception | None = None,
) -> None:
    """Raise `error(ranks, trouble)` if a rank has trouble, from the troubles that all gathered: for
    the first such rank, with the numbers of the ranks that have the same. Equal on all ranks.
    `rank` is this rank, and `cause` the error that it raised itself."""
    for trouble in filter(None, troubles):
        ranks = [r for r, theirs in enumerate(troubles) if str(theirs) == str(trouble)]
        made = error(ranks, trouble)
        if cause is not None and (type(made), str(made)) == (type(cause), str(cause)):
            raise said_by(cause, ranks[0], rank)  # not the same text twice
        raise said_by(made, ranks[0], rank) from cause


def by_rank(troubles: Sequence[str]) -> list[str]:
    """Return a line for each rank that has trouble."""
    return [f"rank {rank}: {why}" for rank, why in enumerate(troubles) if why]


class ErrorBarrier:
    """A group, and a `with` block that all ranks enter and leave alike: all well, or all raise.

    Where some ranks raise and others do not, all raise the same error, which names a rank that did.
    Where all raise, each raises its own error. Errors of the group itself, and a BaseException but
    no Exception (an interrupt), pass at once. Broadcasts carry no errors: a rank must not raise
    where the others broadcast next, as they would wait for it. Collectives inside the block must go
    through this object. Training thread.
    """

    def __init__(
        self, group: Group, error: Callable[[list[int], str], TierckptError] | None = None
    ) -> None:
        """Make the object; no block is entered yet. `error` makes the error of all ranks from the
        ranks that raised the same and its text; None: a RestoreError."""
        self.rank, self.size = group.rank, group.size
        self._group, self._error = group, error or _could_not_continue
        self._over = False
        """No other rank waits for this one any more, or none can be informed."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather as Group does; raises the error of all if another rank has raised since."""
        return [theirs for _, theirs in self._gather("", value)]

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """Broadcast as Group does."""
        over, self._over = self._over, True
        self._group.broadcast(buffer, source)
        self._over = over

    def __enter__(self) -> ErrorBarrier:
        """Enter a block."""
        self._over = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the block; raises the error of all if another rank raised in it."""
        if self._over or not (error is None or isinstance(error, Exception)):
            return
        try:
            gathered = self._gather(error_text(error, TierckptError) if error is not None else "")
        except TierckptError as of_another:
            raise of_another from error
        if error is not None:  # raised on all ranks
            same_on_all(error, [why for why, _ in gathered], self.rank)

    def _gather(self, why: str, value: Any = None) -> list[tuple[str, Any]]:
        """Gather each rank's trouble and value; raises the error of all if some have trouble, but
        not all."""
        over, self._over = self._over, True
        gathered: list[tuple[str, Any]] = self._group.all_gather_object((why, value))
        troubles = [theirs for theirs, _ in gathered]
        if not all(troubles):
            raise_any(troubles, self._error, self.rank)
        self._over = over
        return gathered


def _could_not_continue(ranks: list[int], why: str) -> RestoreError:
    return RestoreError(f"a rank could not continue the restore. rank {ranks[0]}: {why}")


def _is_ours(error: Exception) -> TypeGuard[TierckptError]:
    """Whether every rank can unpickle the error: a plugin's class may not be importable there."""
    return isinstance(error, TierckptError) and type(error).__module__.startswith("tierckpt.")
