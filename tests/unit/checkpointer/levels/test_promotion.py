"""Actions after a version is complete on all local disks: versions are removed, kept and
flushed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.facts import facts_of
from tierckpt.agent import AgentClient, AgentSettings, FlushOrder, SessionSettings
from tierckpt.checkpointer import Backlog, Promotion, flush_order
from tierckpt.config import load_config
from tierckpt.coordination import Agreement, GroupBallots, JobHistory, JobTopology, PeerSetup
from tierckpt.core import (
    BROKEN,
    DONE,
    INTERVALS,
    LOCAL,
    MEMORY,
    PEER,
    PERSISTENT,
    QUIET_SECONDS,
    VOTE_WIDTH,
    Best,
)
from tierckpt.format import Lineage, VersionId
from tierckpt.group import SingleGroup
from tierckpt.storage import JobDirectory, LocalStore


class Client(AgentClient):
    """A client without an agent that records its orders."""

    def __init__(self) -> None:
        super().__init__(AgentSettings("/nowhere", "job"), SessionSettings("/disk", 0, 2, "2"))
        self.flushes: list[FlushOrder] = []
        self.kept: set[VersionId] = set()
        self.void: list[VersionId] = []
        self.safe: VersionId | None = None
        self.waits = 0
        self.hangs = False

    def flush(self, order: FlushOrder) -> None:
        self.flushes.append(order)

    def outlast(self, quiet_seconds: float, timeout_seconds: float | None = None) -> bool:
        assert (quiet_seconds > QUIET_SECONDS, timeout_seconds) == (bool(self.flushes), None)
        self.waits += 1
        return not self.hangs

    def retire(
        self,
        safe: VersionId | None,
        lineage: Lineage,
        keep: Iterable[VersionId] = (),
        void: Iterable[VersionId] = (),
    ) -> None:
        self.safe, self.kept, self.void = safe, set(keep), list(void)


class Rank:
    """One of two ranks on one node: its votes, and the actions that follow from them."""

    def __init__(self, rank: int, directory: Path, keep_best: int = 0, **settings: Any) -> None:
        given = {"path": str(directory), "persistent_path": "/shared", **settings}
        config = load_config(given, {})
        group = SingleGroup()
        group.rank, group.size = rank, 2
        topology = JobTopology(("host", "host"), ("machine", "machine"), ("host", "host"))
        self.client = Client()
        self.dropped: list[tuple[int, str]] = []
        self.agreement = Agreement(
            group,
            GroupBallots(group, VOTE_WIDTH),
            config,
            lambda *safe: self.promotion.local_safe(*safe),
            lambda: self.promotion.retire(),
        )
        job = JobDirectory.at("/dev/shm", "job")
        lives = JobHistory(config, group, job, LocalStore(directory), "host")
        lives.lineage, lives.name = ((1, 0),), "life"
        self.promotion = Promotion(
            Best(keep_best, lowest=True),
            self.client,
            self.agreement,
            PeerSetup(config, group, topology, self.client, ()),
            lives,
            flush_order(config, group, topology.node(rank), job, "host"),
            Backlog(config, self.client, self.agreement, lambda *what: self.dropped.append(what)),
        )

    def take(self, version: int, metric: float | None = None, flush: bool = True) -> VersionId:
        """Take a version with this number, for all levels."""
        id_ = VersionId(1, version)
        taken = self.agreement.open(id_, INTERVALS)
        if flush:
            taken.flush = facts_of(id_, 2, iteration=10 * version)
        taken.tell(MEMORY, DONE)
        taken.nbytes, taken.metric = 4096 + version, metric
        return id_

    def awaits(self, id_: VersionId) -> bool:
        """True if the version is still to be flushed."""
        version = self.agreement.versions.find(id_)
        return version is not None and version.flush is not None

    def agree(self, id_: VersionId, state: int) -> None:
        """Pass another boundary, before which the votes settled this version on the local level."""
        self.agreement.tell(LOCAL, id_, state)
        self.boundary()

    def boundary(self) -> None:
        self.agreement.launch(VersionId(1, 99))
        self.agreement.read()
        self.promotion.backlog.advance()

    def make_safe(self, *versions: int) -> None:
        """Take these versions and complete them on all local disks, one after the other."""
        for version in versions:
            self.agree(self.take(version), DONE)

    def flushed(self) -> list[int]:
        """The flush orders that the agent received."""
        return [order.id.version for order in self.client.flushes]

    def through(self, version: int) -> None:
        """Let the node's agent report that it has ended a flush."""
        self.agreement.tell(PERSISTENT, VersionId(1, version), DONE)
        self.boundary()


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(0, tmp_path)


