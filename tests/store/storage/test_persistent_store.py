"""Versions with many writers: resume, cancel, damage, removal, on a real file system."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.facts import facts_named
from tests.support.tmpfs import SIZE_BYTES, read_only
from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format import MANIFEST, RETIRED, Lineage, VersionFacts, VersionId
from tierckpt.storage import PersistentPins
from tierckpt.storage.persistent import (
    WINDOW_BYTES,
    FlushCancelledError,
    FlushPacer,
    PersistentError,
    PersistentStore,
    RetentionPolicy,
    RetryPolicy,
    ShardSource,
    VersionName,
)
from tierckpt.testing import content_of, injected, key_of, manifest_of

SHARDS = 5
LIFE = "5eed"
LAYOUTS = {"shared": {}, "own": {"shared_writes": False}}

LARGEST_BYTES = SHARDS * 4096


def name(version: int, run_id: str = LIFE, generation: int = 1) -> VersionName:
    return VersionName(VersionId(generation, version), SHARDS, run_id)


def facts(
    version: int,
    run_id: str = LIFE,
    generation: int = 1,
    lineage: Lineage = ((1, 0),),
    metric: float | None = None,
) -> VersionFacts:
    return facts_named(name(version, run_id, generation), lineage=lineage, metric=metric)


def source(version: int, shard: int) -> ShardSource:
    """Shards of different lengths, as in a job."""
    key = key_of(version, shard, SHARDS)
    pages = 1 + shard
    return ShardSource(shard, memoryview(content_of(key, pages)), manifest_of(key, pages))


def sources(version: int, shards: Sequence[int] = range(SHARDS)) -> list[ShardSource]:
    return [source(version, shard) for shard in shards]


@pytest.fixture(params=LAYOUTS)
def options(request: pytest.FixtureRequest) -> dict[str, bool]:
    found: dict[str, bool] = LAYOUTS[request.param]
    return found


@pytest.fixture
def store(tmp_path: Path, options: dict[str, bool]) -> PersistentStore:
    """Groups of two: three groups, the last of one shard."""
    return made(tmp_path, options)


def made(place: Path, options: dict[str, bool]) -> PersistentStore:
    return PersistentStore(str(place), shards_per_group=2, retry=RetryPolicy(tries=1), **options)


def check(store: PersistentStore, version: int) -> None:
    """Every shard exists, to the byte."""
    assert name(version) in store.versions()
    for shard in range(SHARDS):
        reader, wanted = store.open_shard(name(version), shard), source(version, shard)
        assert reader.read() == wanted.image
        assert reader.manifest == wanted.manifest
        reader.verify()


def verify_all(store: PersistentStore, version: int) -> None:
    for shard in range(SHARDS):
        store.open_shard(name(version), shard).verify()


# --- many writers --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations([(0, 1, 2), (3,), (4,)])))
def test_the_last_rank_commits_in_any_order(
    store: PersistentStore, order: tuple[tuple[int, ...], ...]
) -> None:
    for number, shards in enumerate(order, start=1):
        assert store.versions() == []
        result = store.flush(facts(1), LARGEST_BYTES, sources(1, shards))
        assert result.committed == (number == len(order))
    check(store, 1)
    manifest = store.read_manifest(name(1))
    assert manifest.nbytes == sum(len(s.image) for s in sources(1))
    assert manifest.facts == facts(1)


def test_ranges_are_read_without_the_rest(store: PersistentStore) -> None:
    store.flush(facts(1), LARGEST_BYTES, sources(1))
    reader, wanted = store.open_shard(name(1), 3), source(1, 3).image
    assert reader.nbytes == len(wanted)
    assert reader.read(4096, 100) == wanted[4096:4196]
    assert reader.read(len(wanted), 0) == b""
    into = bytearray(100)
    reader.read_into(4096, memoryview(into))
    assert into == wanted[4096:4196]
    with pytest.raises(ValueError, match="bytes"):
        reader.read_into(len(wanted) - 99, memoryview(into))
    with pytest.raises(ValueError, match="bytes 0 to"):
        reader.read(0, len(wanted) + 1)
    with pytest.raises(FileNotFoundError, match="no shard 5"):
        store.open_shard(name(1), 5)


def test_two_that_commit_at_once_write_the_same(
    store: PersistentStore, tmp_path: Path, options: dict[str, bool]
) -> None:
    """The other writer does all of it between this one's last look and its manifest."""
    other, content = made(tmp_path, options), []
    put = store.put

    def late(path: str, data: bytes) -> None:
        if path.endswith(MANIFEST):
            assert other.flush(facts(1), LARGEST_BYTES, []).committed
            content.append((tmp_path / path).read_bytes())
        put(path, data)
        if path.endswith(MANIFEST):
            content.append((tmp_path / path).read_bytes())

    store.put = late  # type: ignore[method-assign]
    assert store.flush(facts(1), LARGEST_BYTES, sources(1)).committed
    assert len(content) == 2
    assert content[0] == content[1]
    check(store, 1)


