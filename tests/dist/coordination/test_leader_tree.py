"""The tree of node leaders between real processes, some of which are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.star_group import StarGroup, run_star
from tests.support.training import Place, attach, make_job, train
from tierckpt.coordination import GroupBallots, RankGoneError
from tierckpt.coordination import ballots as vote_exchange
from tierckpt.coordination import leader_tree as module
from tierckpt.coordination.leader_tree import leader_tree
from tierckpt.group import Node

WIDTH, TURNS, LAST = 3, 40, 17
PATIENCE_SECONDS = 120.0
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


@pytest.mark.parametrize("victim", [0, 2, 9])
def test_a_killed_rank_ends_the_turns_of_all_alike(victim: int) -> None:
    """Leaders of every level of the tree, and ranks that lead nothing."""
    ended = run_star(len(HOSTS), voting, victim, False)
    assert ended[victim].signal == signal.SIGKILL
    for rank, each in enumerate(ended):
        if rank != victim:
            found, why = each.value
            assert found == [least(turn) for turn in range(LAST)]
            assert why == f"rank {victim} was gone before it reached this boundary"


@pytest.mark.parametrize("victim", [0, 9])
def test_after_a_vote_of_a_killed_rank_all_that_comes_is_right(victim: int) -> None:
    """Whether the last result still arrives is a matter of time; no rank has another one."""
    ended = run_star(len(HOSTS), voting, victim, True)
    for rank, each in enumerate(ended):
        if rank != victim:
            found, why = each.value
            assert LAST <= len(found) <= LAST + 1
            assert found == [least(turn) for turn in range(len(found))]
            assert why.endswith("was gone before it reached this boundary")


def voting_with_a_child(group: StarGroup, victim: int) -> tuple[list[list[int]], str]:
    """As `voting`; `victim` has a forked child, as a DataLoader's worker, which outlives it."""
    module.PATIENCE_SECONDS = PATIENCE_SECONDS
    module.FAN_OUT = 2
    tree = leader_tree(group, Node.of(HOSTS[group.rank], HOSTS), WIDTH)
    assert tree is not None
    child = os.fork() if group.rank == victim else 0
    if group.rank == victim and not child:
        while True:
            signal.pause()
    child = group.all_gather_object(child)[victim]
    try:
        found = [tree.all_reduce_min(vote(group.rank, 0)).wait()]
        if group.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        tree.all_reduce_min(vote(group.rank, 1)).wait()
    except (RankGoneError, TimeoutError) as error:
        return found, str(error)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return found, ""


def test_a_forked_child_of_a_killed_leader_keeps_no_connection() -> None:
    victim = HOSTS.index("2")  # alone on its node, so that only its connections show its end
    for rank, each in enumerate(run_star(len(HOSTS), voting_with_a_child, victim)):
        if rank != victim:
            assert each.value == (
                [least(0)],
                f"rank {victim} was gone before it reached this boundary",
            )


def continuing_without_a_tree(place: Place) -> dict[str, Any]:
    """Train over real gloo; the connection of the two nodes' leaders ends in the middle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vote_exchange, "TREE_RANKS", 2)
        job = make_job()
        attached = attach(job, place, node=f"node{dist.get_rank()}", peer_interface="lo")
    ckpt = attached.ckpt
    train(job, ckpt, range(4))
    ballots, ballot = ckpt._agreement._ballots, ckpt._agreement._ballot
    assert isinstance(ballots, GroupBallots)
    assert ballots.tree is not None
    assert ballots.tree.leader is not None
    assert ballot is not None
    ballot.result()
    dist.barrier()
    if dist.get_rank() == 0:
        ballots.tree.leader.links[0].end.shutdown(socket.SHUT_RDWR)
    train(job, ckpt, range(4, 8))
    ckpt.restore()
    train(job, ckpt, range(8, 10))
    ckpt.close()
    warnings = [e for e in attached.said("the tree of the first ranks") if e.severity == 30]
    return {
        "sealed": attached.versions("sealed", "memory"),
        "warnings": len(warnings),
        "by_tree": ballots.tree is not None,
    }


def test_a_job_continues_when_its_leaders_lose_their_connection(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    told = ranks(2).run(continuing_without_a_tree, Place.under(tmp_path, shm_dir))
    for each in told:  # the version that was being copied may be lost
        assert [v for v in each["sealed"] if v != 5] == [1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert [each["warnings"] for each in told] == [1, 0]
    assert [each["by_tree"] for each in told] == [False, False]