def test_a_version_is_flushed_when_it_is_complete_and_not_before(
    rank: Rank, tmp_path: Path
) -> None:
    id_ = rank.take(3, metric=0.5)
    rank.boundary()
    assert rank.client.flushes == []
    assert rank.awaits(id_)
    rank.agree(id_, DONE)
    (order,) = rank.client.flushes
    assert (order.directory, order.here, order.largest_bytes) == (str(tmp_path), (0, 1), 4099)
    assert order.facts == facts_of(id_, 2, iteration=30, metric=0.5)
    assert order.node.startswith("host, /dev/shm/")
    assert rank.promotion.ordered == id_
    assert not rank.awaits(id_)


def test_a_node_receives_each_promotion_once(tmp_path: Path) -> None:
    other = Rank(1, tmp_path)
    id_ = other.take(3)
    other.agree(id_, DONE)
    assert other.client.safe == id_  # each rank's own shards may be removed
    assert other.client.flushes == []
    assert other.promotion.ordered == id_


def test_a_broken_version_is_not_flushed_and_does_not_count(rank: Rank) -> None:
    lost = rank.take(3)
    rank.agree(lost, BROKEN)
    assert (rank.client.safe, rank.client.void) == (None, [lost])
    assert rank.awaits(lost)  # it may be taken again
    newer = rank.take(4)
    rank.agree(newer, DONE)
    assert (rank.client.safe, rank.client.void) == (newer, [lost])
    assert not rank.awaits(lost)
    assert [order.id.version for order in rank.client.flushes] == [4]


def test_a_disk_that_is_full_for_long_leaves_few_versions_in_flight(rank: Rank) -> None:
    """Of broken versions that were to go to the persistent level, the newest one may be committed
    again, at the end."""
    for version in range(3, 40):
        rank.agree(rank.take(version), BROKEN)
    assert [each.id.version for each in rank.agreement.versions.flying] in ([39], [38, 39])
    newer = rank.take(40)
    rank.agree(newer, DONE)
    assert [order.id for order in rank.client.flushes] == [newer]


def test_a_version_safe_after_a_newer_one_broke_is_flushed(rank: Rank) -> None:
    """Ranks were in different iterations when they made the newer one."""
    older, newer = rank.take(10), rank.take(20)
    rank.agreement.break_open(newer)
    rank.agree(older, DONE)
    assert [order.id for order in rank.client.flushes] == [older]


def test_a_broken_version_tried_again_is_not_void(rank: Rank) -> None:
    lost = rank.take(3)
    rank.agree(lost, BROKEN)
    rank.agreement.versions.open(lost, [LOCAL])
    rank.promotion.retire()
    assert rank.client.void == []


def test_a_version_that_peers_can_restore_stays_until_they_can_restore_a_newer_one(
    rank: Rank,
) -> None:
    """Otherwise the loss of a node in between would lose the last version that all nodes had."""
    old, new = ids(1, 2)
    for id_, kept in ((old, {old}), (new, {new})):
        rank.agree(rank.take(id_.version, flush=False), DONE)
        rank.agreement.versions.open(id_, [PEER])
        rank.boundary()
        rank.promotion.retire()
        assert rank.client.kept == {old, id_}, "it is still on its way"
        rank.agreement.tell(PEER, id_, DONE)
        rank.boundary()
        rank.promotion.retire()
        assert rank.client.kept == kept


# --- a slow store --------------------------------------------------------------------------------


def ids(*versions: int) -> set[VersionId]:
    return {VersionId(1, version) for version in versions}


def test_one_is_flushed_and_the_newest_waits(rank: Rank) -> None:
    rank.make_safe(4, 8, 12, 16)
    assert rank.flushed() == [4]
    assert [version for version, _ in rank.dropped] == [8, 12]
    assert "v4 is still being flushed by some node" in rank.dropped[0][1]
    rank.promotion.retire()
    assert rank.client.kept == ids(4, 16), "what is under way or waits stays, what was dropped goes"
    rank.through(4)
    assert rank.flushed() == [4, 16]
    rank.through(16)
    rank.promotion.retire()
    assert rank.client.kept == set()
    rank.make_safe(20)
    assert rank.flushed() == [4, 16, 20]