# --- killed, cancelled ---------------------------------------------------------------------------


def test_a_cancelled_flush_ends_between_two_windows(store: PersistentStore) -> None:
    seen: list[int] = []
    pace = FlushPacer(cancelled=lambda: len(seen) >= 2)

    def counted(nbytes: int) -> None:
        pace(nbytes)
        seen.append(nbytes)

    with pytest.raises(FlushCancelledError, match="given up"):
        store.flush(facts(1), LARGEST_BYTES, sources(1), counted)
    assert len(seen) == 2
    assert store.versions() == []
    assert store.flush(facts(1), LARGEST_BYTES, sources(1)).committed


def test_windows_are_bounded_and_all_are_announced(store: PersistentStore) -> None:
    image = memoryview(bytes(2 * WINDOW_BYTES + 4096))
    seen: list[int] = []
    store.flush(facts(1), len(image), [ShardSource(0, image, b"m")], seen.append)
    assert seen == [WINDOW_BYTES, WINDOW_BYTES, 4096]


def test_a_slot_that_was_refilled_during_the_flush_is_not_stored(store: PersistentStore) -> None:
    refilled = replace(source(1, 4), still_sealed=lambda: False)
    store.flush(facts(1), LARGEST_BYTES, sources(1, range(4)))
    with pytest.raises(FlushCancelledError, match="shard 4 was refilled"):
        store.flush(facts(1), LARGEST_BYTES, [refilled])
    assert store.versions() == []
    assert store.flush(facts(1), LARGEST_BYTES, [source(1, 4)]).written_bytes == 5 * 4096


def test_a_shard_larger_than_its_place_is_refused(tmp_path: Path) -> None:
    store = made(tmp_path, {})
    with pytest.raises(PersistentError, match="maximum over all ranks"):
        store.flush(facts(1), 4096, sources(1))
    assert store.versions() == []


# --- damage --------------------------------------------------------------------------------------


def test_a_corrupted_byte_is_found_wherever_it_is(store: PersistentStore, tmp_path: Path) -> None:
    """In a shard, in a group's record, in the manifest: every file of the version."""
    store.flush(facts(1), LARGEST_BYTES, sources(1))
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) == 7
    for file in files:
        sound, at = file.read_bytes(), file.stat().st_size // 2
        if file.suffix == ".shards":  # in the middle of a shard that it holds
            held = next(bytes(s.image) for s in sources(1) if bytes(s.image) in sound)
            at = sound.index(held) + len(held) // 2
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
        reader = made(tmp_path, {})
        with pytest.raises((CorruptShardError, FormatError)):
            verify_all(reader, 1)
        file.write_bytes(sound)
    check(made(tmp_path, {}), 1)


