"""The pool never chooses a slot of a version still needed."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierckpt
from tests.support.processes import end, python
from tests.support.shards import manifest
from tierckpt.checkpointer import held_bytes
from tierckpt.config import Config
from tierckpt.format import PAGE_BYTES, VersionId
from tierckpt.group import Node
from tierckpt.storage import (
    JobDirectory,
    NoSlotError,
    Room,
    Slot,
    SlotPool,
    lock_shared,
    seal_area_bytes,
    slot_pool,
    unlock,
)
from tierckpt.testing import ThreadGroup, TinyJob, run_ranks

IMAGE_BYTES = 2 * PAGE_BYTES

SEAL_BYTES = seal_area_bytes(1)


def v(version: int) -> VersionId:
    return VersionId(1, version)


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def pool(shm_dir: Path, notices: list[str]) -> Iterator[SlotPool]:
    job = JobDirectory.at(shm_dir, "job")
    job.create()
    made = SlotPool(job, 0, 2, lambda text, severity: notices.append(text))
    yield made
    made.close(remove=True)


def fill(pool: SlotPool, version: int, protected: set[VersionId] | None = None) -> Slot:
    """A snapshot from choice to seal."""
    slot = pool.choose(protected or set(), set(), SEAL_BYTES, IMAGE_BYTES)
    slot.seal(manifest(version).encode())
    pool.filled(slot, v(version))
    return slot


def test_a_chosen_slot_is_void_from_that_instant(pool: SlotPool) -> None:
    for version in (1, 2):
        fill(pool, version)
    slot = pool.choose({v(2)}, set(), SEAL_BYTES, IMAGE_BYTES)
    assert slot.manifest() is None
    assert pool.find(v(1)) is None


def test_a_protected_slot_is_never_chosen(pool: SlotPool) -> None:
    fill(pool, 1)
    fill(pool, 2)
    assert fill(pool, 3, protected={v(1)}).name == "r00000.1"
    assert pool.find(v(1)) is not None
    with pytest.raises(NoSlotError):
        pool.choose({v(1), v(3)}, set(), SEAL_BYTES, IMAGE_BYTES)
    assert [slot.manifest() for slot in pool.slots if slot] == [manifest(1), manifest(3)]


def test_a_slot_that_our_agent_reads_is_never_chosen(pool: SlotPool) -> None:
    name = fill(pool, 1).name
    fill(pool, 2)
    assert pool.choose(set(), {name}, SEAL_BYTES, IMAGE_BYTES).name != name
    with pytest.raises(NoSlotError):
        pool.choose(set(), {name}, SEAL_BYTES, IMAGE_BYTES)


def test_a_slot_being_filled_is_never_chosen(pool: SlotPool) -> None:
    first = pool.choose(set(), set(), SEAL_BYTES, IMAGE_BYTES)
    second = pool.choose(set(), set(), SEAL_BYTES, IMAGE_BYTES)
    assert first is not second
    with pytest.raises(NoSlotError):
        pool.choose(set(), set(), SEAL_BYTES, IMAGE_BYTES)
    pool.filled(first, None)  # it failed: the slot is free, and holds nothing
    assert pool.choose(set(), set(), SEAL_BYTES, IMAGE_BYTES) is first


def test_a_slot_that_an_agent_of_the_previous_run_reads_is_never_chosen(
    pool: SlotPool, shm_dir: Path
) -> None:
    for version in (1, 2):
        fill(pool, version)
    successor = SlotPool(pool.job, 0, 2, lambda *_: None)
    pool.close(remove=False)
    reader = python(
        "import sys; from pathlib import Path; "
        "from tierckpt.storage.slots import Slot\n"
        "from tierckpt.storage.file_lock import lock_shared\n"
        "slot = Slot.open(Path(sys.argv[1])); lock_shared(slot.fd); print('pinned', flush=True)\n"
        "sys.stdin.read()",
        pool.job.slot_path(0, 0),
    )
    assert reader.stdout is not None
    try:
        assert reader.stdout.readline() == "pinned\n"
        successor.adopt()
        assert successor.find(v(1)) is not None
        assert not successor.has_room([v(2)], set())
        assert successor.choose(set(), set(), SEAL_BYTES, IMAGE_BYTES).name == "r00000.1"
        with pytest.raises(NoSlotError):
            successor.choose(set(), set(), SEAL_BYTES, IMAGE_BYTES)
    finally:
        end(reader)
    assert successor.choose(set(), set(), SEAL_BYTES, IMAGE_BYTES).name == "r00000.0"
    successor.close(remove=True)


def test_a_successor_knows_the_contents_of_the_slots(pool: SlotPool) -> None:
    fill(pool, 1)
    damaged = fill(pool, 2)
    damaged.seal(b"not a manifest")
    pool.close(remove=False)
    pool.adopt()
    assert pool.find(v(1)) is not None
    assert pool.find(v(2)) is None
    assert pool.choose({v(1)}, set(), SEAL_BYTES, IMAGE_BYTES).name == damaged.name


def test_pages_are_mapped_when_a_slot_is_chosen(pool: SlotPool) -> None:
    """Not when a restart adopts it, which would take time before the first step."""
    nbytes = 1 << 20
    for version in (1, 2):
        pool.filled(pool.choose(set(), set(), SEAL_BYTES, nbytes), v(version))
    pool.close(remove=False)
    pool.adopt()
    adopted = pool.slots[0]
    assert adopted is not None
    assert mapped_bytes(adopted) <= nbytes // 4
    assert pool.choose(set(), set(), SEAL_BYTES, nbytes) is adopted
    assert mapped_bytes(adopted) >= nbytes


def mapped_bytes(slot: Slot) -> int:
    """Bytes of the slot with an entry in this process's page table."""
    begin = ctypes.addressof(ctypes.c_char.from_buffer(slot._map))
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if line.startswith(f"{begin:x}-"):
                return next(int(each.split()[1]) * 1024 for each in lines if each[:4] == "Rss:")
    raise AssertionError("the slot is not mapped")


