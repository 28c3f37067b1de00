"""On a local level in memory a commit copies nothing, and no committed byte ever changes."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.store.storage.test_full_and_read_only import fill_up
from tests.support.processes import end, python
from tests.support.shards import manifest
from tierckpt import _faults
from tierckpt.format import PAGE_BYTES, ShardKey, VersionId
from tierckpt.storage import (
    ImageFile,
    JobDirectory,
    LocalStore,
    Slot,
    SlotPool,
    mount_of,
    seal_area_bytes,
    slots,
)
from tierckpt.storage.slots import memory_kind
from tierckpt.testing import TinyJob, fired, run_in_child, train

IMAGE_BYTES = 2 * PAGE_BYTES
SEAL_BYTES = seal_area_bytes(1)
STEPS = 6


def key(version: int) -> ShardKey:
    return ShardKey(VersionId(1, version), 0, 1)


@pytest.fixture
def store(small_tmpfs: Path) -> LocalStore:
    """On another mount than the slots' seal areas: a hard link between the two is impossible."""
    return LocalStore(small_tmpfs / "ckpts")


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def pool(shm_dir: Path, store: LocalStore, notices: list[str]) -> Iterator[SlotPool]:
    job = JobDirectory.at(shm_dir, "job")
    job.create()
    made = SlotPool(job, 0, 2, lambda text, severity: notices.append(text), store)
    made.adopt()
    yield made
    made.close(remove=True)


def fill(pool: SlotPool, version: int, nbytes: int = IMAGE_BYTES) -> Slot:
    """A snapshot from choice to seal; its bytes are the version's number."""
    slot = pool.choose(set(), set(), SEAL_BYTES, nbytes)
    with slot.image() as image:
        image[:] = bytes([version]) * nbytes
    slot.seal(manifest(version).encode())
    pool.filled(slot, key(version).id)
    return slot


def commit(store: LocalStore, slot: Slot, version: int) -> None:
    assert slot.file is not None
    store.commit_file(key(version), slot.file.path, manifest(version).encode())


def inode(path: Path) -> int:
    return path.stat().st_ino


def image_of(slot: Slot) -> Path:
    assert slot.file is not None
    return slot.file.path


# --- one slot, one commit ------------------------------------------------------------------------


def test_a_commit_is_another_name_of_the_same_file(pool: SlotPool, store: LocalStore) -> None:
    slot = fill(pool, 1)
    blocks = os.statvfs(store.directory).f_bfree
    commit(store, slot, 1)
    assert inode(store._data(key(1))) == inode(image_of(slot))
    assert store._data(key(1)).read_bytes() == b"\1" * IMAGE_BYTES
    assert store.read_manifest(key(1)) == manifest(1).encode()
    assert blocks - os.statvfs(store.directory).f_bfree <= 1, "the manifest's page is all it took"


def test_a_committed_file_is_never_overwritten(pool: SlotPool, store: LocalStore) -> None:
    for version in range(1, 6):
        commit(store, fill(pool, version), version)
    for version in range(1, 6):
        assert store._data(key(version)).read_bytes() == bytes([version]) * IMAGE_BYTES


def test_a_slot_that_was_not_committed_keeps_its_file(pool: SlotPool) -> None:
    first = fill(pool, 1)
    before = inode(image_of(first))
    fill(pool, 2)
    assert inode(image_of(fill(pool, 3))) == before


def test_a_slot_of_a_retired_version_keeps_its_file(pool: SlotPool, store: LocalStore) -> None:
    slot = fill(pool, 1)
    before = inode(image_of(slot))
    commit(store, slot, 1)
    store.retire(key(1))
    fill(pool, 2)
    assert slot.manifest() == manifest(1), "retiring the copy on disk leaves memory as it is"
    assert inode(image_of(fill(pool, 3))) == before


