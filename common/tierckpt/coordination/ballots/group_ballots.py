"""Ballots by the reduction of a group, or by a tree of node leaders in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierckpt.group import Group, Pending, SingleGroup

from .vote_exchange import LARGEST, OWN_WIDTH, Cast, RankGoneError, Rows

if TYPE_CHECKING:
    from .leader_tree import LeaderTree

MEETING_SECONDS = 30.0
"""Time for all ranks to come to the boundary where they find that the tree is lost."""


class GroupBallots:
    """Ballots by the group's reduction.

    The integers that ranks give along have a reduction of their own, after the vote's. Ranks' n-th
    reductions match each other, and a group may also match its other collectives by their order,
    so ranks must have launched equally many before any other collective: see `even_out`.
    """

    _END, _OWN = -1, -2
    """Positions in a vote: 1 if its rank is in `even_out`, and -1 if it launched a reduction of
    integers given along."""

    def __init__(self, group: Group, width: int, tree: LeaderTree | None = None) -> None:
        """Own `tree`, which takes the place of the group's reduction for votes."""
        self._group, self._width, self.tree = group, width, tree
        self.problem = ""
        self._last: _Reduced | None = None
        """The vote cast last."""
        self._before: list[int] = []
        """The numbers of the vote before it."""

    def all_reduce_min(self, values: list[int], own: Sequence[int] = ()) -> Cast:
        """Cast as Ballots says. The columns of other ranks have the largest number, so the minimum
        has every rank's own."""
        cast = self._cast([*values, -1 if own else 0, 0])
        if own:
            columns = [LARGEST] * (len(own) * self._group.size)
            columns[len(own) * self._group.rank : len(own) * (self._group.rank + 1)] = own
            cast.give_along(self._group.all_reduce_min(columns), len(own))
        return cast

    def even_out(self) -> None:
        """Cast votes until one at which all ranks are in `even_out`; it is the same for all."""
        at_end = False
        while not at_end:
            cast = self._cast([*[0] * self._width, 0, 1])
            try:
                agreed = cast.vote.wait()
            except RankGoneError:
                if not self.recover():
                    raise
                agreed = cast.vote.wait()
            at_end = agreed[self._END] == 1
            if agreed[self._OWN]:
                self._group.all_reduce_min([LARGEST] * (OWN_WIDTH * self._group.size))

    def recover(self) -> bool:
        """Vote by the group from now on, see Ballots. False without a tree, and if a rank does not
        come: then the group may be unusable.

        All ranks that come wait for a vote of the same turn, or some are one turn ahead. So each
        shows its last two votes, whose minimum is the result of the earlier turn.
        """
        last, tree = self._last, self.tree
        if last is None or tree is None or not self._group.meet(MEETING_SECONDS):
            return False
        turn = tree.turn
        offers = self._group.all_gather_object((turn, last.values, self._before, tree.why_lost()))
        tree.close()
        self.tree = None
        behind = min(theirs for theirs, *_ in offers)
        if turn > behind:
            last.vote = self._group.all_reduce_min(last.values)  # the others cast theirs next
        else:
            votes = [cast if theirs == turn else before for theirs, cast, before, _ in offers]
            last.vote = SingleGroup().all_reduce_min([*map(min, *votes)])  # is complete at once
        why = next(filter(None, (why for *_, why in offers)), "a connection between nodes ended")
        self.problem = (
            f"votes go around all {self._group.size} ranks from now on, which takes longer: the "
            f"tree of the first ranks of the nodes is lost ({why}), and no rank is. The next start "
            "of the job makes a new tree"
        )
        return True

    def passed(self, iterations: int) -> None:
        """Do nothing: other ranks cannot see it."""

    def close(self) -> None:
        """Close the tree, if there is one."""
        if self.tree is not None:
            self.tree.close()

    def _cast(self, values: list[int]) -> _Reduced:
        vote = (self.tree or self._group).all_reduce_min(values)
        self._before = self._last.values if self._last is not None else []
        self._last = _Reduced(vote, values, self._width)
        return self._last


class _Reduced:
    """The vote of GroupBallots."""

    def __init__(self, vote: Pending, values: list[int], width: int) -> None:
        self.vote, self.values, self._width = vote, values, width
        self._own: Pending | None = None
        self._own_width = 0

    def give_along(self, own: Pending, width: int) -> None:
        """Add the reduction of integers that ranks give along, `width` each."""
        self._own, self._own_width = own, width

    def done(self) -> bool:
        return self.vote.done() and (self._own is None or self._own.done())

    def wait(self) -> list[int]:
        return self.vote.wait()[: self._width]

    def rows(self) -> Rows:
        if self._own is None:
            return []
        columns, size = self._own.wait(), self._own_width
        return [tuple(columns[at : at + size]) for at in range(0, len(columns), size)]

    def missing(self) -> list[int]:
        return []  # a reduction does not report the missing ranks

    def passed_over(self) -> bool:
        return False


__all__ = ["GroupBallots"]
