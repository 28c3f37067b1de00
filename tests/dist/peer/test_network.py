"""Three nodes with their own networks; one is cut off, lost, or slowed in mid-exchange.

Real network namespaces on a bridge. Making them takes root; without it, the tests are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.net_nodes import NodeProcess, narrowed, network_fixture
from tests.support.peer_shards import PATIENCE_SECONDS, Members, nothing_of
from tierckpt.erasure import Code
from tierckpt.testing import Network

CODE = Code(3, 2, 1)
LENGTHS = [6 << 20] * 3
VICTIM = 1
SLOW_BYTES_PER_SECOND = 2.5e6


network = network_fixture(3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "nodes"
    made.mkdir()
    return made


@pytest.fixture
def nodes() -> Iterator[list[NodeProcess]]:
    """Nodes that a test has started."""
    started: list[NodeProcess] = []
    yield started
    for node in started:
        node.kill()


def start(network: Network, folder: Path, number: int, stall: float, rule: str = "") -> NodeProcess:
    plan = {"lengths": LENGTHS, "k": CODE.k, "m": CODE.m}
    plan |= {"join_seconds": PATIENCE_SECONDS, "stall_seconds": stall}
    told = [str(folder), json.dumps(plan), str(number), network.address(number)]
    return NodeProcess(network, number, ["tests.support.peer_processes", *told], rule, folder)


def start_and_stop(
    network: Network, folder: Path, nodes: list[NodeProcess], stall: float
) -> list[Any]:
    """Start all, order v1, and return the addresses once the victim is stopped in the middle."""
    rule = f"stop@peer:op=send,member={VICTIM},version=1,hit=4"
    nodes += [start(network, folder, i, stall, rule) for i in range(3)]
    addresses = [node.heard() for node in nodes]
    for node in nodes:
        node.tell([1, addresses])
    nodes[VICTIM].wait_stopped()
    return addresses


def protect(folder: Path, nodes: list[NodeProcess], version: int, addresses: list[Any]) -> None:
    """All protect a version, and any one shard is rebuilt from it."""
    for node in nodes:
        node.tell([version, addresses])
    assert [node.heard() for node in nodes] == [None] * 3
    check(folder, version)


def check(folder: Path, version: int) -> None:
    members = Members(folder, CODE, LENGTHS)
    assert sorted(members.parities(version)) == [0, 1, 2]
    for lost in range(3):
        assert members.rebuilt({lost}, version) == {lost: members.image(lost, version)}


def name_of(address: list[Any]) -> str:
    return ":".join(map(str, address))


def test_a_node_cut_off_is_named_and_comes_back(
    network: Network, folder: Path, nodes: list[NodeProcess]
) -> None:
    addresses = start_and_stop(network, folder, nodes, stall=1.0)
    network.cut(VICTIM)
    nodes[VICTIM].resume()
    errors = [node.heard() for node in nodes]
    for number in (0, 2):
        assert name_of(addresses[VICTIM]) in errors[number], errors
    assert any(name_of(addresses[number]) in errors[VICTIM] for number in (0, 2)), errors
    assert nothing_of(folder, 1)
    network.mend(VICTIM)
    protect(folder, nodes, 2, addresses)


def test_a_node_that_loses_power_is_named_and_a_spare_takes_its_place(
    network: Network, folder: Path, nodes: list[NodeProcess]
) -> None:
    """No kernel closes its connections, as it would for a killed process."""
    addresses = start_and_stop(network, folder, nodes, stall=1.0)
    network.cut(VICTIM)
    nodes[VICTIM].kill()
    for number in (0, 2):
        error = nodes[number].heard()
        assert name_of(addresses[VICTIM]) in error, error
    assert Members(folder, CODE, LENGTHS).parities(1) == {}
    network.mend(VICTIM)
    nodes[VICTIM] = start(network, folder, VICTIM, stall=PATIENCE_SECONDS)
    spare = nodes[VICTIM].heard()
    assert spare != addresses[VICTIM]
    addresses[VICTIM] = spare
    protect(folder, nodes, 2, addresses)


def test_a_slow_node_makes_it_late_and_nothing_else(
    network: Network, folder: Path, nodes: list[NodeProcess]
) -> None:
    start_and_stop(network, folder, nodes, stall=PATIENCE_SECONDS)
    with narrowed(network, VICTIM, SLOW_BYTES_PER_SECOND):
        nodes[VICTIM].resume()
        assert [node.heard() for node in nodes] == [None] * 3
    check(folder, 1)
