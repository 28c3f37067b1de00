"""Inventories of many ranks: packed for the exchange, equal ones once."""

from __future__ import annotations

from typing import Any

from tierckpt.coordination import gather_inventories
from tierckpt.core import (
    Found,
    FoundParity,
    Inventory,
    Location,
    Pin,
    Problem,
    pack_inventory,
    unpack_inventory,
)
from tierckpt.format import ParityKey, VersionFacts, VersionId
from tierckpt.testing import run_ranks

RANKS = 4


def facts(version: int) -> VersionFacts:
    """Facts of a version of four ranks."""
    return VersionFacts("job", "run", VersionId(1, version), RANKS, ((1, 0),), version, "steps")


def inventory(node: int, token: str = "", shards: tuple[int, ...] = (0, 1)) -> Inventory:
    """Everything that a node with two ranks may have."""
    host, disk = f"node{node}", Location("local", f"node{node}", "/disk")
    found = [
        Found(facts(v).key(s), Location("memory", host, f"/shm/{s}"), facts(v), 1.5)
        for v in (3, 4)
        for s in shards
    ]
    found.append(Found(facts(4).key(shards[0]), disk, facts(4)))
    key = ParityKey(VersionId(1, 4), shards[0], RANKS)
    return Inventory(
        tuple(found),
        (Problem(disk, "damaged", keys=(key, facts(4).key(1))),),
        (Problem(disk, "unreadable"),),
        7,
        host,
        token,
        (FoundParity(key, disk, facts(4), (0, 2), 1, 1),),
        (Pin(VersionId(1, 4), True),),
        ((VersionId(1, 3), "differs"),),
    )


def test_a_packed_inventory_is_the_same_after_it() -> None:
    whole = inventory(0, token="secret")
    assert unpack_inventory(pack_inventory(whole), "secret") == whole
    (again,) = unpack_inventory(pack_inventory(whole)).parities
    assert type(again.key) is ParityKey
    assert type(unpack_inventory(pack_inventory(whole)).problems[0].keys[0]) is ParityKey


def test_an_inventory_of_many_shards_is_short() -> None:
    packed = pack_inventory(inventory(0, shards=tuple(range(1000))))
    assert len(packed) < 15 * 1000


def test_equal_inventories_are_sent_once_and_shared() -> None:
    sent: list[bytes] = []

    def look(group: Any) -> Any:
        plain, rank = group.all_gather_object, group.rank

        def gather(value: Any) -> list[Any]:
            if isinstance(value, bytes):
                sent.append(value)
            gathered: list[Any] = plain(value)
            return gathered

        group.all_gather_object = gather
        own = inventory(rank // 2, f"token{rank}", (0, 1) if rank < 2 else (2, 3))
        return gather_inventories(group, own, (rank, "mark"))

    for found, marks in run_ranks(RANKS, look):
        assert [i.host for i in found] == ["node0", "node0", "node1", "node1"]
        assert found[0].token == "token0"
        assert found[0] is found[1]
        assert found[2].found is found[3].found
        assert marks == [(rank, "mark") for rank in range(RANKS)]
    assert len([each for each in sent if each]) == 2


def test_ranks_of_a_node_that_found_different_copies_all_send_theirs() -> None:
    def look(group: Any) -> Any:
        shards = ((0, 1), (0,), (0, 1))[group.rank]
        return gather_inventories(group, inventory(0, "", shards), (0, ""))[0]

    for found in run_ranks(3, look):
        assert [len(i.found) for i in found] == [5, 3, 5]
