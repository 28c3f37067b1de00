"""Votes by a tree of node leaders give the group's minimum, with ranks that are late or gone."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from tests.support import limits
from tierckpt.coordination import OWN_WIDTH, GroupBallots, RankGoneError, ballots_for
from tierckpt.coordination import leader_tree as module
from tierckpt.coordination.leader_tree import LeaderTree, leader_tree
from tierckpt.group import Node
from tierckpt.testing import ThreadGroup, run_ranks

T = TypeVar("T")
WIDTH = 4


def nodes_of(shape: Sequence[int]) -> list[str]:
    """Return every rank's node, for nodes of so many ranks."""
    return [str(node) for node, ranks in enumerate(shape) for _ in range(ranks)]


def in_tree(shape: Sequence[int], program: Callable[[ThreadGroup, LeaderTree], T]) -> list[T]:
    """Return the result of `program` on each rank; all close when all are done."""
    hosts = nodes_of(shape)

    def whole(group: ThreadGroup) -> T:
        tree = leader_tree(group, Node.of(hosts[group.rank], hosts), WIDTH)
        assert tree is not None
        found = program(group, tree)
        group.barrier()
        tree.close()
        return found

    return run_ranks(len(hosts), whole)


def votes_at(turn: int, ranks: int) -> list[list[int]]:
    """Return all ranks' votes of a turn."""
    draw = random.Random(turn)
    return [[draw.randrange(-(1 << 62), 1 << 62) for _ in range(WIDTH)] for _ in range(ranks)]