class Pair:
    """Both ranks of a node; they vote one after the other."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.ranks = Rank(0, directory, **settings), Rank(1, directory, **settings)
        self._votes: list[list[int]] = []
        self._first = 0

    def all_reduce_min(self, values: list[int], own: Sequence[int] = ()) -> Pair:
        self._votes.append(values)
        self._first = (len(self._votes) - 1) // 2 * 2
        return self

    def wait(self) -> list[int]:
        zero, one = self._votes[self._first : self._first + 2]
        return [min(pair) for pair in zip(zero, one, strict=True)]

    def rows(self) -> list[tuple[int, ...]]:
        return []

    def done(self) -> bool:
        return True

    def boundary(self) -> None:
        for rank in self.ranks:
            rank.agreement._ballots = self  # type: ignore[assignment]
            rank.agreement.launch(VersionId(1, 99))
        for rank in self.ranks:
            rank.agreement.read()
            rank.promotion.backlog.advance()

    def make_safe(self, *versions: int) -> None:
        for version in versions:
            for rank in self.ranks:
                rank.agreement.tell(LOCAL, rank.take(version), DONE)
            self.boundary()

    def through(self, version: int) -> None:
        """The agent of the first rank reports the end; the second rank has no agent to ask."""
        self.ranks[0].agreement.tell(PERSISTENT, VersionId(1, version), DONE)
        self.boundary()

    def versions(self) -> set[VersionId]:
        """The versions in progress or waiting; equal on both ranks."""
        zero, one = (rank.promotion.backlog.versions for rank in self.ranks)
        assert zero == one
        return zero


def test_ranks_drop_the_same_whichever_node_is_slow(tmp_path: Path) -> None:
    """One rank gives orders to its agent and waits for the answer; the other has nothing to wait
    for."""
    pair = Pair(tmp_path)
    pair.make_safe(4, 8, 12)
    zero, one = pair.ranks
    assert zero.flushed() == [4], "the other rank is through at once, and waits for this one"
    pair.through(4)
    assert zero.flushed() == [4, 12]
    assert pair.versions() == ids(12)
    assert zero.dropped == one.dropped
    assert len(zero.dropped) == 1


def test_a_version_that_becomes_safe_when_the_last_flush_ends_is_the_waiting_one(
    rank: Rank,
) -> None:
    rank.make_safe(4, 8)
    rank.agreement.tell(PERSISTENT, VersionId(1, 4), DONE)
    rank.make_safe(12)
    assert (rank.flushed(), rank.dropped) == ([4, 8], [])
    rank.through(8)
    assert rank.flushed() == [4, 8, 12]


def test_a_level_that_prefers_to_wait_waits_and_loses_none(tmp_path: Path) -> None:
    rank = Rank(0, tmp_path, when_busy="wait")
    rank.make_safe(4, 8)
    assert (rank.flushed(), rank.client.waits) == ([4], 0)
    rank.make_safe(12, 16)
    assert (rank.flushed(), rank.client.waits, rank.dropped) == ([4, 8, 12], 2, [])


def test_a_level_that_prefers_to_wait_does_not_wait_for_a_store_that_hangs(tmp_path: Path) -> None:
    """Other ranks do not know of it, and order flushes that this rank's agent no longer
    receives."""
    pair = Pair(tmp_path, when_busy="wait")
    zero, one = pair.ranks
    zero.client.hangs = True
    pair.make_safe(4, 8, 12, 16)
    assert zero.flushed() == [4]
    assert [version for version, _ in zero.dropped] == [8, 12]
    assert "its store hangs" in zero.dropped[0][1]
    assert pair.versions() == ids(4, 8, 12, 16)
    zero.client.hangs = False
    pair.through(4)
    while len(pair.versions()) > 1:
        pair.boundary()
    assert zero.flushed() == [4, 16]
    pair.through(16)
    pair.make_safe(20)
    assert (zero.flushed(), one.dropped, pair.versions()) == ([4, 16, 20], [], ids(20))


def test_at_the_end_waiting_versions_are_flushed(rank: Rank) -> None:
    rank.make_safe(4, 8)
    rank.promotion.backlog.flush_last()
    rank.promotion.backlog.flush_last()
    assert rank.flushed() == [4, 8]


def test_another_run_does_not_flush_waiting_versions(rank: Rank) -> None:
    rank.make_safe(4, 8)
    rank.agreement.restart()
    rank.promotion.restart()
    rank.boundary()
    assert (rank.flushed(), rank.promotion.backlog.versions) == ([4], set())
