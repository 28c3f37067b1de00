"""Suites for every store of shards, backend of the persistent level, codec, and stage.

The model of a store is `tierckpt.storage.local.LocalStore`. A backend is a
`tierckpt.storage.persistent.backend.Backend`, a codec a `tierckpt.codecs.codec.Codec`, a stage a
`tierckpt.stages.Stage`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tierckpt._children import child_command, child_environment
from tierckpt.agent.pipeline import open_shard
from tierckpt.codecs.codec import BlockId, Codec, CodecError
from tierckpt.errors import CorruptShardError
from tierckpt.format.ids import ShardKey
from tierckpt.stages import LocalVersion, Stage, StageCancelledError
from tierckpt.storage.local import LocalStore
from tierckpt.storage.persistent.backend import WINDOW_BYTES, Backend, Content

from . import fault_injection
from .fault_injection import (
    commit_one,
    content_of,
    injected,
    is_sound,
    key_of,
    manifest_of,
    page_aligned,
)

MAX_OPERATIONS = 500
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
        return fault_injection.make(self.factory, directory)

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
        """An input/output error at the k-th operation, for every k; then the store continues."""
        for hit in range(1, MAX_OPERATIONS):
            directory, log = tmp_path / f"eio{hit}", tmp_path / f"eio{hit}.log"
            store = self.make_store(directory)
            error = None
            with injected(f"eio@file:hit={hit}"):
                try:
                    for _ in fault_injection.work(store, log):
                        pass
                except OSError as caught:
                    error = caught
            if error is None:
                assert hit > self.least_operations, "the store does not announce its operations"
                return
            assert "injected" in str(error)
            at = f"after an error at operation {hit}"
            tried, finished = _read_log(log)
            if tried == finished:
                pytest.fail(f"{at}: it came outside all work")
            if tried[-1].startswith("commit") and tried[-1] not in finished:
                failed, there = key_of(int(tried[-1].split()[1])), store.keys()
                exists = failed in there and not self.failed_commit_may_exist
                assert not exists, f"{at}: the failed commit exists"
            self._check_survivors(store, tried, finished, at)
            self._check_continues(store, directory, at)
        pytest.fail("the sweep does not end")

    def test_a_kill_at_any_operation_loses_nothing_committed(self, tmp_path: Path) -> None:
        """SIGKILL at the k-th operation of a real process, for every k."""
        self._run_sweep(tmp_path)
        for hit in range(1, MAX_OPERATIONS):
            directory, log = tmp_path / str(hit), tmp_path / f"{hit}.log"
            status = int((tmp_path / f"{hit}.status").read_text())
            store = self.make_store(directory)
            if not any((tmp_path / f"{hit}.marks").iterdir()):
                assert status == 0
                assert hit > self.least_operations, "the store does not announce its operations"
                return
            assert status == -signal.SIGKILL
            at = f"after a kill at operation {hit}"
            tried, finished = _read_log(log)
            self._check_survivors(store, tried, finished, at)
            store.clean(0)
            self._check_survivors(store, tried, finished, f"{at} and cleaning")
            self._check_no_orphans(store, directory, at)
            self._check_continues(store, directory, at)
        pytest.fail("the sweep does not end")

    def _run_sweep(self, folder: Path) -> None:
        arguments = (self.factory, str(folder), str(MAX_OPERATIONS))
        subprocess.run(
            child_command("tierckpt.testing.fault_injection", *arguments),
            env=child_environment(),
            check=True,
            timeout=240,
        )

    def _check_survivors(self, store: Any, tried: list[str], finished: list[str], at: str) -> None:
        """Check that exactly the expected shards exist, and that all of them are sound."""
        must: set[ShardKey] = set()
        for text in finished:
            operation, version = text.split()
            (must.add if operation == "commit" else must.discard)(key_of(int(version)))
        may = set(must)
        if tried != finished:  # the interrupted operation may have happened or not
            touched = key_of(int(tried[-1].split()[1]))
            must.discard(touched)
            may.add(touched)
        there = set(store.keys())
        assert must <= there <= may, f"{at}: {finished} were done, {tried[-1:]} was in progress"
        for key in there:
            assert is_sound(store, key), f"{at}: {key} differs from the committed one"

    def _check_no_orphans(self, store: Any, directory: Path, at: str) -> None:
        there = store.keys()
        known = {path for key in there for path in self.files_of(directory, key)}
        files = (p for p in directory.rglob("*") if p.is_file())
        found = {p for p in files if not p.name.startswith(".spare")}
        assert found == known, f"{at}: files without a shard are left"

    def _check_continues(self, store: Any, directory: Path, at: str) -> None:
        store.create()
        with page_aligned(content_of(key_of(9))) as image:
            store.commit(key_of(9), image, manifest_of(key_of(9)))
        assert is_sound(store, key_of(9)), f"{at}: the next version is not sound"
        self.check_files(directory, key_of(9))


def _read_log(log: Path) -> tuple[list[str], list[str]]:
    """Operations that started, and operations that finished."""
    lines = log.read_text().splitlines() if log.exists() else []
    tried = [line.removeprefix("begin ") for line in lines if line.startswith("begin ")]
    finished = [line.removeprefix("end ") for line in lines if line.startswith("end ")]
    return tried, finished


def windows(data: bytes, size: int = WINDOW_BYTES) -> Content:
    """`data` as content of a put: new windows for every attempt."""

    def content() -> Iterator[memoryview]:
        for offset in range(0, len(data), size):
            yield memoryview(data)[offset : offset + size]

    return content


def put(backend: Backend, name: str, data: bytes, **options: Any) -> None:
    """Call `Backend.put` with plain bytes."""
    backend.put(name, windows(data), len(data), **options)


class BackendConformance:
    """Subclass it with a fixture `backend`: an empty one. Set missing capabilities to False."""

    exclusive_is_atomic = True
    """Of several exclusive puts at once exactly one succeeds. False: two jobs that start within
    about a second are not kept apart (see `storage.persistent.lease`)."""

    def test_a_file_is_read_back_whole_and_in_ranges(self, backend: Backend) -> None:
        """Reads past the end are short."""
        put(backend, "a/b/c", bytes(range(256)))
        assert backend.read("a/b/c") == bytes(range(256))
        assert backend.read("a/b/c", 10, 5) == bytes(range(10, 15))
        assert backend.read("a/b/c", 250, 100) == bytes(range(250, 256))
        assert backend.size("a/b/c") == 256

    def test_a_range_comes_into_memory_that_is_there(self, backend: Backend) -> None:
        """Up to the end of the file; the rest of the memory stays as it was."""
        put(backend, "file", bytes(range(256)))
        into = bytearray(b"-" * 20)
        window = memoryview(into)[5:15]
        assert backend.read_into("file", 10, window) == 10
        assert into == b"-" * 5 + bytes(range(10, 20)) + b"-" * 5
        assert backend.read_into("file", 253, window) == 3
        assert into[5:8] == bytes(range(253, 256))
        assert into[:5] == into[15:] == b"-" * 5
        assert backend.read_into("file", 0, window[:0]) == 0

    def test_content_of_many_windows_and_a_bit_is_whole(self, backend: Backend) -> None:
        """Windows are not mixed up."""
        data = b"".join(bytes([i]) * WINDOW_BYTES for i in range(3)) + b"end"
        put(backend, "large", data)
        assert backend.size("large") == len(data)
        assert backend.read("large") == data

    def test_the_number_of_bytes_announced_need_not_be_right(self, backend: Backend) -> None:
        """It is an estimate; too small or too large."""
        for announced in (1, 100, 3 * WINDOW_BYTES):
            backend.put("about", windows(b"x" * 1000, 100), announced)
            assert backend.read("about") == b"x" * 1000

    def test_an_empty_file_is_a_file(self, backend: Backend) -> None:
        """Marks have no content."""
        put(backend, "mark", b"")
        assert backend.sizes() == {"mark": 0}
        assert backend.read("mark") == b""

    def test_a_later_put_replaces_the_earlier(self, backend: Backend) -> None:
        """With longer, then shorter content."""
        for data in (b"one", b"the second", b"3"):
            put(backend, "name", data)
            assert backend.read("name") == data

    def test_a_put_that_fails_in_the_middle_leaves_the_old_file(self, backend: Backend) -> None:
        """With small and large content, over an existing file and without one."""

        def broken() -> Iterator[memoryview]:
            yield memoryview(bytes(WINDOW_BYTES))
            yield memoryview(bytes(WINDOW_BYTES))
            raise RuntimeError("the slot was refilled")

        put(backend, "old", b"old")
        for name in ("old", "new"):
            for announced in (100, 4 * WINDOW_BYTES):
                with pytest.raises(RuntimeError, match="refilled"):
                    backend.put(name, broken, announced)
        assert backend.sizes() == {"old": 3}
        assert backend.read("old") == b"old"

    def test_an_exclusive_put_does_not_replace(self, backend: Backend) -> None:
        """It creates a missing file."""
        put(backend, "lease", b"first", exclusive=True)
        with pytest.raises(FileExistsError):
            put(backend, "lease", b"second", exclusive=True)
        assert backend.read("lease") == b"first"
        backend.delete("lease")
        put(backend, "lease", b"third", exclusive=True)
        assert backend.read("lease") == b"third"

    def test_of_exclusive_puts_at_once_one_succeeds(self, backend: Backend) -> None:
        """From several threads, in several turns."""
        if not self.exclusive_is_atomic:
            pytest.skip("several exclusive puts at once may succeed here")
        together = threading.Barrier(4)

        def wins(name: str, number: int) -> bool:
            together.wait()
            with contextlib.suppress(FileExistsError):
                put(backend, name, bytes([number]), exclusive=True)
                return True
            return False

        with ThreadPoolExecutor(together.parties) as pool:
            for turn in range(5):
                won = [
                    *pool.map(wins, [f"lease{turn}"] * together.parties, range(together.parties))
                ]
                assert won.count(True) == 1
                assert backend.read(f"lease{turn}") == bytes([won.index(True)])

    def test_folders_list_their_direct_entries(self, backend: Backend) -> None:
        """Files with their sizes, folders with a slash; nothing for a missing folder."""
        for name in ("top", "v1/a", "v1/b", "v1/deep/c", "v10/a"):
            put(backend, name, name.encode())
        assert backend.sizes() == {"top": 3, "v1/": 0, "v10/": 0}
        assert backend.sizes("v1") == {"a": 4, "b": 4, "deep/": 0}
        assert backend.sizes("nowhere") == {}

    def test_a_missing_one_is_reported(self, backend: Backend) -> None:
        """FileNotFoundError; deleting a missing file does nothing."""
        with pytest.raises(FileNotFoundError):
            backend.read("nothing")
        with pytest.raises(FileNotFoundError):
            backend.read_into("nothing", 0, memoryview(bytearray(1)))
        with pytest.raises(FileNotFoundError):
            backend.size("nothing")
        backend.delete("nothing", "neither/here")
        backend.delete_folder("nothing")
        backend.discard("nothing")

    def test_deleting_removes_only_the_named_file(self, backend: Backend) -> None:
        """Names with the same start stay."""
        for name in ("v1/a", "v1/deep/b", "v10/a", "v1.manifest"):
            put(backend, name, b"x")
        backend.delete_folder("v1")
        assert backend.sizes() == {"v10/": 0, "v1.manifest": 1}
        backend.delete("v1.manifest", "v10/a")
        with pytest.raises(FileNotFoundError):
            backend.size("v10/a")

    def test_ranges_of_one_file_are_written_in_any_order(self, backend: Backend) -> None:
        """Only for a backend with `shared_writes`."""
        if not backend.shared_writes:
            with pytest.raises(NotImplementedError):
                backend.write_at("shared", 0, windows(b"x"))
            return
        backend.write_at("v1/shared", 4096, windows(b"second" * 1000, 4096))
        backend.write_at("v1/shared", 0, windows(b"first"))
        assert backend.read("v1/shared", 0, 5) == b"first"
        assert backend.read("v1/shared", 4096, 6000) == b"second" * 1000
        assert backend.size("v1/shared") == 4096 + 6000


PLACE = BlockId("job", "5eed", 1, 8, 0, 2, 3)
"""Identity of the blocks in these tests; item sizes vary."""
MAX_GROWTH = 1 << 26
"""Limit of the bytes decoded from a damaged block, however small."""


def noise(nbytes: int) -> bytes:
    """Bytes that cannot be compressed; the same every time."""
    return hashlib.shake_128(b"noise").digest(nbytes)


BLOCKS = {
    "nothing": b"",
    "one byte": b"\x07",
    "odd": noise(12_345),
    "noise": noise(1 << 19),
    "zeros": bytes(1 << 19),
    "numbers": b"".join((1000 + i % 91).to_bytes(4, "little") for i in range(1 << 17)),
}


class CodecConformance:
    """Subclass it and define how to make the codec; pytest finds the rest."""

    def make_codec(self) -> Codec:
        """A new codec, with parameters that differ from the defaults, if it has any."""
        raise NotImplementedError

    @pytest.fixture
    def codec(self) -> Codec:
        """The codec under test."""
        return self.make_codec()

    @pytest.fixture(params=BLOCKS)
    def block(self, request: pytest.FixtureRequest) -> bytes:
        """One of many contents."""
        return BLOCKS[request.param]

    @pytest.mark.parametrize("item_bytes", [1, 2, 4, 8, 16])
    def test_an_encoded_block_is_decoded_to_the_byte(
        self, codec: Codec, block: bytes, item_bytes: int
    ) -> None:
        """Another instance can decode, which has only the public parameters and no item size."""
        stored = bytes(codec.encode(memoryview(block), replace(PLACE, item_bytes=item_bytes)))
        reader = type(codec)(**codec.parameters())
        assert bytes(reader.decode(memoryview(stored), PLACE)) == block
        assert bytes(codec.decode(stored, PLACE)) == block

    def test_it_is_not_empty_and_not_longer_than_promised(self, codec: Codec, block: bytes) -> None:
        """Length 0 has another meaning, and writers choose offsets before lengths are known."""
        stored = codec.encode(block, PLACE)
        assert 0 < len(stored) <= len(block) + codec.most_extra_bytes

    def test_the_block_belongs_to_the_caller(self, codec: Codec) -> None:
        """The codec neither changes nor keeps it: the caller overwrites it at once."""
        content = BLOCKS["numbers"]
        buffer = bytearray(content)
        with memoryview(buffer) as view:
            stored = bytes(codec.encode(view, PLACE))
        assert buffer == content
        buffer[:] = bytes(len(buffer))
        assert bytes(codec.decode(stored, PLACE)) == content

    def test_parameters_are_public_and_fit_into_a_manifest(self, codec: Codec) -> None:
        """It also has a name that settings can use."""
        found = dict(codec.parameters())
        assert json.loads(json.dumps(found)) == found
        assert codec.name
        assert not set(codec.name) & set(" ,=")

    def test_threads_may_share_it(self, codec: Codec) -> None:
        """Each thread gets its own block back."""
        contents = [noise(1000 + i) * 20 for i in range(32)]

        def there_and_back(content: bytes) -> bytes:
            return bytes(codec.decode(codec.encode(content, PLACE), PLACE))

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(there_and_back, contents)) == contents

    def test_damage_is_no_disaster(self, codec: Codec) -> None:
        """Damage is reported, or gives a harmless result; no other error, and bounded memory."""
        stored = bytes(codec.encode(BLOCKS["numbers"], PLACE))
        chance = random.Random(0)
        for _ in range(200):
            damaged = bytearray(stored)
            if chance.random() < 0.3:
                del damaged[chance.randrange(1, len(damaged)) :]
            for _ in range(chance.randrange(1, 4)):
                damaged[chance.randrange(min(len(damaged), 64))] ^= 1 << chance.randrange(8)
            with contextlib.suppress(CorruptShardError):
                assert len(codec.decode(bytes(damaged), PLACE)) <= MAX_GROWTH

    def test_a_codec_that_claims_to_encrypt_is_tested_for_it(self, codec: Codec) -> None:
        """Encryption has to pass `HidingConformance`, too."""
        assert codec.hides == isinstance(self, HidingConformance)


class HidingConformance(CodecConformance):
    """Additional suite for encryption."""

    def test_an_encrypting_codec_hides_the_content(self, codec: Codec) -> None:
        """The same block is stored in two different ways, which reveal nothing of it. Each can be
        decoded in its own place only, and any change is detected."""
        content = BLOCKS["numbers"]
        once, again = (bytes(codec.encode(content, PLACE)) for _ in range(2))
        assert once != again
        assert not any(content[i : i + 8] in once for i in range(0, 4096, 8))
        for place in (
            replace(PLACE, index=4),
            replace(PLACE, shard=1),
            replace(PLACE, version=9),
            replace(PLACE, run_id="5eee"),
            replace(PLACE, job="another"),
        ):
            with pytest.raises((CorruptShardError, CodecError)):
                codec.decode(once, place)
        for at in (0, len(once) // 2, len(once) - 1):
            changed = bytearray(once)
            changed[at] ^= 1
            with pytest.raises(CorruptShardError):
                codec.decode(bytes(changed), PLACE)


class StageConformance:
    """Subclass it and define `make_stage`."""

    def make_stage(self, directory: Path) -> Stage:
        """The stage under test; it may use `directory`."""
        raise NotImplementedError

    @pytest.fixture
    def versions(self, tmp_path: Path) -> list[LocalVersion]:
        """Three versions of a job, on a local level."""
        from .tiny_job import TinyJob

        settings: dict[str, Any] = {"agent": "inline", "local_keep": 3}
        with TinyJob(tmp_path / "job", shm_dir=str(tmp_path), **settings) as job:
            job.run(3)
        return self._versions(tmp_path / "job")

    def _versions(self, directory: Path) -> list[LocalVersion]:
        store = LocalStore(directory)

        @contextlib.contextmanager
        def opened(key: ShardKey) -> Iterator[tuple[memoryview, bytes]]:
            self.opened += 1
            with open_shard(store, key) as (image, manifest):
                self.open_now += 1
                yield image, manifest
                self.open_now -= 1

        self.opened = self.open_now = 0
        keys = store.keys()
        ids = sorted({key.id for key in keys})
        assert len(ids) == 3
        return [
            LocalVersion(directory, tuple(key for key in keys if key.id == id_), opened)
            for id_ in ids
        ]

    @pytest.fixture
    def stage(self, tmp_path: Path) -> Stage:
        """A new stage."""
        return self.make_stage(tmp_path / "stage")

    def test_it_takes_in_one_version_after_the_other(
        self, stage: Stage, versions: list[LocalVersion]
    ) -> None:
        """The shards stay as they are, and none stays open."""
        before = _contents(versions[0].directory)
        for version in versions:
            stage.accept(version)
        assert _contents(versions[0].directory) == before
        assert self.open_now == 0

    def test_a_version_may_come_twice_and_others_never(
        self, stage: Stage, versions: list[LocalVersion], tmp_path: Path
    ) -> None:
        """As after an agent that was killed, of which the stage knows nothing."""
        stage.accept(versions[0])
        again = self.make_stage(tmp_path / "stage")
        again.accept(versions[0])
        again.accept(versions[2])

    def test_it_does_not_hide_that_a_shard_is_damaged(
        self, stage: Stage, versions: list[LocalVersion]
    ) -> None:
        """A stage that reads a damaged shard has not done its work; it takes in the next one."""
        (key,) = versions[1].shards
        file = versions[1].directory / f"{key.stem}.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        looked = self.opened
        with contextlib.suppress(CorruptShardError):
            stage.accept(versions[1])
            assert self.opened == looked, "it read the shard, and says that all is well"
        stage.accept(versions[2])

    def test_it_ends_when_it_is_told_to(self, stage: Stage, versions: list[LocalVersion]) -> None:
        """And the version after that is taken in as usual, by the next agent."""

        def end(nbytes: int) -> None:
            raise StageCancelledError("the agent ends")

        version = versions[0]
        told = LocalVersion(version.directory, version.shards, version.open, end)
        with contextlib.suppress(StageCancelledError):
            stage.accept(told)
            assert told.stored_bytes == 0, "a stage that counts its bytes lets the error out"
        stage.accept(versions[1])


def _contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}