def test_a_slot_of_the_wrong_size_is_made_again(pool: SlotPool) -> None:
    small = fill(pool, 1)
    fill(pool, 2)
    large = pool.choose({v(2)}, set(), SEAL_BYTES, 10 * IMAGE_BYTES)
    assert large is not small
    assert large.image_bytes == 10 * IMAGE_BYTES
    pool.filled(large, v(3))
    assert pool.choose({v(2)}, set(), SEAL_BYTES, IMAGE_BYTES).image_bytes == IMAGE_BYTES, (
        "memory is given back"
    )
    assert len(pool.job.segments()) == 2


@given(
    st.lists(st.tuples(st.sampled_from(["none", "first", "second"]), st.booleans()), max_size=12)
)
def test_room_is_promised_only_when_there_is_some(turns: list[tuple[str, bool]]) -> None:
    """`choose` keeps the promises of `has_room` about the needed versions."""
    folder = Path(os.environ["TIERCKPT_SHM_DIR"])
    pool = SlotPool(JobDirectory.at(folder, "room"), 0, 2, lambda *_: None)
    pool.job.create()
    try:
        for version, (needed, pinned) in enumerate(turns, start=1):
            held = [i for i in pool._held if i is not None]
            wanted = {"none": [], "first": held[:1], "second": held[1:2]}[needed]
            names = {"r00000.0"} if pinned else set()
            promised = pool.has_room(wanted, names)
            try:
                slot = pool.choose(set(wanted), names, SEAL_BYTES, PAGE_BYTES)
            except NoSlotError:
                assert not promised
            else:
                assert promised
                pool.filled(slot, v(version))
                assert all(pool.find(i) for i in wanted)
    finally:
        pool.close(remove=True)
        pool.job.remove()


