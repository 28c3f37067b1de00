"""Spares by node, and the place that one takes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tierckpt.run import Connection, Spares, place_of, slot_of, take_place


@pytest.fixture
def connections() -> Iterator[list[Connection]]:
    made = [Connection(socket.socket()) for _ in range(3)]
    yield made
    for each in made:
        each.close()


def test_only_a_node_with_enough_spares_is_taken(connections: list[Connection]) -> None:
    spares, (one, two, three) = Spares(), connections
    for node, each in (("c", one), ("d", two), ("d", three)):
        spares.add(node, each)
    assert spares.take(2) == ("d", [two, three])
    assert spares.take(2) is None
    assert spares.take(1) == ("c", [one])
    assert spares.all() == []


def test_a_spare_that_has_gone_is_not_taken(connections: list[Connection]) -> None:
    spares, gone = Spares(), connections[0]
    spares.add("c", gone)
    spares.discard(gone)
    assert spares.take(1) is None


def test_a_spare_takes_the_place_and_keeps_what_is_its_nodes() -> None:
    lost = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "HOME": "/b"}
    spare = {"RANK": "0", "WORLD_SIZE": "1", "GROUP_RANK": "0", "HOME": "/c", "TIERCKPT_NODE": "c"}
    take_place(spare, slot_of(lost))
    place = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}
    assert spare == {**place, "HOME": "/c", "TIERCKPT_NODE": "c"}
    assert (place_of(spare).rank, place_of(spare).size) == (3, 8)
