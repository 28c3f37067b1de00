"""The persistent level's store on a file system: both ways to lay out shards, one suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store import persistentshards
from tierckpt.naming import ShardKey
from tierckpt.persistent.names import GROUP, MANIFEST, SHARDS, Groups, SharedPlaces, run_name
from tierckpt.persistent.posix import PosixBackend
from tierckpt.testing import BackendConformance, StoreConformance
from tierckpt.testing.storeprogram import commit_one, content_of, is_sound, key_of, manifest_of

GROUPS = Groups(1)


class PersistentConformance(StoreConformance):
    """What is different when versions, not shards, come and go."""

    failed_commit_may_exist = True

    @pytest.fixture(autouse=True)
    def all_are_closed(self) -> Iterator[None]:
        self.made: list[persistentshards.Shards] = []
        yield
        for shards in self.made:
            shards.store.close()

    def make_store(self, directory: Path) -> Any:
        shards = super().make_store(directory)
        self.made.append(shards)
        return shards

    def folder(self, directory: Path, key: ShardKey) -> Path:
        return directory / persistentshards.name_of(key).stem

    def manifest_file(self, directory: Path, key: ShardKey) -> Path:
        return directory / (persistentshards.name_of(key).stem + MANIFEST)

    def files_of(self, directory: Path, key: ShardKey) -> set[Path]:
        record = self.folder(directory, key) / f"{GROUPS.label(0)}{GROUP}"
        return {*super().files_of(directory, key), record}

    def test_a_shard_committed_again_is_the_new_one(self, store: Any) -> None:
        """Not here: a version of one life has one content, and what exists is not written again."""
        commit_one(store, key_of(1))
        commit_one(store, key_of(1), pages=5, edition=1)
        assert store.read_manifest(key_of(1)) == manifest_of(key_of(1))
        assert is_sound(store, key_of(1))

    def test_cleaning_leaves_what_is_committed_and_what_is_others(
        self, store: Any, tmp_path: Path
    ) -> None:
        commit_one(store, key_of(1))
        stranger = tmp_path / "notes.txt"
        stranger.write_text("not ours")
        assert store.clean(0) == []
        assert is_sound(store, key_of(1))
        assert stranger.read_text() == "not ours"


class TestSharedFiles(PersistentConformance):
    factory = "tests.store.persistentshards:shared"

    def data_file(self, directory: Path, key: ShardKey) -> Path:
        return self.folder(directory, key) / f"{GROUPS.label(0)}{SHARDS}"

    def check_files(self, directory: Path, key: ShardKey) -> None:
        content = content_of(key)
        begin = SharedPlaces(1, len(content)).image_offset(0)
        data = self.data_file(directory, key).read_bytes()
        assert data[begin : begin + len(content)] == content


class TestOwnFiles(PersistentConformance):
    factory = "tests.store.persistentshards:own"

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