def minimum(votes: list[list[int]]) -> list[int]:
    """Return the least number of each column."""
    return [*map(min, *votes)] if votes[1:] else votes[0]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two children a node: a tree of some levels with few nodes."""
    monkeypatch.setattr(module, "FAN_OUT", 2)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 1, 2), (1,) * 9, (2,) * 7])
def test_the_minimum_of_every_turn(shape: tuple[int, ...]) -> None:
    turns = 3 * limits.BALLOT_TURNS.value

    def program(group: ThreadGroup, tree: LeaderTree) -> list[list[int]]:
        found = []
        for turn in range(turns):
            if (group.rank + turn) % 5 == 0:
                time.sleep(0.002)
            found.append(tree.all_reduce_min(votes_at(turn, group.size)[group.rank]).wait())
        return found

    expected = [minimum(votes_at(turn, sum(shape))) for turn in range(turns)]
    for found in in_tree(shape, program):
        assert found == expected


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("late", [0, 1, 5])
def test_nothing_is_known_before_the_last_rank_has_voted(late: int) -> None:
    """The late one is the root, another rank of its node, or a rank far from it."""

    def program(group: ThreadGroup, tree: LeaderTree) -> tuple[bool, list[int]]:
        mine = [group.rank + 1] * WIDTH
        pending = None if group.rank == late else tree.all_reduce_min(mine)
        group.barrier()
        early = pending is not None and pending.done()
        group.barrier()
        pending = pending or tree.all_reduce_min(mine)
        return early, pending.wait()

    assert in_tree((2, 2, 1, 1, 2), program) == [(False, [1] * WIDTH)] * 8


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("gone", range(7))
def test_a_lost_rank_delays_no_other_and_results_before_it_stay(gone: int) -> None:
    """Leaders of every level, and ranks that lead nothing."""

    def program(group: ThreadGroup, tree: LeaderTree) -> tuple[list[int], str]:
        first = tree.all_reduce_min([group.rank] * WIDTH)
        if group.rank == gone:
            tree.close()
            return [], ""
        second = tree.all_reduce_min([7] * WIDTH)
        with pytest.raises(RankGoneError) as error:
            second.wait()
        assert second.done()
        return first.wait(), str(error.value)

    for rank, (first, why) in enumerate(in_tree((2, 1, 1, 2, 1), program)):
        if rank != gone:
            assert first == [0] * WIDTH
            assert why == f"rank {gone} was gone before it reached this boundary"


def test_a_vote_of_a_rank_interrupted_before_it_woke_the_leader_counts() -> None:
    def program(group: ThreadGroup, tree: LeaderTree) -> list[int]:
        if group.rank == 1:
            group.barrier()
            tree._node.all_reduce_min([-1] * WIDTH)
            return []
        pending = tree.all_reduce_min([group.rank] * WIDTH)
        assert not pending.done(), "it looks once, and finds a vote missing"
        group.barrier()
        return pending.wait()

    assert in_tree((2, 1), program) == [[-1] * WIDTH, [], [-1] * WIDTH]


def test_other_threads_may_wait_too() -> None:
    def program(group: ThreadGroup, tree: LeaderTree) -> list[list[int]]:
        found: list[list[int]] = []
        pending = tree.all_reduce_min([group.rank] * WIDTH)
        threads = [threading.Thread(target=lambda: found.append(pending.wait())) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    assert in_tree((2, 2), program) == [[[0] * WIDTH] * 3] * 4


def test_silent_connections_are_probed() -> None:
    """An evaluation has no votes for long; firewalls forget silent connections."""

    def program(group: ThreadGroup, tree: LeaderTree) -> list[tuple[int, int]]:
        assert tree.leader is not None
        ends = [link.end for link in tree.leader.links]
        alive = [end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for end in ends]
        idle = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) for end in ends]
        return [*zip(alive, idle, strict=True)]

    assert in_tree((1, 1), program) == [[(1, 60)]] * 2


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("fault", ["listen", "connect", "page"])
def test_where_a_leader_cannot_be_reached_all_vote_by_the_group(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = nodes_of((2, 2))
    plain = getattr(
        module, name := {"listen": "_listen", "connect": "_connect"}.get(fault, "_join")
    )
    failed = threading.Event()

    def broken(*args: Any) -> Any:
        if not failed.is_set():
            failed.set()
            return (None, None) if fault == "listen" else None
        return plain(*args)

    monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr(module, "MEETING_SECONDS", 0.5)
    before = _descriptors()

    def whole(group: ThreadGroup) -> bool:
        return leader_tree(group, Node.of(hosts[group.rank], hosts), WIDTH) is None

    assert run_ranks(4, whole) == [True] * 4
    assert failed.is_set()
    assert _descriptors() == before


def test_a_ring_that_cannot_have_a_tree_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.TREE_RANKS.set(monkeypatch, 2)
    monkeypatch.setattr(module, "_listen", lambda *_: (None, None))

    def whole(group: Any) -> str:
        group.is_ring = True
        return ballots_for(group, Node.of(str(group.rank), ["0", "1"]), WIDTH).problem

    (said, same) = run_ranks(2, whole)
    assert said == same
    assert "set peer_interface" in said


def test_a_ring_of_many_ranks_on_several_nodes_votes_by_a_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits.TREE_RANKS.set(monkeypatch, 4)
    hosts = nodes_of((2, 2))

    def whole(group: Any) -> tuple[bool, bool, list[int], list[tuple[int, ...]]]:
        node = Node.of(hosts[group.rank], hosts)
        plain = ballots_for(group, node, WIDTH)
        group.is_ring = True
        box = ballots_for(group, node, WIDTH)
        assert isinstance(plain, GroupBallots)
        assert isinstance(box, GroupBallots)
        for _ in range(group.rank):  # as a rank with an interrupted iteration
            box.all_reduce_min([0] * WIDTH)
        box.even_out()
        cast = box.all_reduce_min([group.rank] * WIDTH, [group.rank] * OWN_WIDTH)
        found = cast.wait(), cast.rows()
        group.barrier()
        box.close()
        return plain.tree is None, box.tree is not None, *found

    for no_tree, tree, least, rows in run_ranks(4, whole):
        assert no_tree
        assert tree
        assert least == [0] * WIDTH
        assert rows == [(rank,) * OWN_WIDTH for rank in range(4)]


# --- a lost tree, and all ranks are there -------------------------------------------------------


def cut(tree: LeaderTree) -> None:
    """End a connection of a leader."""
    assert tree.leader is not None
    tree.leader.links[-1].end.shutdown(socket.SHUT_RDWR)
    while tree.leader._broken_from == module._NEVER:
        time.sleep(0.001)


def fail(tree: LeaderTree) -> None:
    """Let the thread of a leader fail at the next vote."""

    def failing() -> None:
        raise MemoryError("no memory for votes")

    assert tree.leader is not None
    tree.leader._send_up = failing  # type: ignore[method-assign]


def by_ballots(
    shape: Sequence[int], program: Callable[[ThreadGroup, GroupBallots, LeaderTree], T]
) -> list[T]:
    """Return the result of `program` on each rank, which votes by a tree."""
    hosts = nodes_of(shape)

    def whole(group: ThreadGroup) -> T:
        tree = leader_tree(group, Node.of(hosts[group.rank], hosts), WIDTH + 2)
        assert tree is not None
        box = GroupBallots(group, WIDTH, tree)
        found = program(group, box, tree)
        group.barrier()
        box.close()
        return found

    return run_ranks(len(hosts), whole)


def vote(box: GroupBallots, values: list[int]) -> list[int]:
    """Vote as `Agreement` does."""
    cast = box.all_reduce_min(values)
    try:
        return cast.wait()
    except RankGoneError:
        assert box.recover()
        return cast.wait()


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("lose", [cut, fail])
@pytest.mark.parametrize("leader", [0, 2, 5])
def test_all_vote_by_the_group_once_the_tree_is_lost(
    lose: Callable[[LeaderTree], None], leader: int
) -> None:
    """The leader is the root, or in the middle, or without nodes below it."""
    shape = (2, 2, 1, 1, 2)

    def program(
        group: ThreadGroup, box: GroupBallots, tree: LeaderTree
    ) -> tuple[list[list[int]], str]:
        found = []
        for turn in range(6):
            if turn == 3:
                group.barrier()
                if group.rank == leader:
                    lose(tree)
            found.append(vote(box, votes_at(turn, group.size)[group.rank]))
        assert box.tree is None
        return found, box.problem

    expected = [minimum(votes_at(turn, sum(shape))) for turn in range(6)]
    before = _descriptors()
    said = set()
    for found, why in by_ballots(shape, program):
        assert found == expected
        said.add(why)
    (text,) = said
    reason = "a connection between nodes ended" if lose is cut else "MemoryError: no memory"
    assert reason in text
    assert _descriptors() == before


def test_ranks_that_lack_a_result_get_it_from_those_that_have_it() -> None:
    """The connection ends after the votes and before the result: ranks of the root's node are a
    turn ahead where no gradients hold them back."""

    def program(
        group: ThreadGroup, box: GroupBallots, tree: LeaderTree
    ) -> tuple[list[list[int]], int]:
        found = [vote(box, votes_at(0, group.size)[group.rank])]
        group.barrier()
        if tree.leader is not None and group.rank == 0:
            tree.leader._send = lambda link, *_: link.no_more()  # type: ignore[method-assign]
        group.barrier()
        found += [vote(box, votes_at(turn, group.size)[group.rank]) for turn in range(1, 5)]
        return found, tree.turn

    expected = [minimum(votes_at(turn, 3)) for turn in range(5)]
    ended = by_ballots((2, 1), program)
    assert [found for found, _ in ended] == [expected] * 3
    assert [turns for _, turns in ended] == [3, 3, 2], "turns that went by the tree"


@pytest.mark.parametrize("lose", [cut, fail])
def test_numbers_of_votes_are_made_equal_without_the_tree(
    lose: Callable[[LeaderTree], None],
) -> None:
    def program(group: ThreadGroup, box: GroupBallots, tree: LeaderTree) -> list[int]:
        vote(box, [group.rank] * WIDTH)
        if group.rank == 0:
            lose(tree)
        group.barrier()
        if group.rank:  # an iteration of rank 0 was cut short
            box.all_reduce_min([group.rank] * WIDTH)
        box.even_out()
        assert box.tree is None
        return vote(box, [7 + group.rank] * WIDTH)

    assert by_ballots((2, 2), program) == [[7] * WIDTH] * 4


def test_a_lost_rank_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.BALLOT_MEETING.set(monkeypatch, 0.2)
    hosts = nodes_of((1, 1, 1))

    def whole(group: ThreadGroup) -> tuple[bool, bool] | None:
        tree = leader_tree(group, Node.of(hosts[group.rank], hosts), WIDTH + 2)
        box = GroupBallots(group, WIDTH, tree)
        if group.rank == 2:
            box.close()
            return None
        with pytest.raises(RankGoneError):
            box.all_reduce_min([0] * WIDTH).wait()
        recovered = box.recover()
        kept = box.tree is not None
        box.close()
        return recovered, kept

    assert run_ranks(3, whole) == [(False, True), (False, True), None]


@pytest.mark.parametrize("leader", [0, 2])
def test_a_leader_without_a_thread_leaves_all_to_vote_by_the_group(
    leader: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = nodes_of((2, 2))
    plain = module._Leader

    def started(tree: LeaderTree, *ends: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if tree.leader_rank == leader:
                patch.setattr(module.threading, "Thread", no_thread)
            return plain(tree, *ends)

    class no_thread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "_Leader", started)
    before = _descriptors()

    def whole(group: ThreadGroup) -> bool:
        return leader_tree(group, Node.of(hosts[group.rank], hosts), WIDTH) is None

    assert run_ranks(4, whole) == [True] * 4
    assert _descriptors() == before