def test_a_retired_file_is_taken_before_a_new_one_is_made(
    pool: SlotPool, store: LocalStore
) -> None:
    commit(store, fill(pool, 1), 1)
    fill(pool, 2)
    retired = inode(store._data(key(1)))
    commit(store, fill(pool, 3), 3)  # which gave up the file of v1
    store.retire(key(1))
    fill(pool, 4)
    assert inode(image_of(fill(pool, 5))) == retired
    assert store._data(key(3)).read_bytes() == b"\3" * IMAGE_BYTES


def test_somebodys_hard_link_keeps_the_bytes(pool: SlotPool, store: LocalStore) -> None:
    commit(store, fill(pool, 1), 1)
    kept = store.directory / "kept.safetensors"
    os.link(store._data(key(1)), kept)
    store.retire(key(1))
    for version in (2, 3, 4):
        fill(pool, version)
    assert kept.read_bytes() == b"\1" * IMAGE_BYTES


def test_files_that_go_round_are_mapped_once(
    pool: SlotPool, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    really = mmap.mmap

    def counted(fd: int, *arguments: Any, **keywords: Any) -> mmap.mmap:
        made.append(fd)
        return really(fd, *arguments, **keywords)

    monkeypatch.setattr(slots.mmap, "mmap", counted)
    for version in range(1, 20):
        commit(store, fill(pool, version), version)
        if version > 2:
            store.retire(key(version - 2))
    seals = 19  # one for every segment; slots map these themselves
    assert len(made) - seals <= 4, "two slots, two versions, and what is on its way"
    for version in (18, 19):
        assert store._data(key(version)).read_bytes() == bytes([version]) * IMAGE_BYTES


def test_memory_of_a_removed_file_is_given_back(
    pool: SlotPool, store: LocalStore, small_tmpfs: Path
) -> None:
    """A mapping alone would keep it, and no list of files would show it."""

    def free() -> int:
        return os.statvfs(small_tmpfs).f_bfree

    before = free()
    for version in range(1, 9):
        commit(store, fill(pool, version), version)
    for version in range(1, 9):
        store.retire(key(version))
    store.drop_spare(0)
    fill(pool, 9)
    assert before - free() <= 2 * IMAGE_BYTES // PAGE_BYTES + 1, "two slots, and the folder"


def test_a_retired_file_that_somebody_linked_is_left_to_them(
    pool: SlotPool, store: LocalStore
) -> None:
    commit(store, fill(pool, 1), 1)
    for version in (2, 3):
        fill(pool, version)
    store.retire(key(1))
    kept = store.directory / "kept.safetensors"
    os.link(store._spare(key(1)), kept)
    commit(store, fill(pool, 4), 4)
    for version in (5, 6):  # the second of these would take it
        fill(pool, version)
    assert kept.read_bytes() == b"\1" * IMAGE_BYTES
    assert not store._spare(key(1)).exists(), "it was looked at"


def test_a_state_of_another_size_gets_another_file(pool: SlotPool, store: LocalStore) -> None:
    """The file has exactly the shard's length, or readers of safetensors refuse it."""
    commit(store, fill(pool, 1), 1)
    fill(pool, 2)
    for version, nbytes in ((3, 3 * PAGE_BYTES), (4, PAGE_BYTES)):
        slot = fill(pool, version, nbytes)
        assert image_of(slot).stat().st_size == slot.image_bytes == nbytes
    assert store._data(key(1)).read_bytes() == b"\1" * IMAGE_BYTES


def test_an_image_that_somebody_removed_is_made_again(pool: SlotPool) -> None:
    slot = fill(pool, 1)
    fill(pool, 2)
    image_of(slot).unlink()
    assert image_of(fill(pool, 3)).read_bytes() == b"\3" * IMAGE_BYTES


def test_a_version_can_be_committed_again(pool: SlotPool, store: LocalStore) -> None:
    """An agent may die between the shard's name and the manifest."""
    slot = fill(pool, 1)
    commit(store, slot, 1)
    store._manifest(key(1)).unlink()
    commit(store, slot, 1)
    assert store.has(key(1))
    assert inode(store._data(key(1))) == inode(image_of(slot))
    assert image_of(slot).stat().st_nlink == 2, "no third name is left"


@pytest.mark.parametrize("op", ["open", "fsync", "rename", "write_manifest"])
def test_a_commit_that_fails_leaves_the_slot_as_it_was(
    op: str, pool: SlotPool, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = fill(pool, 1)
    monkeypatch.setattr(_faults, "_rules", _faults.parse(f"eio@file:op={op}"))
    with pytest.raises(OSError, match="injected"):
        commit(store, slot, 1)
    assert store.keys() == []
    assert [p for p in store.directory.iterdir() if p != image_of(slot)] == []
    assert image_of(slot).read_bytes() == b"\1" * IMAGE_BYTES


# --- memory without an owner ---------------------------------------------------------------------


def test_a_successor_takes_over_slots_and_their_files(
    pool: SlotPool, store: LocalStore, shm_dir: Path
) -> None:
    commit(store, fill(pool, 1), 1)
    fill(pool, 2)
    pool.close(remove=False)
    pool.adopt()
    slot = pool.find(key(2).id)
    assert slot is not None
    with slot.image() as image:
        assert image == b"\2" * IMAGE_BYTES
    fill(pool, 3)
    assert store._data(key(1)).read_bytes() == b"\1" * IMAGE_BYTES


def test_files_of_a_dead_job_are_removed_with_its_slots(
    pool: SlotPool, store: LocalStore, shm_dir: Path
) -> None:
    commit(store, fill(pool, 1), 1)
    fill(pool, 2)
    pool.close(remove=False)
    other = JobDirectory.at(shm_dir, "other")
    assert other.remove_dead_jobs(linger_seconds=-1) == ["job"]
    assert not pool.job.path.exists()
    assert names(store) == {store._data(key(1)).name, store._manifest(key(1)).name}


def test_files_of_ranks_that_are_no_more_are_removed_with_their_slots(
    pool: SlotPool, store: LocalStore
) -> None:
    gone = SlotPool(pool.job, 7, 2, lambda *_: None, store)
    half_made = pool.job.slot_path(7, 1)
    fill(gone, 1)
    ImageFile.make(half_made, store, 7, IMAGE_BYTES)  # killed before there was a slot
    gone.close(remove=False)
    pool.job.remove_orphans()
    assert names(store) == set()
    assert list(pool.job.path.iterdir()) == []


def test_after_a_reboot_files_without_slots_are_removed_but_not_a_living_ranks(
    pool: SlotPool, store: LocalStore
) -> None:
    """Persistent memory outlives a reboot; the memory of the seal areas does not."""
    commit(store, fill(pool, 1), 1)
    gone = SlotPool(pool.job, 7, 2, lambda *_: None, store)
    fill(gone, 1)
    living = SlotPool(pool.job, 8, 2, lambda *_: None, store)
    kept = image_of(fill(living, 1))
    for each in (pool, gone, living):
        each.close(remove=False)
    shutil.rmtree(pool.job.path)
    rank_8 = python(
        "import sys; from pathlib import Path; "
        "from tierckpt.storage.job_directory import JobDirectory\n"
        "job = JobDirectory(Path(sys.argv[1]), 'job'); job.lock_rank(8)\n"
        "print('locked', flush=True); sys.stdin.read()",
        pool.job.root,
    )
    try:
        assert rank_8.stdout is not None
        assert rank_8.stdout.readline() == "locked\n"
        pool.adopt()
        committed = {store._data(key(1)).name, store._manifest(key(1)).name}
        assert names(store) == {*committed, kept.name}
    finally:
        end(rank_8)
        shutil.rmtree(pool.job.path)


def names(store: LocalStore) -> set[str]:
    return {p.name for p in store.directory.iterdir()}


# --- a whole job ---------------------------------------------------------------------------------


@pytest.fixture
def settings(shm_dir: Path) -> dict[str, Any]:
    return {"shm_dir": str(shm_dir)}


def test_a_killed_job_finds_it_in_memory_and_a_rebooted_one_on_local(
    small_tmpfs: Path, shm_dir: Path, settings: dict[str, Any], marks: Path
) -> None:
    course = {step: TinyJob(None).run(step).fingerprint() for step in range(STEPS, 2 * STEPS + 1)}
    path = small_tmpfs / "ckpts"
    rule = f"kill@barrier:version={STEPS}"
    arguments = (str(path), 2 * STEPS, settings)
    assert run_in_child(train, *arguments, rules=rule, marks=marks) < 0
    assert len(fired(marks)) == 1
    with TinyJob(path, seed=9, **settings) as job:
        restored = job.restore()
        assert restored.levels == {"memory": 1}
        assert STEPS - 1 <= int(restored) <= STEPS
        job.run(2 * STEPS)
        assert job.fingerprint() == course[2 * STEPS]
    assert list(shm_dir.rglob("*")) == [], "as after a reboot"
    assert not list(path.glob(".*")), "nothing is left but what was committed"
    newest = path / f"{ShardKey(VersionId(2, 2 * STEPS), 0, 1).stem}.safetensors"
    with safe_open(newest, framework="pt") as file:
        assert "rank_state" in file.keys()  # noqa: SIM118
    with TinyJob(path, seed=9, **settings) as job:
        restored = job.restore()
        assert (int(restored), restored.levels) == (2 * STEPS, {"local": 1})
        assert job.fingerprint() == course[2 * STEPS]


def test_modules_write_as_ever(small_tmpfs: Path, settings: dict[str, Any]) -> None:
    path = small_tmpfs / "ckpts"
    with TinyJob(path, **settings, local_codecs="zstd") as job:
        job.run(STEPS)
        job.settle()
        expected = job.fingerprint()
        assert all(slot.file is None for slot in job.checkpointer._pool.slots if slot is not None)
        assert list(path.glob("*.encoded"))
        job.checkpointer.abandon()
    with TinyJob(path, seed=9, **settings) as job:
        assert job.restore() == STEPS
        assert job.fingerprint() == expected
        job.run(2 * STEPS)  # slots of the run before, which are not in place, are replaced
        job.settle()
        assert all(slot.file is not None for slot in job.checkpointer._pool.slots if slot)
        last = job.fingerprint()
        job.checkpointer.abandon()
    with TinyJob(path, seed=9, **settings, local_codecs="zstd") as job:
        assert job.restore() == 2 * STEPS
        assert job.fingerprint() == last
        job.run(3 * STEPS)
        assert not job.heard("failed")


def test_without_room_slots_are_elsewhere_and_the_level_reports_the_missing_bytes(
    small_tmpfs: Path, settings: dict[str, Any]
) -> None:
    path, filler = small_tmpfs / "ckpts", small_tmpfs / "somebody else's"
    course = {step: TinyJob(None).run(step).fingerprint() for step in (2 * STEPS, 3 * STEPS)}
    with TinyJob(path, **settings, local_keep=100) as job:
        job.run(STEPS)
        job.settle()
        fill_up(filler)
        job.run(2 * STEPS)
        job.settle()
        assert job.fingerprint() == course[2 * STEPS]
        assert not job.heard("failed", "memory")
        failures = job.heard("failed", "local")
        assert failures
        assert all("No space left on device" in e.message for e in failures)
        assert sum("no slot can be made" in e.message for e in job.heard("notice")) == 1
        for file in (filler, small_tmpfs / "one more"):
            file.unlink()
        job.run(3 * STEPS)
        job.settle()
        assert job.heard("committed", "local")[-1].version == 3 * STEPS
    with TinyJob(path, seed=9, **settings) as job:
        assert job.restore() == 3 * STEPS
        assert job.fingerprint() == course[3 * STEPS]


def test_an_image_that_was_cut_is_not_trusted(small_tmpfs: Path, settings: dict[str, Any]) -> None:
    path = small_tmpfs / "ckpts"
    with TinyJob(path, **settings) as job:
        job.run(STEPS)
        job.settle()
        slot = job.checkpointer._pool.find(VersionId(1, STEPS))
        assert slot is not None
        cut = image_of(slot)
        job.checkpointer.abandon()
    os.truncate(cut, PAGE_BYTES)
    with TinyJob(path, seed=9, **settings) as job:
        restored = job.restore()
        assert int(restored) == STEPS - 1
        assert any("truncated" in text for text in restored.rejected)
        job.run(2 * STEPS)
        assert job.fingerprint() == TinyJob(None).run(2 * STEPS).fingerprint()


# --- what is memory ------------------------------------------------------------------------------

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/root rw
24 22 0:22 / /dev/shm rw - tmpfs tmpfs rw
30 22 0:30 / /mnt/a\\040b rw shared:1 master:2 - xfs /dev/pmem0 rw,dax=always
31 30 0:31 / /mnt/a\\040b/scratch rw - tmpfs tmpfs rw,size=1024k
32 22 0:32 / /mnt/over rw - tmpfs tmpfs rw
33 22 0:33 / /mnt/over rw - ext4 /dev/sdb rw
34 22 0:34 / /mnt/größe rw - tmpfs tmpfs rw
""".splitlines()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me/ckpts", "ext4"),
        ("/dev/shm", "tmpfs"),
        ("/dev/shm/ckpts/deep", "tmpfs"),
        ("/dev/shmucks", "ext4"),
        ("/mnt/a b/ckpts", "xfs"),
        ("/mnt/a b/scratch/ckpts", "tmpfs"),
        ("/mnt/over/ckpts", "ext4"),
        ("/mnt/größe/ckpts", "tmpfs"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    assert mount_of(path, MOUNTS).kind == kind


def test_a_tmpfs_is_memory_also_through_a_symbolic_link(small_tmpfs: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(small_tmpfs)
    assert memory_kind(small_tmpfs) == memory_kind(tmp_path / "link") == "tmpfs"


def test_only_a_file_that_may_be_mapped_in_sync_is_dax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses MAP_SYNC for any other. There is no such device here: half is
    simulated."""
    monkeypatch.setattr(slots, "filesystem_of", lambda path: "ext4")
    assert memory_kind(tmp_path) == ""
    asked = []

    class Granted:
        def __init__(self, fd: int, nbytes: int, flags: int) -> None:
            asked.append(flags)

        def close(self) -> None:
            asked.append(0)

    monkeypatch.setattr(mmap, "mmap", Granted)
    assert memory_kind(tmp_path) == "dax"
    assert asked == [0x80003, 0], "MAP_SHARED_VALIDATE, or the kernel would ignore MAP_SYNC"


def test_this_kernel_grants_it_for_no_other_file(small_tmpfs: Path, tmp_path: Path) -> None:
    """Nothing is simulated here: tmpfs is memory, and does not last."""
    for directory in (small_tmpfs, tmp_path):
        with (directory / "file").open("w+b") as file:
            file.truncate(PAGE_BYTES)
            with pytest.raises(OSError, match="not supported") as caught:
                slots.map_in_sync(file.fileno())
            assert caught.value.errno == errno.EOPNOTSUPP


def test_a_directory_where_nothing_can_be_made_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, "no")

    monkeypatch.setattr(slots, "filesystem_of", lambda path: "ext4")
    monkeypatch.setattr(slots.tempfile, "TemporaryFile", refuse)
    assert memory_kind(tmp_path) == ""


# --- room ----------------------------------------------------------------------------------------


def large_model() -> torch.nn.Module:
    return torch.nn.Linear(100, 300)  # 121 kB, and twice that for Adam: three images fill a MB


def test_too_little_room_for_slots_and_versions_is_reported_at_the_start(
    small_tmpfs: Path, settings: dict[str, Any]
) -> None:
    path = small_tmpfs / "ckpts"
    with TinyJob(path, **settings, model=large_model()) as job:
        (said,) = [e.message for e in job.heard("notice") if "bytes free" in e.message]
        assert str(path) in said
        assert str(5 * 3 * 4 * 300 * 101) in said, "two slots, two versions, one given back"
    with TinyJob(path, **settings, model=large_model(), local_keep=1, slots=2) as job:
        assert [e.message for e in job.heard("notice") if "bytes free" in e.message] != []
