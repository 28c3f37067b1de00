"""Encoded and incremental shards under faults: existing shards are whole, and stay so."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.encoded_shards import (
    BLOCK_BYTES,
    DELTA,
    LEVELS,
    SLOW,
    VERSIONS,
    Writer,
    commit,
    content_of,
    key_of,
    local_contents,
    name_of,
    persistent_contents,
    retire,
    session,
    shard,
)
from tierckpt import _faults
from tierckpt.agent import LostBaseError
from tierckpt.codecs import CodecError
from tierckpt.errors import CorruptShardError, FormatError, TierckptError
from tierckpt.format import MANIFEST, RETIRED, Manifest, VersionId
from tierckpt.storage import LocalStore, open_encoded
from tierckpt.storage.persistent import FlushCancelledError, PersistentStore
from tierckpt.testing import injected

FULL = (1, 3)
"""The first of every two versions."""


def encoding_of(directory: Path, version: int) -> Any:
    return Manifest.decode(LocalStore(directory).read_manifest(key_of(version))).encoding


# --- stored bytes ------------------------------------------------------------------------------


def test_of_two_versions_the_second_refers_to_the_first(tmp_path: Path) -> None:
    with session(tmp_path, keep_last=9) as at:
        for version in range(1, VERSIONS + 1):
            commit(at, version)
    for version in range(1, VERSIONS + 1):
        encoding = encoding_of(tmp_path, version)
        base = max(v for v in FULL if v <= version)
        if version in FULL:
            assert encoding.base is None
        else:
            assert encoding.base == VersionId(1, base)
            # The header does not change either; the last one is the sealed manifest's.
            referred = [not length for length in encoding.stored_bytes]
            assert referred == [True, False, True, False, True, False]
    assert local_contents(tmp_path) == {v: content_of(v) for v in range(1, VERSIONS + 1)}


def test_a_base_goes_with_the_last_that_refers_to_it(tmp_path: Path) -> None:
    with session(tmp_path) as at:
        kept = {}
        for version in range(1, VERSIONS + 2):
            commit(at, version)
            retire(at, version)
            kept[version] = [key.id.version for key in at.store.keys()]  # noqa: SIM118
    assert kept == {1: [1], 2: [1, 2], 3: [3], 4: [3, 4]}


def test_an_agent_that_restarts_refers_to_no_base(tmp_path: Path) -> None:
    for version in (1, 2):
        with session(tmp_path, keep_last=9) as at:
            commit(at, version)
        assert encoding_of(tmp_path, version).base is None


@pytest.mark.parametrize("held", [False, True])
def test_a_version_that_a_flush_still_reads_keeps_its_base(held: bool, tmp_path: Path) -> None:
    with session(tmp_path) as at:
        for version in (1, 2):
            commit(at, version)
        if held:
            at.services.held.add([key_of(2)])
        for version in (4, 5):
            at.store.commit(key_of(version), memoryview(bytes(4096)), b"plain")
        retire(at, 5)
        assert at.store.has(key_of(2)) == at.store.has(key_of(1)) == held


def test_a_base_that_vanished_is_not_referred_to(tmp_path: Path) -> None:
    with session(tmp_path, keep_last=9) as at:
        commit(at, 1)
        at.store.retire(key_of(1))
        commit(at, 2)
    assert local_contents(tmp_path) == {2: content_of(2)}


def test_nothing_comes_to_be_beside_a_base_that_went_while_it_was_written(tmp_path: Path) -> None:
    """Another agent, which did not know of this version, retired its base."""
    with session(tmp_path / "here") as at:
        commit(at, 1)

        def still_sealed() -> bool:
            LocalStore(tmp_path / "here").retire(key_of(1))
            return True

        with (
            shard(2) as (image, manifest),
            pytest.raises(FileNotFoundError, match="v1 shard 0 of 1 was retired while v2 shard 0"),
        ):
            at._store(key_of(2), image, manifest, still_sealed)
        commit(at, 3)
    assert local_contents(tmp_path / "here") == {3: content_of(3)}


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_kill_at_any_operation_leaves_only_readable_versions(level: str, shm_dir: Path) -> None:
    command = [sys.executable, "-m", "tests.support.encoded_shards", level, str(shm_dir)]
    subprocess.run(command, check=True, timeout=240)
    _, contents = LEVELS[level]
    survived = 0
    for marks in shm_dir.glob("*.marks"):
        hit = marks.name.removesuffix(".marks")
        found = contents(shm_dir / hit)
        finished = [int(line) for line in (shm_dir / f"{hit}.log").read_text().split()]
        assert found == {version: content_of(version) for version in found}, f"at {hit}"
        assert not finished or max(finished) in found, f"at {hit}: {finished} were finished"
        survived += len(finished) < VERSIONS
    assert survived > 30, "the kills came outside all work"


def test_an_error_at_any_operation_leaves_only_readable_versions(shm_dir: Path) -> None:
    work, contents = LEVELS["local"]
    for hit in range(1, 1000):
        place, finished = shm_dir / str(hit), [0]
        error = None
        with injected(f"eio@file:hit={hit}") as rules:
            try:
                work(place, finished.append)
            except (OSError, TierckptError) as caught:
                error = caught
        if not fired(rules):
            assert hit > 30
            return
        found = contents(place)
        assert found == {version: content_of(version) for version in found}, f"at {hit}: {error}"
        assert max(finished) in {0, *found}, f"at {hit}: {error}"
    pytest.fail("the sweep does not end")


def fired(rules: list[_faults.Rule]) -> bool:
    return any(rule.hits >= int(rule.conditions["hit"]) for rule in rules)


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    """The damage is in the stored bytes, in the base, or in either manifest."""
    with session(tmp_path, keep_last=9) as at:
        commit(at, 1)
        commit(at, 2)
    chance, store = random.Random(0), LocalStore(tmp_path)
    for path in [p for p in tmp_path.iterdir() if p.suffix in (".encoded", ".manifest")]:
        sound = path.read_bytes()
        for _ in range(60):
            damaged = bytearray(sound)
            damaged[chance.randrange(len(sound))] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            try:
                manifest = Manifest.decode(store.read_manifest(key_of(2)))
                found = b"".join(open_encoded(store, manifest).blocks())
            except (CorruptShardError, FormatError):
                continue
            assert found == content_of(2)
        path.write_bytes(sound)
    assert local_contents(tmp_path)[2] == content_of(2)


def test_a_base_of_another_run_is_refused(tmp_path: Path) -> None:
    """Another file has the same name."""
    with session(tmp_path, keep_last=9) as at:
        commit(at, 1)
        commit(at, 2)
    store = LocalStore(tmp_path)
    base = Manifest.decode(store.read_manifest(key_of(1)))
    other = replace(base, facts=replace(base.facts, run_id="other"))
    (tmp_path / f"{key_of(1).stem}.manifest").write_bytes(other.encode())
    with pytest.raises(FormatError, match="cannot be its base"):
        open_encoded(store, Manifest.decode(store.read_manifest(key_of(2))))


# --- the persistent level ------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["shared", "own"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Writer:
    return Writer(tmp_path / "place", shared_writes=request.param)


def versions(writer: Writer) -> list[int]:
    return [name.id.version for name in writer.store.versions()]


def test_persistent_bases_stay_while_they_are_referred_to(writer: Writer, tmp_path: Path) -> None:
    kept = {}
    for version in range(1, VERSIONS + 2):
        writer.flush(version)
        writer.retain(version)
        kept[version] = versions(writer)
    assert kept == {1: [1], 2: [1, 2], 3: [3], 4: [3, 4]}
    assert persistent_contents(tmp_path / "place") == {v: content_of(v) for v in (3, 4)}
    assert writer.store.read_manifest(name_of(4)).bases == (name_of(3),)


def test_a_base_in_use_cannot_be_retired(writer: Writer) -> None:
    writer.flush(1)
    writer.flush(2)
    assert not writer.store.retire(name_of(1))
    assert versions(writer) == [1, 2]
    assert writer.store.retired() == []
    assert writer.store.retire(name_of(2))
    assert PersistentStore(writer.store.url).retire(name_of(1))
    assert versions(writer) == []


def test_a_version_with_a_base_under_removal_is_not_committed(writer: Writer) -> None:
    """The remover has set its mark, and cannot see the manifest that does not exist yet."""
    writer.flush(1)
    place = Path(writer.store.url)
    (place / (name_of(1).stem + RETIRED)).touch()
    with pytest.raises(FlushCancelledError, match="refers to v1"):
        writer.flush(2)
    assert versions(writer) == [1]


def test_a_version_without_its_base_after_its_manifest_was_written_is_not_committed(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remover had finished, its mark included, and saw no manifest."""
    writer.flush(1)
    backend = writer.store.backend
    manifests = [Path(writer.store.url) / (name_of(v).stem + MANIFEST) for v in (1, 2)]
    put = backend.put

    def put_and_lose(path: str, *what: Any) -> Any:
        found = put(path, *what)
        if path == name_of(2).stem + MANIFEST:
            assert manifests[1].exists()
            manifests[0].unlink()
        return found

    monkeypatch.setattr(backend, "put", put_and_lose)
    with pytest.raises(FlushCancelledError, match="refers to v1"):
        writer.flush(2)
    assert not any(path.exists() for path in manifests)


