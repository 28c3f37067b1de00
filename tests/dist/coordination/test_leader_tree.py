"""The tree of node leaders between real processes, some of which are killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.support.star_group import StarGroup, run_star
from tierckpt.coordination.ballots import leader_tree as module
from tierckpt.coordination.ballots.leader_tree import leader_tree
from tierckpt.coordination.ballots.vote_exchange import RankGoneError
from tierckpt.group import Node

WIDTH, TURNS, LAST = 3, 40, 17
SHAPE = (2, 2, 1, 2, 1, 2)
HOSTS = [str(node) for node, ranks in enumerate(SHAPE) for _ in range(ranks)]


def vote(rank: int, turn: int) -> list[int]:
    """Return a rank's vote of a turn."""
    return [rank * turn % 7, -rank - turn, turn]


def least(turn: int) -> list[int]:
    """Return the result of a turn."""
    return [*map(min, *(vote(rank, turn) for rank in range(len(HOSTS))))]


def voting(group: StarGroup, victim: int, after_its_vote: bool) -> tuple[list[list[int]], str]:
    """Return the results and the error of a rank; `victim` kills itself at turn LAST."""
    module.FAN_OUT = 2
    tree = leader_tree(group, Node.of(HOSTS[group.rank], HOSTS), WIDTH)
    assert tree is not None
    found: list[list[int]] = []
    try:
        for turn in range(TURNS):
            if (group.rank, turn, after_its_vote) == (victim, LAST, False):
                os.kill(os.getpid(), signal.SIGKILL)
            cast = tree.all_reduce_min(vote(group.rank, turn))
            if (group.rank, turn) == (victim, LAST):
                os.kill(os.getpid(), signal.SIGKILL)
            found.append(cast.wait())
    except RankGoneError as error:
        return found, str(error)
    group.barrier()
    tree.close()
    return found, ""


@pytest.mark.parametrize("victim", [0, 1, 2, 3, 4, 9])
def test_a_killed_rank_ends_the_turns_of_all_alike(victim: int) -> None:
    """Leaders of every level of the tree, and ranks that lead nothing."""
    ended = run_star(len(HOSTS), voting, victim, False)
    assert ended[victim].signal == signal.SIGKILL
    for rank, each in enumerate(ended):
        if rank != victim:
            found, why = each.value
            assert found == [least(turn) for turn in range(LAST)]
            assert why == f"rank {victim} was gone before it reached this boundary"


@pytest.mark.parametrize("victim", [0, 1, 9])
def test_after_a_vote_of_a_killed_rank_all_that_comes_is_right(victim: int) -> None:
    """Whether the last result still arrives is a matter of time; nobody has another one."""
    ended = run_star(len(HOSTS), voting, victim, True)
    for rank, each in enumerate(ended):
        if rank != victim:
            found, why = each.value
            assert LAST <= len(found) <= LAST + 1
            assert found == [least(turn) for turn in range(len(found))]
            assert why.endswith("was gone before it reached this boundary")


def test_all_turns_without_a_fault() -> None:
    ended = run_star(len(HOSTS), voting, -1, False)
    expected: list[Any] = [least(turn) for turn in range(TURNS)]
    assert [each.value for each in ended] == [(expected, "")] * len(HOSTS)
