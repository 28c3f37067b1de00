"""Suite for every store of shards; the model is `tierckpt.storage.local.store.LocalStore`."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tierckpt._children import child_command, child_environment
from tierckpt.format.ids import ShardKey

from . import store_program
from .fault_injection import injected
from .store_program import commit_one, content_of, is_sound, key_of, manifest_of, page_aligned

MOST_OPERATIONS = 500
"""Limit of a sweep: one with more operations would never end."""


class StoreConformance:
    """Subclass it and name the `factory`; override the helpers if files have other names.

    The store must call `tierckpt._faults.point("file", ...)` before each of its file operations:
    the sweeps fail, or kill a process, at every one of them.
    """

    factory: str
    """"module:callable"; called with a directory, here and in processes that will be killed."""

    def data_file(self, directory: Path, key: ShardKey) -> Path:
        """The file with a shard's bytes; tests read it without the store."""
        return directory / f"{key.stem}.safetensors"

    def manifest_file(self, directory: Path, key: ShardKey) -> Path:
        """The file with a shard's manifest."""
        return directory / f"{key.stem}.manifest"

    def files_of(self, directory: Path, key: ShardKey) -> set[Path]:
        """All files that belong to the shard."""
        return {self.data_file(directory, key), self.manifest_file(directory, key)}

    def check_files(self, directory: Path, key: ShardKey) -> None:
        """Check, without the store, that a shard's files hold the committed bytes."""
        assert self.data_file(directory, key).read_bytes() == content_of(key)
        assert self.manifest_file(directory, key).read_bytes() == manifest_of(key)

    least_operations = 20
    """Fewest operations of the work: a sweep that ends sooner has missed some."""

    failed_commit_may_exist = False
    """True for a store with many writers: one that failed at its last operation cannot undo a
    commit that another may have finished in the meantime."""

    def make_store(self, directory: Path) -> Any:
        """The store under test."""
        return store_program.make(self.factory, directory)

    @pytest.fixture
    def store(self, tmp_path: Path) -> Any:
        """An empty store."""
        made = self.make_store(tmp_path)
        made.create()
        return made

    # --- committed shards exist ------------------------------------------------------------------

    def test_a_committed_shard_is_read_back_to_the_byte(self, store: Any, tmp_path: Path) -> None:
        """Through the store, through another store in the same place, and without a store."""
        commit_one(store, key_of(1))
        for reader in (store, self.make_store(tmp_path)):
            assert reader.keys() == [key_of(1)]
            assert reader.read_manifest(key_of(1)) == manifest_of(key_of(1))
            with contextlib.closing(reader.open_image(key_of(1))) as image:
                assert image[:] == content_of(key_of(1))
        self.check_files(tmp_path, key_of(1))

    def test_a_shard_larger_than_one_write_is_whole(self, store: Any) -> None:
        """Two windows of 8 MiB and a remainder, for stores that write those."""
        commit_one(store, key_of(1), pages=2 * 2048 + 1)
        assert is_sound(store, key_of(1))

    def test_nothing_is_there_before_the_first_commit(self, store: Any, tmp_path: Path) -> None:
        """The same for a place that does not exist; the query does not create it."""
        assert store.keys() == []
        nowhere = tmp_path / "nowhere"
        assert self.make_store(nowhere).keys() == []
        assert not nowhere.exists()

    def test_a_missing_one_is_reported(self, store: Any) -> None:
        """FileNotFoundError, for a missing version, shard or generation."""
        commit_one(store, key_of(1))
        for key in (key_of(2), key_of(1, shard=1, shards=2), key_of(1, generation=2)):
            with pytest.raises(FileNotFoundError):
                store.read_manifest(key)
            with pytest.raises(FileNotFoundError):
                store.open_image(key)

    def test_shards_of_one_version_are_kept_apart(self, store: Any) -> None:
        """Also shards of other world sizes and other generations."""
        keys = [key_of(1, s, n, g) for n in (1, 2, 3) for s in range(n) for g in (1, 2)]
        for key in keys:
            commit_one(store, key)
        assert store.keys() == sorted(keys)
        assert all(is_sound(store, key) for key in keys)

    def test_a_shard_committed_again_is_the_new_one(self, store: Any) -> None:
        """With a longer, then a shorter image."""
        for edition, pages in enumerate((2, 5, 1)):
            commit_one(store, key_of(1), pages, edition)
            assert store.read_manifest(key_of(1)) == manifest_of(key_of(1), pages, edition)
            assert is_sound(store, key_of(1))
        assert store.keys() == [key_of(1)]

    def test_a_mapped_image_outlives_its_name(self, store: Any) -> None:
        """A reader in the middle of a check must not see bytes of another version."""
        commit_one(store, key_of(1))
        with contextlib.closing(store.open_image(key_of(1))) as image:
            image[:4] = b"mine"  # private to this map
            assert is_sound(store, key_of(1))

    # --- retired shards are gone -----------------------------------------------------------------

    def test_a_retired_shard_is_gone_and_the_others_are_not(self, store: Any) -> None:
        """Only the named shard is removed."""
        for version in (1, 2, 3):
            commit_one(store, key_of(version))
        store.retire(key_of(2))
        assert store.keys() == [key_of(1), key_of(3)]
        assert is_sound(store, key_of(1))
        assert is_sound(store, key_of(3))
        with pytest.raises(FileNotFoundError):
            store.read_manifest(key_of(2))

    def test_retiring_a_missing_shard_does_nothing(self, store: Any) -> None:
        """Retention may retire a shard twice."""
        commit_one(store, key_of(1))
        store.retire(key_of(7))
        store.retire(key_of(7))
        assert store.keys() == [key_of(1)]

    def test_retention_for_a_long_time_takes_no_more_room(self, store: Any, tmp_path: Path) -> None:
        """With commits and retirements in turn, the number of files does not grow."""
        counts = []
        for version in range(1, 8):
            commit_one(store, key_of(version), pages=1 + version % 3)
            assert is_sound(store, key_of(version))
            if version > 2:
                store.retire(key_of(version - 2))
            counts.append(len(list(tmp_path.iterdir())))
        assert store.keys() == [key_of(6), key_of(7)]
        assert counts[-1] == counts[-3]

    # --- unfinished files are removed ------------------------------------------------------------

    def test_a_shard_without_manifest_is_no_shard_and_is_cleaned(
        self, store: Any, tmp_path: Path
    ) -> None:
        """Its bytes may be complete, but no manifest proves it."""
        commit_one(store, key_of(1))
        commit_one(store, key_of(2))
        self.manifest_file(tmp_path, key_of(2)).unlink()
        assert store.keys() == [key_of(1)]
        store.clean(0)
        assert not self.data_file(tmp_path, key_of(2)).exists()
        assert is_sound(store, key_of(1))

    def test_cleaning_leaves_committed_files_and_those_of_others(
        self, store: Any, tmp_path: Path
    ) -> None:
        """Other shards' unfinished files belong to running writers."""
        commit_one(store, key_of(1, 0, 2))
        commit_one(store, key_of(1, 1, 2))
        self.manifest_file(tmp_path, key_of(1, 1, 2)).unlink()
        foreign = tmp_path / "notes.txt"
        foreign.write_text("not ours")
        assert store.clean(0) == []
        assert is_sound(store, key_of(1, 0, 2))
        assert self.data_file(tmp_path, key_of(1, 1, 2)).exists()
        assert foreign.read_text() == "not ours"

    # --- faults ----------------------------------------------------------------------------------

    def test_failing_at_any_operation_loses_nothing_committed(self, tmp_path: Path) -> None:
        """An input/output error at the k-th operation, for every k; then the store goes on."""
        for hit in range(1, MOST_OPERATIONS):
            directory, log = tmp_path / f"eio{hit}", tmp_path / f"eio{hit}.log"
            store = self.make_store(directory)
            error = None
            with injected(f"eio@file:hit={hit}"):
                try:
                    for _ in store_program.work(store, log):
                        pass
                except OSError as caught:
                    error = caught
            if error is None:
                assert hit > self.least_operations, "the store does not announce its operations"
                return
            assert "injected" in str(error)
            at = f"after an error at operation {hit}"
            begun, finished = _read_log(log)
            if begun == finished:
                pytest.fail(f"{at}: it came outside all work")
            if begun[-1].startswith("commit") and begun[-1] not in finished:
                failed, there = key_of(int(begun[-1].split()[1])), store.keys()
                exists = failed in there and not self.failed_commit_may_exist
                assert not exists, f"{at}: the failed commit exists"
            self._check_survivors(store, begun, finished, at)
            self._check_going_on(store, directory, at)
        pytest.fail("the sweep does not end")

    def test_a_kill_at_any_operation_loses_nothing_committed(self, tmp_path: Path) -> None:
        """SIGKILL at the k-th operation of a real process, for every k."""
        self._run_sweep(tmp_path)
        for hit in range(1, MOST_OPERATIONS):
            directory, log = tmp_path / str(hit), tmp_path / f"{hit}.log"
            status = int((tmp_path / f"{hit}.status").read_text())
            store = self.make_store(directory)
            if not any((tmp_path / f"{hit}.marks").iterdir()):
                assert status == 0
                assert hit > self.least_operations, "the store does not announce its operations"
                return
            assert status == -signal.SIGKILL
            at = f"after a kill at operation {hit}"
            begun, finished = _read_log(log)
            self._check_survivors(store, begun, finished, at)
            store.clean(0)
            self._check_survivors(store, begun, finished, f"{at} and cleaning")
            self._check_no_orphans(store, directory, at)
            self._check_going_on(store, directory, at)
        pytest.fail("the sweep does not end")

    def _run_sweep(self, folder: Path) -> None:
        arguments = (self.factory, str(folder), str(MOST_OPERATIONS))
        subprocess.run(
            child_command("tierckpt.testing.store_program", *arguments),
            env=child_environment(),
            check=True,
            timeout=240,
        )

    def _check_survivors(self, store: Any, begun: list[str], finished: list[str], at: str) -> None:
        """Check that exactly the expected shards exist, and that all of them are sound."""
        must: set[ShardKey] = set()
        for text in finished:
            operation, version = text.split()
            (must.add if operation == "commit" else must.discard)(key_of(int(version)))
        may = set(must)
        if begun != finished:  # the interrupted operation may have happened or not
            touched = key_of(int(begun[-1].split()[1]))
            must.discard(touched)
            may.add(touched)
        there = set(store.keys())
        assert must <= there <= may, f"{at}: {finished} were done, {begun[-1:]} was in progress"
        for key in there:
            assert is_sound(store, key), f"{at}: {key} differs from the committed one"

    def _check_no_orphans(self, store: Any, directory: Path, at: str) -> None:
        there = store.keys()
        known = {path for key in there for path in self.files_of(directory, key)}
        files = (p for p in directory.rglob("*") if p.is_file())
        found = {p for p in files if not p.name.startswith(".spare")}
        assert found == known, f"{at}: files without a shard are left"

    def _check_going_on(self, store: Any, directory: Path, at: str) -> None:
        store.create()
        with page_aligned(content_of(key_of(9))) as image:
            store.commit(key_of(9), image, manifest_of(key_of(9)))
        assert is_sound(store, key_of(9)), f"{at}: the next version is not sound"
        self.check_files(directory, key_of(9))


def _read_log(log: Path) -> tuple[list[str], list[str]]:
    """Operations that began, and operations that finished."""
    lines = log.read_text().splitlines() if log.exists() else []
    begun = [line.removeprefix("begin ") for line in lines if line.startswith("begin ")]
    finished = [line.removeprefix("end ") for line in lines if line.startswith("end ")]
    return begun, finished