def test_a_truncated_file_is_no_whole_group(store: PersistentStore, tmp_path: Path) -> None:
    """Its record exists, its bytes do not: no manifest."""
    store.flush(facts(1), LARGEST_BYTES, sources(1, [0, 2, 3, 4]))
    (file,) = (p for p in tmp_path.rglob("*.shards") if bytes(source(1, 4).image) in p.read_bytes())
    group = next(tmp_path.rglob("00002of00003.group"))
    group.unlink()
    os.truncate(file, file.stat().st_size - 100)
    assert not store.flush(facts(1), LARGEST_BYTES, sources(1, [1])).committed
    assert not store.flush(facts(1), LARGEST_BYTES, []).committed
    assert store.versions() == []


# --- removing ------------------------------------------------------------------------------------


def test_retention_follows_the_policy(store: PersistentStore, tmp_path: Path) -> None:
    losses = {1: 5.0, 2: 0.1, 3: 4.0, 4: 3.0, 5: 2.0, 6: 1.0}
    for version, loss in losses.items():
        store.flush(facts(version, metric=loss), LARGEST_BYTES, sources(version))
    PersistentPins(store).pin([name(1)])
    store.flush(facts(3, run_id="dead"), LARGEST_BYTES, sources(3, [0]))
    store.flush(facts(5, run_id=LIFE, generation=2), LARGEST_BYTES, sources(5, [0]))
    policy = RetentionPolicy(keep_last=1, keep_every=4, keep_best=1)
    assert store.retain(policy, name(6)) == [name(3), name(5)]
    assert store.versions() == [name(v) for v in (1, 2, 4, 6)]
    for version in (1, 2, 4, 6):
        check(store, version)
    # Other runs' unfinished versions are removed only if the lease shows that those runs have
    # ended.
    left = [name(3, run_id="dead"), name(5, generation=2)]
    assert store.incomplete() == left
    lease = store.lease(LIFE, "us")
    assert store.retain(policy, name(6), lease) == []
    lease.ensure()
    assert store.retain(policy, name(6), lease) == [name(3, run_id="dead")]


def test_an_ancestors_versions_go_only_while_the_lease_is_ours(store: PersistentStore) -> None:
    """Another living run may take itself for their successor, too."""
    lineage = ((1, 2), (2, 2))
    for version in (1, 2):
        store.flush(facts(version, run_id="01d"), LARGEST_BYTES, sources(version))
    for version in (3, 4):
        now = facts(version, generation=2, lineage=lineage)
        store.flush(now, LARGEST_BYTES, sources(version))
    policy, newest = RetentionPolicy(keep_last=1), name(4, generation=2)
    lease = store.lease(LIFE, "us")
    assert store.retain(policy, newest, lease) == [name(3, generation=2)]
    lease.ensure()
    assert store.retain(policy, newest, lease) == [name(v, run_id="01d") for v in (1, 2)]
    assert store.versions() == [newest]


def test_two_experiments_in_one_place_leave_each_others_versions(store: PersistentStore) -> None:
    """Same name, and each in its first generation: it never saw the other."""
    for run_id in ("aaaa", "bbbb"):
        for version in (1, 2):
            store.flush(facts(version, run_id), LARGEST_BYTES, sources(version))
    lease = store.lease("aaaa", "us")
    lease.ensure()
    assert store.retain(RetentionPolicy(keep_last=1), name(2, "aaaa"), lease) == [name(1, "aaaa")]
    assert store.versions() == [name(1, "bbbb"), *(name(2, run_id) for run_id in ("aaaa", "bbbb"))]


def test_files_of_a_removed_version_that_a_reader_keeps_are_removed_later(tmp_path: Path) -> None:
    """As on NFS: the file is busy, and its folder not empty."""
    store = made(tmp_path, {})
    for version in (1, 2):
        store.flush(facts(version), LARGEST_BYTES, sources(version))
    (tmp_path / name(1).stem / ".nfs0001").touch()
    policy = RetentionPolicy(keep_last=1)
    with injected("ebusy@file:op=unlink,target=.nfs0001"):
        assert store.retain(policy, name(2)) == [name(1)]
    assert store.versions() == [name(2)]
    assert store.retired() == [name(1)]
    assert store.retain(policy, name(2)) == [name(1)]
    assert store.retired() == store.incomplete() == []