# --- an agent reads a slot for long --------------------------------------------------------------


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slot read is read for long."""
    monkeypatch.setattr(slot_pool, "LATE_SECONDS", -1.0)


@pytest.mark.usefixtures("late")
def test_versions_continue_in_one_more_slot_until_the_reader_is_done(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_pool, "KEPT_SECONDS", 0.0)
    read = fill(pool, 1).name
    fill(pool, 2)
    for version in range(3, 9):
        assert pool.has_room([v(version - 1)], {read})
        slot = pool.choose({v(version - 1)}, {read}, SEAL_BYTES, IMAGE_BYTES)
        assert slot.name != read
        slot.seal(manifest(version).encode())
        pool.filled(slot, v(version))
        assert pool.find(v(version - 1)) is not None
    assert pool.find(v(1)) is not None
    assert len(pool.job.segments()) == 3
    for version in (9, 10, 11):
        fill(pool, version, {v(version - 1)})  # the reader is done
    assert len(pool.job.segments()) == 2, "memory is given back"
    assert pool.find(v(10)) is not None


@pytest.mark.usefixtures("late")
def test_a_successor_finds_the_version_in_the_one_more_slot_and_keeps_it(pool: SlotPool) -> None:
    read = fill(pool, 1).name
    fill(pool, 2)
    slot = pool.choose({v(2)}, {read}, SEAL_BYTES, IMAGE_BYTES)
    slot.seal(manifest(3).encode())
    pool.filled(slot, v(3))
    pool.close(remove=False)
    pool.adopt()
    assert pool.find(v(3)) is not None
    for version in (4, 5):
        fill(pool, version, {v(version - 1)})
        assert pool.find(v(version - 1)) is not None
    assert len(pool.job.segments()) == 3, "no version of this run is complete yet, as far as known"
    pool.drop_adopted()
    for version in (6, 7, 8):
        fill(pool, version, {v(version - 1)})
    assert len(pool.job.segments()) == 2


@pytest.mark.usefixtures("late")
def test_without_memory_for_one_more_the_slot_is_taken_away_and_later_the_next_time(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, because a slow disk would never complete a version otherwise."""
    monkeypatch.setattr(slot_pool, "memory_room", lambda: Room(0, "here"))
    read = fill(pool, 1)
    fill(pool, 2)
    patience = pool._taken_seconds
    with pytest.raises(NoSlotError):
        pool.choose({v(2)}, {read.name}, SEAL_BYTES, IMAGE_BYTES)
    assert not pool.has_room([v(2)], {read.name})
    pool._read_since[0] -= patience
    assert pool.has_room([v(2)], {read.name})
    assert "is given up" in pool.outlook
    sealed = read.manifest_bytes()
    assert pool.choose({v(2)}, {read.name}, SEAL_BYTES, IMAGE_BYTES) is read
    assert read.manifest_bytes() != sealed, "its reader sees that before it commits"
    pool.filled(read, v(3))
    pool.filled(pool.choose({v(3)}, {read.name}, SEAL_BYTES, IMAGE_BYTES), v(4))
    assert pool.choose({v(4)}, {read.name}, SEAL_BYTES, IMAGE_BYTES) is read, "still ours"
    pool.filled(read, v(5))
    assert pool.has_room([v(5)], set()), "the reader has given up"
    pool.has_room([v(5)], {read.name})
    pool._read_since[0] -= patience
    assert not pool.has_room([v(4)], {read.name}), "twice the patience"


