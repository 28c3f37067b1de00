"""The agent's thread for orders from sessions: despite any failure, every order is answered, and
the next one is carried out."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.facts import facts_of
from tests.support.peer_shards import rank_of, shard_of
from tierckpt.agent import (
    Flusher,
    FlushFailed,
    FlushOrder,
    ListenSettings,
    PartySettings,
    PersistentSettings,
    Protected,
    ProtectFailed,
    ShardGuard,
    protector,
)
from tierckpt.agent.protector import Protector
from tierckpt.errors import ConfigError
from tierckpt.format import PAGE_BYTES, Manifest, ShardKey, VersionId
from tierckpt.net import Address
from tierckpt.peer import Exchange, RemoteNode, Transport
from tierckpt.storage import LocalStore

PATIENCE_SECONDS = 60.0
NOBODY = ("127.0.0.1", "127.0.0.1"), (9, 9)


def party(shard: int) -> PartySettings:
    return PartySettings(shard, (shard, shard + 1), 2, 1, 1, *NOBODY)


@contextlib.contextmanager
def no_thread(*names: str) -> Iterator[None]:
    """Start no thread with this name, as in a container that allows no more threads."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(names):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        yield


class Orders:
    """A protector, the orders to it, and its answers."""

    def __init__(self, folder: Path, *shards: int) -> None:
        self.folder = folder
        self.held = ShardGuard()
        self.idle = threading.Event()
        self.made = Protector(self.held, self.idle.set)
        self.made.introduce([party(shard) for shard in shards])
        self.said: queue.Queue[Any] = queue.Queue()

    def order(self, version: int) -> Any:
        self.idle.clear()
        self.made.protect(str(self.folder), VersionId(1, version), 9, None, self.said.put)
        return self.said.get(timeout=PATIENCE_SECONDS)

    def check_idle(self, *shards: int) -> None:
        assert self.idle.wait(PATIENCE_SECONDS)
        assert not self.made.busy()
        for version in (1, 2, 3):
            assert not any(ShardKey(VersionId(1, version), s, 9) in self.held for s in shards)


def test_no_thread_for_a_shard_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    orders = Orders(tmp_path, 0, 2)
    orders.made.open(ListenSettings("life", "lo", 0, "localhost"))
    with no_thread("Thread-"):
        said = orders.order(1)
    assert type(said) is ProtectFailed
    assert said.error.count("can't start new thread") == 2
    assert "FileNotFoundError" in orders.order(2).error
    orders.check_idle(0, 2)
    orders.made.close()


def test_whatever_an_order_raises_is_answered_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = Orders(tmp_path, 0)
    with monkeypatch.context() as patch:
        patch.setattr(protector, "_protect_all", lambda order: {}[order.id])
        said = orders.order(1)
        assert (type(said), said.id.version) == (ProtectFailed, 1)
        assert "KeyError" in said.error
    assert "do not know each other" in orders.order(2).error
    orders.check_idle(0)