def test_a_version_that_was_never_complete_is_no_base(writer: Writer) -> None:
    writer.flush(1)
    (Path(writer.store.url) / (name_of(1).stem + MANIFEST)).unlink()
    source = writer.flush(2)
    assert source.base is None
    assert writer.flush(3).base == name_of(2)


def test_a_base_that_was_removed_before_the_commit_is_not_referred_to(tmp_path: Path) -> None:
    """Another run of the job, or a user, removed the version that this one would refer to."""
    writer = Writer(tmp_path / "place", row="incremental full_every=9, zstd")
    for version in (1, 2):
        writer.flush(version)
    assert writer.store.read_manifest(name_of(2)).bases == (name_of(1),)
    other = PersistentStore(writer.store.url)
    assert other.retire(name_of(2))
    assert other.retire(name_of(1))
    assert writer.flush(3).base is None
    assert persistent_contents(tmp_path / "place") == {3: content_of(3)}


def test_a_repeated_flush_writes_nothing_again(writer: Writer, tmp_path: Path) -> None:
    """Although it would write other bytes now."""
    writer.pipeline = type(writer.pipeline)(writer.pipeline.codecs, 0)
    last = f"eio@file:op=rename,target={name_of(1).stem}.manifest"
    with injected(last), pytest.raises(OSError, match="injected"):
        writer.flush(1)
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "place").rglob("*.shards")}
    assert files
    source = writer.flush(1)
    assert source.made is None, "nothing was encoded"
    assert {p: p.stat().st_mtime_ns for p in files} == files
    assert persistent_contents(tmp_path / "place") == {1: content_of(1)}