@pytest.mark.usefixtures("late")
def test_private_memory_is_not_taken_from_a_reader(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the reader's copy would survive this process."""
    read = fill(pool, 1)
    fill(pool, 2)
    pool.volatile = True
    monkeypatch.setattr(slot_pool, "memory_room", lambda: Room(0, "here"))
    monkeypatch.setattr(slot_pool, "TAKEN_SECONDS", 0.0)
    assert not pool.has_room([v(2)], {read.name})
    assert "no version is taken" in pool.outlook


# --- shared memory is too small ------------------------------------------------------------------


def test_without_room_the_slot_is_private_and_the_notice_says_how_much_is_missing(
    small_tmpfs: Path, notices: list[str]
) -> None:
    job = JobDirectory.at(small_tmpfs, "job")
    job.create()
    pool = SlotPool(job, 0, 2, lambda text, severity: notices.append(text))
    try:
        slot = pool.choose(set(), set(), SEAL_BYTES, 10_000_000)
        assert slot.path is None
        assert slot.image_bytes == 10_000_000
        assert pool.volatile
        (said,) = notices
        assert str(10_000_000 + slot.seal_bytes) in said
        assert str(small_tmpfs) in said
        assert "--shm-size" in said
        pool.choose(set(), set(), SEAL_BYTES, 10_000_000)
        assert len(notices) == 1
        assert job.segments() == [], "nothing half-made is left"
    finally:
        pool.close(remove=True)


def test_an_error_not_about_room_is_an_error(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(Slot, "create", refuse)
    with pytest.raises(PermissionError):
        pool.choose(set(), set(), SEAL_BYTES, IMAGE_BYTES)
    assert not pool.volatile
    monkeypatch.undo()
    assert pool.choose(set(), set(), SEAL_BYTES, IMAGE_BYTES).path is not None


def wide_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(12, 600), torch.nn.Linear(600, 4))  # 41 kB


def test_a_job_without_room_in_shared_memory_still_checkpoints_to_local(
    small_tmpfs: Path, tmp_path: Path
) -> None:
    filler = small_tmpfs / "somebody else's"
    filler.write_bytes(bytes(small_tmpfs_free(small_tmpfs)))
    with TinyJob(tmp_path / "ckpts", model=wide_model(), shm_dir=str(small_tmpfs)) as job:
        (said,) = [e.message for e in job.heard("notice")]
        assert f"{small_tmpfs} has " in said, "at attach, before a slot is made"
        assert "private memory" in said
        job.run(6)
        expected = job.fingerprint()
    assert not job.heard("failed")
    with TinyJob(tmp_path / "ckpts", seed=9, model=wide_model(), shm_dir=str(small_tmpfs)) as job:
        restored = job.restore()
        assert (int(restored), restored.levels) == (6, {"local": 1})
        assert job.fingerprint() == expected


@pytest.mark.parametrize(("free_kilobytes", "enough"), [(150, False), (280, False), (420, True)])
def test_the_slots_of_all_ranks_of_a_node_need_room(
    free_kilobytes: int, enough: bool, small_tmpfs: Path, tmp_path: Path
) -> None:
    """One rank's would fit into 280 kB, and the two ranks' would not."""
    filler = small_tmpfs / "somebody else's"
    filler.write_bytes(bytes(small_tmpfs_free(small_tmpfs) - free_kilobytes * 1000))

    def attach(group: ThreadGroup) -> list[str]:
        """The notice before the first slot is made."""
        model = torch.nn.Linear(100, 150)  # 61 kB, and twice that for Adam
        said: list[str] = []
        said: list[str] = []
        ckpt = tierckpt.Checkpointer(
            model,
            torch.optim.Adam(model.parameters()),
            group=group,
            path=tmp_path / "ckpts",
            shm_dir=small_tmpfs,
            agent="inline",
            halt_signals="",
            on_event=lambda event: said.append(event.message),
        )
        group.barrier()
        ckpt.abandon()
        return said

    first, second = run_ranks(2, attach)
    assert second == []
    assert len(first) == (not enough)
    if not enough:
        assert f"{small_tmpfs} has " in first[0]
        assert f"need about {2 * 2 * (100 * 150 + 150) * 4 * 3 // 2} more for 2 slots" in first[0]
        assert "--shm-size" in first[0]


def test_memory_that_the_nodes_ranks_hold_already_needs_no_room(
    pool: SlotPool, shm_dir: Path
) -> None:
    """Slots of ranks that were here before and are not now."""
    config = Config(shm_dir=str(shm_dir))
    others = [SlotPool(pool.job, rank, 2, lambda *_: None) for rank in (1, 2)]
    slot = fill(pool, 1)
    for other in others:
        fill(other, 1)
    try:
        node = Node(index=0, count=1, ranks=(0, 1))
        assert held_bytes(config, pool.job, node, in_place=False) == 2 * slot.nbytes
    finally:
        for other in others:
            other.close(remove=True)


def small_tmpfs_free(folder: Path) -> int:
    """All but the space for a job's folders and lock files."""
    found = os.statvfs(folder)
    return max(0, found.f_bavail * found.f_frsize - 4 * PAGE_BYTES)


def test_a_pin_of_ours_does_not_keep_us_from_our_slot(pool: SlotPool) -> None:
    slot = fill(pool, 1)
    lock_shared(slot.fd)
    fill(pool, 2)
    assert pool.choose({v(2)}, set(), SEAL_BYTES, IMAGE_BYTES) is slot
    unlock(slot.fd)