@pytest.mark.parametrize("at", range(1, 60))
def test_a_removal_at_any_moment_of_a_commit_leaves_no_manifest_without_shards(
    tmp_path: Path, at: int
) -> None:
    """The remover does all of its work just before the writer's step number `at`."""
    store, remover = made(tmp_path, {}), made(tmp_path, {})
    store.flush(facts(1), LARGEST_BYTES, sources(1, range(4)))
    inner, count = store.backend, itertools.count(1)
    happened = []

    class Interrupted:
        def __getattr__(self, attribute: str) -> object:
            found = getattr(inner, attribute)
            if attribute in ("size", "sizes", "read", "put", "write_at") and next(count) == at:
                happened.append(remover.retire(name(1)))
            return found

    store.backend = Interrupted()  # type: ignore[assignment]
    with contextlib.suppress(FlushCancelledError, FileNotFoundError):
        store.flush(facts(1), LARGEST_BYTES, sources(1, [4]))
    if not happened:
        assert at > 15
        check(remover, 1)
        return
    assert remover.versions() == []


def test_a_pin_wins_over_a_removal_that_came_second(store: PersistentStore) -> None:
    store.flush(facts(1), LARGEST_BYTES, sources(1))
    pins = PersistentPins(store)
    assert pins.pin([name(1)]) == {name(1)}
    assert not store.retire(name(1))
    check(store, 1)
    assert pins.unmark([name(1)]) == {name(1)}
    assert store.retire(name(1))
    assert store.versions() == store.incomplete() == []
    assert pins.pin([name(1)]) == pins.marked() == set()


def test_a_version_marked_as_retired_does_not_come_to_be(
    store: PersistentStore, tmp_path: Path
) -> None:
    store.flush(facts(1), LARGEST_BYTES, sources(1, range(4)))
    (tmp_path / (name(1).stem + RETIRED)).touch()
    with pytest.raises(FlushCancelledError, match="retired"):
        store.flush(facts(1), LARGEST_BYTES, sources(1, [4]))
    assert store.versions() == []


# --- places that fail ----------------------------------------------------------------------------


def test_a_full_file_system_is_reported_and_room_can_be_made(small_tmpfs: Path) -> None:
    store = made(small_tmpfs, {})
    store.flush(facts(1), LARGEST_BYTES, sources(1))
    image = memoryview(bytes(SIZE_BYTES))
    with pytest.raises(PersistentError, match=f"{small_tmpfs}.*free space") as full:
        store.flush(facts(2), len(image), [ShardSource(0, image, b"m")])
    assert not full.value.transient
    check(store, 1)
    assert store.retire(name(2)), "what was written of it gives its room back"
    assert store.flush(facts(3), LARGEST_BYTES, sources(3)).committed


def test_a_read_only_file_system_is_reported(small_tmpfs: Path) -> None:
    store = made(small_tmpfs, {})
    store.flush(facts(1), LARGEST_BYTES, sources(1))
    with read_only(small_tmpfs), pytest.raises(PersistentError, match="read-only"):
        store.flush(facts(2), LARGEST_BYTES, sources(2))
    check(store, 1)


def test_a_missing_place_is_not_made_again(tmp_path: Path) -> None:
    """Nothing may be written to the mount point of an unmounted file system."""
    store = made(tmp_path / "unmounted", {})
    with pytest.raises(PersistentError, match="mount it"):
        store.flush(facts(1), LARGEST_BYTES, sources(1))
    assert not (tmp_path / "unmounted").exists()


def test_trouble_that_passes_is_not_seen(tmp_path: Path) -> None:
    waits: list[float] = []
    store = PersistentStore(str(tmp_path), sleep=waits.append)
    with injected("eio@file:op=write,hit=3;estale@file:op=fsync,hit=5;ebusy@file:op=rename,hit=1"):
        assert store.flush(facts(1), LARGEST_BYTES, sources(1)).committed
    assert len(waits) == 3
    check(store, 1)
