"""A persistent path alone: the lease, and versions that some nodes have not stored yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.facts import facts_named
from tierckpt.format import VersionFacts, VersionId
from tierckpt.storage.persistent import PersistentStore, ShardSource, VersionName
from tierckpt.watch import look_at

RUN = "5eed"
SHARDS, PER_GROUP = 10, 4


def facts(version: int) -> VersionFacts:
    return facts_named(VersionName(VersionId(1, version), SHARDS, RUN), lineage=((1, 0),))


def opened(place: Path, shared_writes: bool = False) -> PersistentStore:
    return PersistentStore(str(place), PER_GROUP, shared_writes=shared_writes)


def flush(store: PersistentStore, version: int, *shards: int) -> bool:
    image = bytes(range(200))
    sources = [ShardSource(shard, memoryview(image), b"{}") for shard in shards]
    return store.flush(facts(version), len(image), sources).committed


@pytest.fixture
def place(tmp_path: Path) -> Path:
    store = opened(tmp_path)
    store.lease(RUN, "job on node").ensure()
    assert flush(store, 1, *range(SHARDS))
    return tmp_path


def test_a_complete_version_is_no_work(place: Path) -> None:
    seen = look_at(str(place), opened(place))
    assert seen.lease is not None
    assert seen.lease.owner == "job on node"
    assert seen.work == ()


def test_shards_that_are_missing_are_named(place: Path) -> None:
    store = opened(place)
    flush(store, 2, *range(4))
    flush(store, 2, 4, 5)
    flush(store, 2, 8, 9)
    [work] = look_at(str(place), store).work
    assert (work.version, work.done_shards, work.total_shards) == (2, 8, SHARDS)
    assert work.waits_for == "shards 6-7"


def test_in_shared_files_whole_groups_count(place: Path) -> None:
    store = opened(place, shared_writes=True)
    flush(store, 2, *range(4))
    flush(store, 2, 4, 5)
    [work] = look_at(str(place), store).work
    assert work.done_shards == PER_GROUP
    assert work.waits_for == ""


def test_versions_of_another_run_and_retired_ones_are_no_work(place: Path) -> None:
    store = opened(place)
    flush(store, 2, 0)
    other = VersionName(VersionId(1, 3), SHARDS, "0ther")
    source = ShardSource(0, memoryview(b"x"), b"{}")
    store.flush(facts_named(other, lineage=((1, 0),)), 1, [source])
    assert [work.version for work in look_at(str(place), store).work] == [2]
    store = opened(place)
    store.backend.put(f"{facts(2).name.stem}.retired", lambda: iter([]), 0)
    assert look_at(str(place), store).work == ()


def test_of_many_missing_shards_the_first_are_named(place: Path) -> None:
    store = opened(place)
    for shard in range(0, SHARDS, 2):
        flush(store, 2, shard)
    [work] = look_at(str(place), store).work
    assert work.waits_for == "shards 1, 3, 5, 7 and 1 more"
