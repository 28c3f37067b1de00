"""The persistent level's store on a file system: both layouts of shards, one suite."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import persistent_shards
from tierckpt.format import GROUP, MANIFEST, SHARDS, Groups, ShardKey, SharedPlaces, run_name
from tierckpt.storage.persistent import PosixBackend, backends
from tierckpt.testing import (
    BackendConformance,
    StoreConformance,
    commit_one,
    content_of,
    injected,
    is_sound,
    key_of,
    manifest_of,
)

GROUPS = Groups(1)


class PersistentConformance(StoreConformance):
    """Differences when versions, not shards, are added and removed."""

    failed_commit_may_exist = True

    @pytest.fixture(autouse=True)
    def all_are_closed(self) -> Iterator[None]:
        self.made: list[persistent_shards.Shards] = []
        yield
        for shards in self.made:
            shards.store.close()

    def make_store(self, directory: Path) -> Any:
        shards = super().make_store(directory)
        self.made.append(shards)
        return shards

    def folder(self, directory: Path, key: ShardKey) -> Path:
        return directory / persistent_shards.name_of(key).stem

    def manifest_file(self, directory: Path, key: ShardKey) -> Path:
        return directory / (persistent_shards.name_of(key).stem + MANIFEST)

    def files_of(self, directory: Path, key: ShardKey) -> set[Path]:
        record = self.folder(directory, key) / f"{GROUPS.label(0)}{GROUP}"
        return {*super().files_of(directory, key), record}

    def test_a_shard_committed_again_is_the_new_one(self, store: Any) -> None:
        """Not here: a version of one run has one content, and an existing one is not written
        again."""
        commit_one(store, key_of(1))
        commit_one(store, key_of(1), pages=5, edition=1)
        assert store.read_manifest(key_of(1)) == manifest_of(key_of(1))
        assert is_sound(store, key_of(1))

    def test_cleaning_leaves_committed_files_and_those_of_others(
        self, store: Any, tmp_path: Path
    ) -> None:
        commit_one(store, key_of(1))
        stranger = tmp_path / "notes.txt"
        stranger.write_text("not ours")
        assert store.clean(0) == []
        assert is_sound(store, key_of(1))
        assert stranger.read_text() == "not ours"


class TestSharedFiles(PersistentConformance):
    factory = "tests.support.persistent_shards:shared"

    def data_file(self, directory: Path, key: ShardKey) -> Path:
        return self.folder(directory, key) / f"{GROUPS.label(0)}{SHARDS}"

    def check_files(self, directory: Path, key: ShardKey) -> None:
        content = content_of(key)
        start = SharedPlaces(1, len(content)).image_offset(0)
        data = self.data_file(directory, key).read_bytes()
        assert data[start : start + len(content)] == content


class TestOwnFiles(PersistentConformance):
    factory = "tests.support.persistent_shards:own"

    def data_file(self, directory: Path, key: ShardKey) -> Path:
        return self.folder(directory, key) / GROUPS.label(0) / run_name(range(1))

    def check_files(self, directory: Path, key: ShardKey) -> None:
        content = content_of(key)
        assert self.data_file(directory, key).read_bytes()[: len(content)] == content


class TestPosixBackend(BackendConformance):
    @pytest.fixture(params=[False, True], ids=["cached", "direct"])
    def backend(self, request: pytest.FixtureRequest, tmp_path: Path) -> PosixBackend:
        made = PosixBackend(str(tmp_path / "place"), direct=request.param)
        made.create()
        return made


# --- what only a directory has -------------------------------------------------------------------


def test_the_parent_of_a_place_is_not_made(tmp_path: Path) -> None:
    """A file system should be mounted there."""
    with pytest.raises(FileNotFoundError, match=r"lustre does not exist: is it mounted\?"):
        PosixBackend(str(tmp_path / "lustre" / "job")).create()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "lustre").mkdir()
    for _ in range(2):
        PosixBackend(str(tmp_path / "lustre" / "job")).create()
    assert (tmp_path / "lustre" / "job").is_dir()


def test_a_file_that_nfs_keeps_for_a_reader_stays_and_hinders_nothing(tmp_path: Path) -> None:
    backend = PosixBackend(str(tmp_path))
    folder = tmp_path / "v1" / "group"
    folder.mkdir(parents=True)
    for name in (".nfs00000001", "shards"):
        (folder / name).touch()
    (tmp_path / "v1" / "record").touch()
    with injected("ebusy@file:op=unlink,target=.nfs00000001"):
        backend.delete_folder("v1")
    assert [path for path in (tmp_path / "v1").rglob("*") if path.is_file()] == [
        folder / ".nfs00000001"
    ]
    backend.delete_folder("v1")
    assert list(tmp_path.iterdir()) == []


def test_only_files_busy_for_a_reader_may_stay(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "record").touch()
    with injected("ebusy@file:op=unlink"), pytest.raises(OSError, match="injected"):
        PosixBackend(str(tmp_path)).delete_folder("v1")


# A process of this machine that has ended: no system gives numbers so large.
DEAD = 1 << 30


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a backend as it is on a host of that name."""

    def make(host: str, path: Path = tmp_path) -> PosixBackend:
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        backends._machine.cache_clear()
        return PosixBackend(str(path))

    yield make
    monkeypatch.undo()
    backends._machine.cache_clear()


def temp_of(path: Path, pid: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        made = path / f".record.{backends._writer_tag()}.7.tmp"
    made.touch()
    return made


@pytest.mark.parametrize(
    "other", ["gpunode1", "login.node1", "node1.site", "node10", "node", "1", "a-node1"]
)
def test_a_host_cleans_the_files_of_its_own_dead_jobs_only(
    other: str, on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(other)
    theirs = temp_of(tmp_path, DEAD, monkeypatch)
    here = on("node1")
    ours, alive = (temp_of(tmp_path, pid, monkeypatch) for pid in (DEAD, os.getpid()))
    here.discard("")
    assert not ours.exists()
    assert theirs.exists()
    assert alive.exists()


def test_a_container_cleans_no_other_ones_though_they_share_the_name(
    on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each numbers its processes for itself."""
    here = on("trainer")
    theirs = temp_of(tmp_path, DEAD, monkeypatch)
    other = theirs.with_name(theirs.name.replace(backends._machine(), f"{backends._machine()}0"))
    theirs.rename(other)
    here.discard("record")
    assert other.exists()
    other.rename(theirs)
    here.discard("record")
    assert not theirs.exists()
