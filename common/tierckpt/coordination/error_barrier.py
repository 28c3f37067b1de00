"""Together: what one rank raises in a stretch of a restart, all ranks raise.

Between two collectives a rank is alone. If it raises there and leaves, the others wait for it in
the next collective, some of them for ever. In a stretch of `ErrorBarrier` every object that is
gathered comes with a word on its rank, and the end of the stretch is a gathering, too: whoever
raises has its word in the place of what the others wait for.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from tierckpt.errors import RestoreError, TierckptError
from tierckpt.group import Group

from .shown_once import said_by, same_on_all


class ErrorBarrier:
    """A group, and `with` it a stretch that all ranks begin, and end alike: all well, or all raise.

    Where some raise and others do not, all raise the same RestoreError, which names a rank that
    did; where all raise, each its own. What the group itself raises, and what is no Exception (an
    interrupt), goes through at once. Broadcasts have no word beside them: a rank that raises where
    others broadcast next leaves them waiting, so that is not to be. Nothing that others wait for
    may go past this object in a stretch. Training thread.
    """

    def __init__(self, group: Group) -> None:
        """A stretch has not begun."""
        self.rank, self.size = group.rank, group.size
        self._group = group
        self._over = False
        """No other rank waits for this one any more, or none can be told."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Group; RestoreError where another rank has raised meanwhile."""
        return self._tell("", value)

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """See Group."""
        over, self._over = self._over, True
        self._group.broadcast(buffer, source)
        self._over = over

    def __enter__(self) -> ErrorBarrier:
        """A stretch begins."""
        self._over = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """It ends; RestoreError where it did not end well on another rank."""
        if self._over or not (error is None or isinstance(error, Exception)):
            return
        texts: list[str] = []
        try:
            self._tell(_in_words(error) if error is not None else "", heard=texts)
        except RestoreError as told:
            raise told from error
        if error is not None:  # on all
            same_on_all(error, texts, self.rank)

    def _tell(self, why: str, value: Any = None, heard: list[str] | None = None) -> list[Any]:
        over, self._over = self._over, True
        told = self._group.all_gather_object((why, value))
        if heard is not None:
            heard += [theirs for theirs, _ in told]
        troubles = [f"rank {rank}: {theirs}" for rank, (theirs, _) in enumerate(told) if theirs]
        if troubles and len(troubles) < self.size:
            error = RestoreError(f"a rank could not go on with the restore. {troubles[0]}")
            first = next(rank for rank, (theirs, _) in enumerate(told) if theirs)
            raise said_by(error, first, self.rank)
        self._over = over
        return [value for _, value in told]


def _in_words(error: Exception) -> str:
    """Never empty; the kind of the error, where it is not one of ours."""
    known = isinstance(error, TierckptError) and str(error)
    return str(error) if known else f"{type(error).__name__}: {error}"


__all__ = ["ErrorBarrier"]