# --- differences ---------------------------------------------------------------------------------


def stored_manifest(writer: Writer, version: int) -> Manifest:
    return Manifest.decode(writer.store.open_shard(name_of(version), 0).manifest)


def flip(writer: Writer, version: int) -> None:
    """Damage the middle of what is stored of the slow block."""
    shard = writer.store.open_shard(name_of(version), 0)
    encoding = Manifest.decode(shard.manifest).encoding
    assert encoding is not None
    at = shard._record.offset + encoding.offsets[SLOW + 1] + encoding.stored_bytes[SLOW + 1] // 2
    path = Path(writer.store.url) / shard._path
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("shared", [True, False])
def test_blocks_that_changed_a_little_are_differences_to_the_base(
    shared: bool, tmp_path: Path
) -> None:
    writer = Writer(tmp_path / "place", DELTA, shared_writes=shared)
    for version in (1, 2, 3):
        writer.flush(version)
    whole, delta, again = (stored_manifest(writer, v).encoding for v in (1, 2, 3))
    assert (whole.base, whole.differences, again.base) == (None, {}, None)
    assert whole.codecs == (("zstd", {"level": 1}),), "an older release reads it"
    assert (delta.base, delta.differences) == (VersionId(1, 1), {SLOW + 1: 4})
    assert delta.codecs == (("delta", {}), *whole.codecs)
    assert delta.stored_bytes[SLOW + 1] < 0.4 * BLOCK_BYTES < whole.stored_bytes[SLOW + 1]
    assert [n for n, length in enumerate(delta.stored_bytes) if not length] == [0, 2, 4]
    assert persistent_contents(tmp_path / "place") == {v: content_of(v) for v in (1, 2, 3)}


def test_a_damaged_base_is_named_and_what_does_not_need_it_is_read(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "place", DELTA)
    for version in (1, 2, 3):
        writer.flush(version)
    flip(writer, 1)
    with pytest.raises(CorruptShardError, match=r"v2 shard 0 of 1 refers to v1 .*checksum"):
        persistent_contents(tmp_path / "place", {2})
    assert persistent_contents(tmp_path / "place", {3}) == {3: content_of(3)}


def test_a_version_is_not_stored_as_difference_to_a_damaged_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "place", DELTA)
    writer.flush(1)
    flip(writer, 1)
    with pytest.raises(LostBaseError, match=r"v1 shard 0 of 1 cannot be read: .*checksum"):
        writer.flush(2)
    assert versions(writer) == [1]
    writer.bases.forget()
    assert writer.flush(2).base is None
    assert persistent_contents(tmp_path / "place", {2}) == {2: content_of(2)}


def test_any_flipped_bit_of_differences_or_their_base_is_found(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "place", DELTA)
    for version in (1, 2):
        writer.flush(version)
    chance = random.Random(0)
    for path in [p for p in (tmp_path / "place").rglob("*") if p.is_file()]:
        sound = path.read_bytes()
        for _ in range(40 if sound else 0):
            damaged = bytearray(sound)
            damaged[chance.randrange(len(sound))] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            try:
                found = persistent_contents(tmp_path / "place", {2})
            except (CorruptShardError, FormatError, CodecError):
                continue
            assert found == {2: content_of(2)}
        path.write_bytes(sound)