def test_an_order_is_carried_out_by_the_agents_that_knew_each_other_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new run, which has other shards here, starts while an order waits. The order fails, as its
    peers are gone, and does not count as protected by omission."""
    orders = Orders(tmp_path, 0)
    orders.made.open(ListenSettings("one run", "lo", 0, "localhost"))
    started, resume = threading.Event(), threading.Event()
    carry_out = protector._protect_all

    def held_up(order: Any) -> Any:
        started.set()
        assert resume.wait(PATIENCE_SECONDS)
        return carry_out(order)

    monkeypatch.setattr(protector, "_protect_all", held_up)
    orders.made.protect(str(tmp_path), VersionId(1, 1), 9, None, orders.said.put)
    assert started.wait(PATIENCE_SECONDS)
    orders.made.protect(str(tmp_path), VersionId(1, 2), 9, None, orders.said.put)
    orders.made.open(ListenSettings("another", "lo", 0, "localhost"))
    orders.made.introduce([party(4)])
    resume.set()
    for version in (1, 2):
        said = orders.said.get(timeout=PATIENCE_SECONDS)
        assert (type(said), said.id.version) == (ProtectFailed, version)
        assert f"v{version} shard 0 of 9: FileNotFoundError" in said.error
    orders.check_idle(0, 4)
    orders.made.close()


def answers(address: Address, secret: str) -> bool:
    """True if an agent listens there and answers a node that knows the secret."""
    with contextlib.closing(RemoteNode("node", address, secret.encode())) as node:
        try:
            node.inventory("node")
        except ConnectionError:
            return False
        return True


def test_peers_of_the_previous_run_are_answered_until_a_later_one_starts(
    tmp_path: Path,
) -> None:
    """A run may end before all its nodes have met, or know that they have."""
    orders = Orders(tmp_path)
    lives = ("first", "never met", "third", "fourth")
    places = []
    for number, run_id in enumerate(lives):
        places.append(orders.made.open(ListenSettings(run_id, "lo", 0, "localhost")))
        answered = [each for each in lives if answers(places[-1], each)]
        known = {0: ["first"], 1: ["first", "never met"], 2: ["first", "third"]}
        assert answered == known.get(number, ["third", "fourth"])
        if run_id != "never met":
            orders.made.introduce([])
    assert places == places[:1] * 4, "it is looked for where it was"
    assert not answers(places[0], "")
    with (
        Transport(b"third", "127.0.0.1") as former,
        contextlib.closing(former.connect(places[0])) as link,
    ):
        link.send({"op": "join", "tag": "", "series": "", "to": 0, "version": 1, "generation": 1})
        assert link.receive(PATIENCE_SECONDS)["op"] == "refused", "it is shown, and no more"
        former.drop(link)
    orders.made.close()


def test_an_agent_that_cannot_get_a_new_port_stays_at_the_old_one(tmp_path: Path) -> None:
    orders = Orders(tmp_path)
    place = orders.made.open(ListenSettings("life", "lo", 0, "localhost"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(ConfigError, match="in use"):
            orders.made.open(ListenSettings("another", "lo", taken, "localhost"))
    assert answers(place, "life")
    moved = orders.made.open(ListenSettings("another", "lo", taken, "localhost"))
    assert moved.port == taken
    assert answers(moved, "another")
    assert not answers(place, "life")
    orders.made.close()


def test_a_port_that_was_somebody_elses_for_a_while_is_tried_again(tmp_path: Path) -> None:
    """The port of a dead agent, which all peers know and its successor must take."""
    orders = Orders(tmp_path, 0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="in use"):
            orders.made.open(ListenSettings("life", "lo", port, "localhost"))
        assert "do not know each other" in orders.order(1).error
    assert "FileNotFoundError" in orders.order(2).error, "it is about the shard now"
    assert orders.made.open(ListenSettings("life", "lo", port, "localhost")).port == port
    orders.made.close()
    assert "do not know each other" in orders.order(3).error, "closed is closed"
    orders.check_idle(0)


def test_no_thread_to_flush_with_costs_that_version_and_no_more(tmp_path: Path) -> None:
    idle, said = threading.Event(), queue.Queue[Any]()
    flusher = Flusher(PersistentSettings(path=str(tmp_path / "shared")), ShardGuard(), idle.set)
    order = FlushOrder(str(tmp_path / "local"), (0,), facts_of(VersionId(1, 1)), 4096, "here")
    with no_thread("tierckpt-persistent"), pytest.raises(RuntimeError, match="new thread"):
        flusher.accept(order, said.put)
    assert not flusher.busy()
    assert order.keys[0] not in flusher.held
    flusher.accept(order, said.put)
    assert type(said.get(timeout=PATIENCE_SECONDS)) is FlushFailed, "there is no such shard"
    assert idle.wait(PATIENCE_SECONDS)
    assert not flusher.busy()
    flusher.close()


SHARDS = Manifest.decode(shard_of(0, 2 * PAGE_BYTES, 2)[1]).facts.shards


def two_nodes(folder: Path, versions: Iterable[int]) -> list[Orders]:
    """Partners that know each other, and have their shards on disk."""
    nodes = [Orders(folder / f"node{number}") for number in range(2)]
    places = [node.made.open(ListenSettings("life", "lo", 0, "localhost")) for node in nodes]
    where = tuple(p.host for p in places), tuple(p.port for p in places)
    ranks = rank_of(0), rank_of(1)
    for number, node in enumerate(nodes):
        node.made.introduce([PartySettings(ranks[number], ranks, 2, 1, 1, *where)])
        store = LocalStore(node.folder)
        store.create()
        for version in versions:
            image, manifest = shard_of(number, 2 * PAGE_BYTES, 2, version)
            store.commit(Manifest.decode(manifest).key, image, manifest)
    return nodes


def begin(node: Orders, version: int) -> None:
    node.made.protect(str(node.folder), VersionId(1, version), SHARDS, None, node.said.put)


def test_a_version_that_another_node_left_out_is_no_failure(tmp_path: Path) -> None:
    """Each node takes only the newest waiting version, and nodes may differ in it."""
    nodes = late, ahead = two_nodes(tmp_path, (1, 2))
    begin(ahead, 2)
    begin(late, 1)
    said = late.said.get(timeout=PATIENCE_SECONDS)
    assert (type(said), said.id.version, said.superseded) == (ProtectFailed, 1, True), said
    assert "v1 was left out: v2 is next" in said.error
    begin(late, 2)
    for node in nodes:
        said = node.said.get(timeout=PATIENCE_SECONDS)
        assert (type(said), said.id.version) == (Protected, 2), said
        node.made.close()


@pytest.mark.parametrize("then", ["retired", "made anew"])
def test_no_parity_is_made_of_a_file_that_changed_during_the_read(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention gives its blocks to another version while they are being read."""
    nodes = two_nodes(tmp_path, (1,))
    store, key = LocalStore(nodes[0].folder), ShardKey(VersionId(1, 1), rank_of(0), SHARDS)
    end = Exchange._end
    strike, struck = threading.Lock(), threading.Event()

    def change_and_end(exchange: Exchange) -> None:
        with strike:  # neither looks before it has happened
            if not struck.is_set():
                struck.set()
                store.retire(key)
                if then == "made anew":
                    image, manifest = shard_of(0, 2 * PAGE_BYTES, 2, run_id="another")
                    assert Manifest.decode(manifest).key == key
                    store.commit(key, image, manifest)
        end(exchange)

    monkeypatch.setattr(Exchange, "_end", change_and_end)
    for node in nodes:
        begin(node, 1)
    why = []
    for node in nodes:
        said = node.said.get(timeout=PATIENCE_SECONDS)
        assert (type(said), said.id.version) == (ProtectFailed, 1), said
        why.append(said.error)
        node.made.close()
    assert "was refilled while it was read" in " ".join(why)
    assert [*tmp_path.rglob("*.parity")] == [], "on neither"


def test_a_failed_version_is_not_a_skipped_one(tmp_path: Path) -> None:
    assert not Orders(tmp_path, 0).order(1).superseded
