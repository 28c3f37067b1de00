"""Consequences of damage for a version: rebuilt, read elsewhere, or lost; and the version that a
restart takes then."""

from __future__ import annotations

from tests.support.facts import found_at, parity_at
from tierckpt.core import Found, FoundParity, Location
from tierckpt.format import ParityKey, ShardKey, VersionId
from tierckpt.offline import Survey, outlook

SHARDS = 3
NEAR, FAR = Location("local", "here", "/disk"), Location("persistent", "", "/shared")


def key(version: int, shard: int) -> ShardKey:
    return ShardKey(VersionId(1, version), shard, SHARDS)


def found(version: int, shard: int, place: Location = NEAR) -> Found:
    return found_at(key(version, shard), place, ((1, 0),), "life")


def parity(version: int, shard: int) -> FoundParity:
    name = ParityKey(VersionId(1, version), shard, SHARDS)
    return parity_at(name, NEAR, ((1, 0),), "life", (0, 1, 2), 2, 1)


def survey(*copies: Found, parities: bool = False) -> Survey:
    made = [parity(7, shard) for shard in range(SHARDS)] if parities else []
    return Survey(found=[*copies], parities=made)


WHOLE = [found(7, shard) for shard in range(SHARDS)]
OLDER = [found(6, shard) for shard in range(SHARDS)]


def test_it_is_rebuilt_or_read_elsewhere() -> None:
    bad = {(key(7, 1), NEAR)}
    assert outlook(survey(*WHOLE, parities=True), [key(7, 1)], bad) == [
        "v7 can still be restored: shard 1 is rebuilt from parity"
    ]
    assert outlook(survey(*WHOLE, found(7, 1, FAR)), [key(7, 1)], bad) == [
        "v7 can still be restored: shard 1 is read from persistent (/shared)"
    ]


def test_it_is_gone() -> None:
    bad = {(key(7, shard), NEAR) for shard in (0, 2)}
    (said,) = outlook(survey(*WHOLE, *OLDER, parities=True), [key(7, 2), key(7, 0)], bad)
    assert said.startswith(
        "v7 cannot be restored from what is here: no usable copy of shards 0, 2 is left, and the "
        "parity here does not rebuild them; a restart takes v6."
    )
    (said,) = outlook(survey(*WHOLE), [key(7, 1)], {(key(7, 1), NEAR)})
    assert "no usable copy of shard 1 is left, and there is no parity to rebuild it" in said
    assert "no other version is complete here" in said


def test_damaged_parity_rebuilds_nothing_and_is_no_lost_shard() -> None:
    gone = {(key(7, 1), NEAR), *((parity(7, shard).key, NEAR) for shard in range(SHARDS))}
    (said,) = outlook(survey(*WHOLE, parities=True), [name for name, _ in gone], gone)
    assert "no usable copy of shard 1 is left" in said
    assert outlook(survey(*WHOLE, parities=True), [parity(7, 1).key], gone) == []
