"""What follows when a version is complete on all local disks: what goes, stays, and is flushed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tierckpt.agent import AgentSettings
from tierckpt.agentclient import AgentClient
from tierckpt.agreement import Agreement
from tierckpt.alike import Roll
from tierckpt.ballots import GroupBallots
from tierckpt.best import Best
from tierckpt.config import load_config
from tierckpt.desk import DeskSettings
from tierckpt.flusher import FlushOrder
from tierckpt.group import SingleGroup
from tierckpt.lives import Lives
from tierckpt.localstore import LocalStore
from tierckpt.naming import Lineage, VersionId
from tierckpt.onward import Onward, flush_order
from tierckpt.peers import Peers
from tierckpt.policy import BROKEN, DONE
from tierckpt.slots import JobDirectory

LEVELS = ("memory", "local", "persistent")


class Client(AgentClient):
    """Has no agent, and remembers what it would tell one."""

    def __init__(self) -> None:
        super().__init__(AgentSettings("/nowhere", "job"), DeskSettings("/disk", 0, 2, 2, 0))
        self.flushes: list[FlushOrder] = []
        self.kept: set[VersionId] = set()
        self.void: list[VersionId] = []
        self.safe: VersionId | None = None

    def flush(self, order: FlushOrder) -> None:
        self.flushes.append(order)

    def retire(
        self,
        safe: VersionId | None,
        lineage: Lineage,
        keep: Iterable[VersionId] = (),
        void: Iterable[VersionId] = (),
    ) -> None:
        self.safe, self.kept, self.void = safe, set(keep), list(void)


class Rank:
    """One of two ranks on one node, as far as its ballots and what follows from them."""

    def __init__(self, rank: int, directory: Path, keep_best: int = 0) -> None:
        config = load_config({"path": str(directory), "persistent_path": "/shared"}, {})
        group = SingleGroup()
        group.rank, group.size = rank, 2
        roll = Roll(("host", "host"), ("machine", "machine"), ("host", "host"))
        self.client = Client()
        self.agreement = Agreement(
            group,
            GroupBallots(group),
            config,
            lambda *safe: self.onward.local_safe(*safe),
            lambda: self.onward.retire(),
        )
        job = JobDirectory.at("/dev/shm", "job")
        lives = Lives(config, group, job, LocalStore(directory), "host")
        lives.lineage, lives.name = ((1, 0),), "life"
        self.onward = Onward(
            Best(keep_best, lowest=True),
            self.client,
            self.agreement,
            Peers(config, group, roll, self.client, ()),
            lives,
            flush_order(config, group, roll.node(rank), job, "host"),
        )

    def take(self, version: int, metric: float | None = None) -> VersionId:
        """A version of that number on its way to all levels."""
        id_ = VersionId(1, version)
        self.agreement.open(id_, LEVELS)
        self.onward.flush_when_safe(id_, 10 * version)
        self.agreement.tell("memory", id_, DONE)
        self.agreement.tell_shard(id_, 4096 + version, metric)
        return id_

    def agree(self, id_: VersionId, state: int) -> None:
        """Another boundary, before which its fate on the local level became known."""
        self.agreement.tell("local", id_, state)
        self.boundary()

    def boundary(self) -> None:
        self.agreement.launch(VersionId(1, 99), slot_free=True, local_free=True)
        self.agreement.read()


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(0, tmp_path)


def test_a_version_is_flushed_when_it_is_complete_and_not_before(
    rank: Rank, tmp_path: Path
) -> None:
    id_ = rank.take(3, metric=0.5)
    rank.boundary()
    assert rank.client.flushes == []
    assert rank.onward.awaits(id_)
    rank.agree(id_, DONE)
    (order,) = rank.client.flushes
    assert (order.directory, order.here, order.shards) == (str(tmp_path), (0, 1), 2)
    assert (order.name.id, order.life, order.lineage) == (id_, "life", ((1, 0),))
    assert (order.iteration, order.largest_bytes, order.metric) == (30, 4099, 0.5)
    assert order.job == "job"
    assert order.node.startswith("host, /dev/shm/")
    assert rank.onward.ordered == id_
    assert not rank.onward.awaits(id_)


def test_a_node_is_told_once(tmp_path: Path) -> None:
    other = Rank(1, tmp_path)
    id_ = other.take(3)
    other.agree(id_, DONE)
    assert other.client.safe == id_  # every rank's own shards may go
    assert other.client.flushes == []
    assert other.onward.ordered == id_


def test_what_broke_is_not_flushed_and_counts_for_nothing(rank: Rank) -> None:
    lost = rank.take(3)
    rank.agree(lost, BROKEN)
    assert (rank.client.safe, rank.client.void) == (None, [lost])
    assert rank.onward.awaits(lost)  # it may be taken again
    newer = rank.take(4)
    rank.agree(newer, DONE)
    assert (rank.client.safe, rank.client.void) == (newer, [lost])
    assert not rank.onward.awaits(lost)
    assert [order.version for order in rank.client.flushes] == [4]


def test_what_broke_and_is_tried_again_is_not_void(rank: Rank) -> None:
    lost = rank.take(3)
    rank.agree(lost, BROKEN)
    rank.agreement.local.open.append(lost)
    rank.onward.retire()
    assert rank.client.void == []


def test_the_best_stays_though_a_newer_one_is_safe(tmp_path: Path) -> None:
    rank = Rank(0, tmp_path, keep_best=1)
    good = rank.take(3, metric=0.1)
    rank.agree(good, DONE)
    rank.agree(rank.take(4, metric=0.2), DONE)
    assert rank.client.kept == {good}
    better = rank.take(5, metric=0.05)
    rank.agree(better, DONE)
    assert rank.client.kept == {better}
