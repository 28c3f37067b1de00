"""What one rank raises, all ranks raise, and one of them shows it in full.

Between two collectives a rank is alone. If it raises there and leaves, the others wait for it in
the next collective, some of them for ever. So every gathered object comes with the trouble of its
rank: `gather_or_raise` does that for one piece of work, and `ErrorBarrier` for a stretch of several
collectives, whose end is a gathering, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from tierckpt.errors import RestoreError, TierckptError

from .shown_once import said_by, same_on_all

if TYPE_CHECKING:
    import torch

    from tierckpt.group import Group

T = TypeVar("T")


def gather_or_raise(
    group: Group | ErrorBarrier,
    work: Callable[[], T],
    error: Callable[[list[int], TierckptError], TierckptError],
) -> list[T]:
    """What `work` returns on every rank. Collective.

    Where it raises on any rank, all raise `error(ranks, theirs)`: the first rank's error, and the
    numbers of the ranks that raised the same. An error that is none of ours counts as a
    TierckptError of its kind and text. What is no Exception goes through at once.
    """
    mine: T | None = None
    trouble: TierckptError | None = None
    cause: Exception | None = None
    try:
        mine = work()
    except Exception as raised:
        cause = raised
        trouble = raised if _is_ours(raised) else TierckptError(in_words(raised))
    told = group.all_gather_object((trouble, mine))
    raise_any([theirs for theirs, _ in told], error, group.rank, cause)
    return [value for _, value in told]


def raise_any(
    troubles: Sequence[T | None],
    error: Callable[[list[int], T], TierckptError],
    rank: int,
    cause: Exception | None = None,
) -> None:
    """Raise `error(ranks, trouble)` where a rank has trouble, by what all gathered: of the first
    such rank, with the numbers of the ranks that have the same. Alike on all ranks; `rank` is this
    one, and `cause` what this one raised itself."""
    for trouble in filter(None, troubles):
        ranks = [r for r, theirs in enumerate(troubles) if str(theirs) == str(trouble)]
        made = said_by(error(ranks, trouble), ranks[0], rank)
        if made is cause:
            raise made
        raise made from cause


def by_rank(troubles: Sequence[str]) -> list[str]:
    """A line for each rank that has trouble."""
    return [f"rank {rank}: {why}" for rank, why in enumerate(troubles) if why]


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
        return [theirs for _, theirs in self._gather("", value)]

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
        try:
            told = self._gather(in_words(error) if error is not None else "")
        except RestoreError as of_another:
            raise of_another from error
        if error is not None:  # on all
            same_on_all(error, [why for why, _ in told], self.rank)

    def _gather(self, why: str, value: Any = None) -> list[tuple[str, Any]]:
        """Each rank's trouble, and value; RestoreError where some have trouble, and not all."""
        over, self._over = self._over, True
        told: list[tuple[str, Any]] = self._group.all_gather_object((why, value))
        troubles = [theirs for theirs, _ in told]
        if not all(troubles):
            raise_any(troubles, _could_not_go_on, self.rank)
        self._over = over
        return told


def _could_not_go_on(ranks: list[int], why: str) -> RestoreError:
    return RestoreError(f"a rank could not go on with the restore. rank {ranks[0]}: {why}")


def _is_ours(error: Exception) -> TypeGuard[TierckptError]:
    """Whether every rank can make it from its pickle: a plugin's class may lack what that takes."""
    return isinstance(error, TierckptError) and type(error).__module__.startswith("tierckpt.")


def in_words(error: Exception) -> str:
    """Never empty; the kind of the error, where it is not one of ours."""
    known = isinstance(error, TierckptError) and str(error)
    return str(error) if known else f"{type(error).__name__}: {error}"


__all__ = ["ErrorBarrier", "by_rank", "gather_or_raise", "raise_any"]
