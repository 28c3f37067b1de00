"""Slots: sealed or not, at every instruction; their owner; and their removal."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.processes import end, python
from tests.support.shards import IMAGE_BYTES, manifest
from tierckpt.errors import TierckptError
from tierckpt.storage import (
    JobBusyError,
    JobDirectory,
    Slot,
    holder,
    job_id_of,
    read_seal,
    seal_area_bytes,
)

SEAL_BYTES = seal_area_bytes(1)
OBSTACLES: dict[str, Callable[[Path], object]] = {
    "a directory": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link that leads nowhere": lambda path: path.symlink_to("/nowhere/at/all"),
    "a FIFO": os.mkfifo,
}
"""Obstacles that may exist in place of a file."""
LENGTH = slice(16, 24)
"""Position of the manifest's length in a slot, which seals it."""


@pytest.fixture
def job(shm_dir: Path) -> JobDirectory:
    made = JobDirectory.at(shm_dir, "job")
    made.create()
    return made


@pytest.fixture
def slot(job: JobDirectory) -> Iterator[Slot]:
    made = Slot.create(job.slot_path(0, 0), "r0", SEAL_BYTES, IMAGE_BYTES)
    yield made
    made.remove()


# --- sealing -------------------------------------------------------------------------------------


def test_a_slot_is_sealed_by_its_manifest_and_void_without(slot: Slot) -> None:
    assert slot.path is not None
    assert slot.manifest() is read_seal(slot.path) is None
    slot.seal(manifest(7).encode())
    assert slot.manifest() == read_seal(slot.path) == manifest(7)
    slot.unseal()
    assert slot.manifest() is read_seal(slot.path) is None


def test_the_image_is_as_large_as_asked_for_and_apart_from_the_seal(slot: Slot) -> None:
    slot.seal(manifest().encode())
    with slot.image() as image:
        assert len(image) == slot.image_bytes == IMAGE_BYTES
        image[:] = b"\xff" * IMAGE_BYTES
    assert slot.manifest() == manifest()


def test_a_writer_killed_while_sealing_leaves_a_seal_or_none(slot: Slot) -> None:
    """Its memory operations in order; a process may end after any prefix of them."""
    encoded = manifest(5).encode()
    assert slot.path is not None
    with slot.path.open("r+b") as raw:
        for done in range(0, len(encoded), 7):
            raw.seek(24)
            raw.write(encoded[:done])
            raw.flush()
            assert read_seal(slot.path) is None
            assert slot.manifest() is None
        raw.seek(24)
        raw.write(encoded)
        raw.seek(LENGTH.start)
        raw.write(len(encoded).to_bytes(8, "little"))
        raw.flush()
    assert read_seal(slot.path) == slot.manifest() == manifest(5)


def test_a_seal_over_a_torn_manifest_is_no_seal(slot: Slot) -> None:
    encoded = manifest(5).encode()
    assert slot.path is not None
    slot.seal(encoded[:-9] + b"x" * 9)
    assert slot.manifest() is read_seal(slot.path) is None
    assert slot.manifest_bytes() is not None


def test_a_manifest_that_does_not_fit_is_refused(slot: Slot) -> None:
    with pytest.raises(TierckptError, match="the seal area has"):
        slot.seal(bytes(SEAL_BYTES))
    assert slot.manifest() is None


@pytest.mark.parametrize(
    "content",
    [b"", b"TCKPSLOT", b"x" * 5000, b"TCKPSLOT" + (1 << 40).to_bytes(8, "little") + bytes(9000)],
    ids=["empty", "magic only", "foreign", "larger than itself"],
)
def test_files_that_are_no_slots_are_not_opened(job: JobDirectory, content: bytes) -> None:
    path = job.slot_path(0, 0)
    path.write_bytes(content)
    assert Slot.open(path) is None
    assert read_seal(path) is None
    assert list(job.sealed()) == []


def test_a_removed_slot_is_not_opened(job: JobDirectory) -> None:
    assert Slot.open(job.slot_path(0, 9)) is None
    assert read_seal(job.slot_path(0, 9)) is None


def test_room_for_the_manifest_of_any_number_of_blocks() -> None:
    for blocks in (0, 1, 100, 10_000):
        full = replace(manifest(job="j" * 60), digests=bytes(8 * (blocks + 1)))
        assert len(full.encode()) <= seal_area_bytes(blocks) - 24


def test_another_process_that_reads_a_slot_is_seen(slot: Slot) -> None:
    reader = python(
        "import sys; from pathlib import Path; "
        "from tierckpt.storage.file_lock import lock_shared\n"
        "from tierckpt.storage.slots import Slot\n"
        "slot = Slot.open(Path(sys.argv[1])); lock_shared(slot.fd); print('pinned', flush=True)\n"
        "sys.stdin.read()",
        slot.path,
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "pinned\n"
        assert slot.in_use_elsewhere()
    finally:
        reader.kill()
        end(reader)
    assert not slot.in_use_elsewhere(), "the kernel lets go for it"


# --- their owners --------------------------------------------------------------------------------

HOLD_RANK = (
    "import sys; from tierckpt.storage.job_directory import JobDirectory\n"
    "job = JobDirectory.at(sys.argv[1], sys.argv[2]); job.create(); job.lock_rank(0)\n"
    "print('locked', flush=True); sys.stdin.read()"
)


@pytest.fixture
def living(shm_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A trainer of job `job`, in a process of its own."""
    process = python(HOLD_RANK, shm_dir, "job")
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    end(process)


def test_a_rank_that_runs_in_another_process_is_busy(
    job: JobDirectory, living: subprocess.Popen[str]
) -> None:
    said: list[str] = []
    with pytest.raises(JobBusyError) as caught:
        job.lock_rank(0, patience_seconds=0.1, on_wait=said.append)
    assert f"process {living.pid}" in str(caught.value)
    (waits,) = said
    assert f"process {living.pid}" in waits
    assert "waiting at most 0.1 s for its end" in waits
    assert "Two jobs cannot write to one path: give this one another path" in str(caught.value)
    assert "another job_id if that is set" in str(caught.value)
    job.unlock_rank(job.lock_rank(1, patience_seconds=0.1))


def test_a_job_trains_while_a_trainer_holds_its_rank(job: JobDirectory) -> None:
    assert (job.trains(), job.trainers()) == (False, 0)
    lock = job.lock_rank(1)
    assert (job.trains(), job.trainers()) == (True, 1)
    job.unlock_rank(lock)
    assert (job.trains(), job.trainers()) == (False, 0)


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_path_but_no_file_is_no_lock_and_has_no_waiters(obstacle: str, job: JobDirectory) -> None:
    path = job.lock_path(0)
    OBSTACLES[obstacle](path)
    text = (
        "from tierckpt.storage.job_directory import JobDirectory; import sys\n"
        "JobDirectory.at(sys.argv[1], sys.argv[2]).lock_rank(0, patience_seconds=0.1)"
    )
    command = [sys.executable, "-c", text, str(job.root.parent), job.job]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Error: [Errno" in ended.stderr
    assert ended.stderr.rstrip().endswith(f"'{path}'")
    assert not job.has_trainer(0)


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_path_but_no_file_is_no_slot(obstacle: str, job: JobDirectory) -> None:
    path = job.slot_path(0, 0)
    OBSTACLES[obstacle](path)
    ((damaged, error),) = job.damaged()
    assert (damaged, type(error)) == (path, OSError)
    assert str(path) in str(error)
    assert list(job.sealed()) == []


@pytest.mark.parametrize("name", ["r00005.0", "r00005.lock", "notes"])
def test_a_directory_among_the_files_of_dead_ranks_and_jobs_disturbs_nobody(
    name: str, shm_dir: Path, job: JobDirectory
) -> None:
    dead = JobDirectory.at(shm_dir, "dead")
    dead.create()
    for each in (job, dead):
        (each.path / name).mkdir()
        each.slot_path(6, 0).touch()
    assert job.remove_surplus(ranks=[0])
    assert job.remove_dead_jobs(linger_seconds=-1) == ["dead"]
    job.slot_path(6, 0).touch()
    job.remove_orphans()
    assert [path.name for path in job.path.iterdir()] == [name]
    assert [path.name for path in dead.path.iterdir()] == [name]


def test_only_its_owner_may_look_into_a_jobs_folder(job: JobDirectory) -> None:
    assert job.root.stat().st_mode & 0o777 == job.path.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_not_used(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = JobDirectory.at(shm_dir, "job")
    mine.create()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(PermissionError, match="set shm_dir to another place"):
        mine.create()


def test_jobs_are_distinguished_by_the_place_and_not_by_its_spelling(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert (
        job_id_of(tmp_path / "a")
        == job_id_of(f"{tmp_path}/b/../a/")
        == job_id_of(tmp_path / "link")
    )
    assert job_id_of(tmp_path / "a") != job_id_of(tmp_path / "b" / "a")
    for odd in ("/", "/x/ä ö", "/x/" + "long" * 40):
        assert job_id_of(odd).replace("-", "").replace("_", "").replace(".", "").isalnum()
        assert len(job_id_of(odd)) < 60


# --- the dead ------------------------------------------------------------------------------------


@pytest.fixture
def other(shm_dir: Path) -> JobDirectory:
    """Another job's folder, with a sealed slot in it, last used an hour ago by the clock."""
    made = JobDirectory.at(shm_dir, "other")
    made.create()
    left = Slot.create(made.slot_path(0, 0), "r0", SEAL_BYTES, IMAGE_BYTES)
    left.seal(manifest(created=time.time() - 3600, job="other").encode())
    left.close()
    os.utime(made.path, (time.time() - 3600,) * 2)
    return made


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`wait(seconds)` advances the clock that cannot be set."""
    passed = [0.0]
    monkeypatch.setattr(time, "clock_gettime", lambda clock: 1e6 + passed[0])

    def resume(seconds: float) -> None:
        passed[0] += seconds

    return resume


def test_a_dead_job_is_removed_when_nobody_came_back(
    job: JobDirectory, other: JobDirectory, wait: Any
) -> None:
    assert job.remove_dead_jobs(linger_seconds=3000) == []
    wait(2999)
    assert job.remove_dead_jobs(linger_seconds=3000) == []
    assert len(list(other.sealed())) == 1
    wait(1)
    assert job.remove_dead_jobs(linger_seconds=3000) == ["other"]
    assert not other.path.exists()
    assert job.path.exists()


@pytest.mark.parametrize("wrong_seconds", [-86400, 86400])
def test_a_wrong_clock_removes_no_only_copy(
    wrong_seconds: int, job: JobDirectory, other: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for seconds in (0, wrong_seconds):
        monkeypatch.setattr(time, "time", lambda at=now + seconds: at)
        assert job.remove_dead_jobs(linger_seconds=3600) == []
        for path in (other.path, other.slot_path(0, 0), other.path / "seen.dead"):
            os.utime(path, (now - wrong_seconds,) * 2)


def test_a_job_that_came_back_during_the_wait_is_waited_for_again(
    job: JobDirectory, other: JobDirectory, wait: Any
) -> None:
    """Also if no process looked while it lived."""
    assert job.remove_dead_jobs(linger_seconds=3000) == []
    other.unlock_rank(other.lock_rank(0))
    wait(4000)
    assert job.remove_dead_jobs(linger_seconds=3000) == []
    wait(3000)
    assert job.remove_dead_jobs(linger_seconds=3000) == ["other"]


@pytest.mark.parametrize("mark", ["another boot's", "of later", "rubbish", "a directory"])
def test_an_invalid_mark_removes_nothing(
    mark: str, job: JobDirectory, other: JobDirectory, wait: Any
) -> None:
    assert job.remove_dead_jobs(linger_seconds=3000) == []
    path = other.path / "seen.dead"
    told = json.loads(path.read_text())
    if mark == "a directory":
        path.unlink()
        path.mkdir()
    elif mark == "another boot's":
        path.write_text(json.dumps({**told, "clock": "before"}))
    else:
        told["monotonic_seconds"] += 1e9
        path.write_text("{" if mark == "rubbish" else json.dumps(told))
    wait(4000)
    assert job.remove_dead_jobs(linger_seconds=3000) == []
    wait(4000)
    again = job.remove_dead_jobs(linger_seconds=3000)
    assert again == ([] if mark == "a directory" else ["other"])


def test_a_living_job_is_never_removed(
    other: JobDirectory, shm_dir: Path, living: subprocess.Popen[str]
) -> None:
    assert JobDirectory.at(shm_dir, "job").alive()
    assert other.remove_dead_jobs(linger_seconds=-1) == []
    living.kill()
    living.wait(60)
    assert other.remove_dead_jobs(linger_seconds=-1) == ["job"]


@pytest.mark.parametrize("look", ["dead_seconds", "has_trainer"])
def test_a_job_that_comes_back_while_the_dead_are_removed_keeps_its_place(
    look: str, job: JobDirectory, other: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives right after the check that found no process, and must not be removed with its
    lock."""
    taken = other.lock_path(0)
    taken.touch()
    looked = getattr(JobDirectory, look)
    returned: list[subprocess.Popen[str]] = []

    def look_and_come_back(self: JobDirectory, *arguments: int) -> object:
        found = looked(self, *arguments)
        returned.append(python(HOLD_RANK, job.root.parent, "other"))
        while not (waits_for_a_lock(returned[0].pid) or holder(taken) is not None):
            assert returned[0].poll() is None
        return found

    monkeypatch.setattr(JobDirectory, look, look_and_come_back)
    try:
        if look == "has_trainer":
            other.remove_orphans()
        else:
            assert job.remove_dead_jobs(linger_seconds=-1) == ["other"]
        monkeypatch.undo()
        (process,) = returned
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        assert other.has_trainer(0), "its lock was removed"
        assert other.segments() == [], "it came too late for these"
    finally:
        for process in returned:
            end(process)


def waits_for_a_lock(pid: int) -> bool:
    """In this system waiting lines start with an arrow."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(line[1] == "->" and line[5] == str(pid) for line in lines)


def test_a_place_with_a_folder_under_removal_is_made_again(
    job: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the end of the run before: between creating the folder and locking a file in it."""
    create = JobDirectory.create
    left = ["once"]

    def create_and_lose(self: JobDirectory) -> None:
        create(self)
        if left and left.pop():
            self.remove_if_unused()

    monkeypatch.setattr(JobDirectory, "create", create_and_lose)
    fd = job.lock_rank(0, patience_seconds=0.1)
    assert not left
    assert job.lock_path(0).exists()
    job.unlock_rank(fd)


def test_a_job_never_removes_itself(job: JobDirectory) -> None:
    assert job.remove_dead_jobs(linger_seconds=-1) == []
    assert job.path.exists()


def test_a_second_trainer_in_the_same_process_is_refused_too(job: JobDirectory) -> None:
    """A notebook with a cell run again."""
    first = job.lock_rank(0)
    try:
        with pytest.raises(JobBusyError):
            job.lock_rank(0, patience_seconds=0.1)
    finally:
        job.unlock_rank(first)


def test_a_job_of_the_same_process_stays_locked_when_another_one_is_made(
    shm_dir: Path, job: JobDirectory
) -> None:
    first = job.lock_rank(0)
    try:
        JobDirectory.at(shm_dir, "second").remove_dead_jobs(linger_seconds=3600)
        probe = python(HOLD_RANK.replace("lock_rank(0)", "lock_rank(0, 0.1)"), shm_dir, "job")
        assert probe.stdout is not None
        said = probe.stdout.readline()
        end(probe)
        assert said == "", "another process took the rank of a living trainer"
    finally:
        job.unlock_rank(first)


def test_files_of_killed_jobs_go_and_those_of_running_ones_stay(job: JobDirectory) -> None:
    """Locks of ranks that are elsewhere now, and of an agent; another one is alive, as is rank
    0."""
    job.create()
    first, agent = job.lock_rank(0), "agent0.lock"
    for name in ("r00003.lock", "agent1.lock", "agent1.socket", "agent0.socket"):
        (job.path / name).touch()
    hold = "import sys; from pathlib import Path; "
    hold += f"from tierckpt.storage.job_directory import take_lock\n{HOLD}"
    holder = python(hold, job.path / agent)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        job.remove_orphans()
        left = sorted(path.name for path in job.path.iterdir())
        assert left == [agent, "agent0.socket", "r00000.lock"]
    finally:
        end(holder)
        job.unlock_rank(first)


HOLD = "fd = take_lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_surplus_slots_are_those_that_no_rank_of_this_run_will_use(job: JobDirectory) -> None:
    """Ranks 0 and 1 are here; none of them is alive now. Their pools remove their own slots."""
    for rank, index in itertools.product(range(4), range(3)):
        Slot.create(job.slot_path(rank, index), "r", SEAL_BYTES, IMAGE_BYTES).close()
    assert job.remove_surplus((0, 1))
    ours = [job.slot_path(rank, index) for rank in (0, 1) for index in range(3)]
    assert sorted(job.segments()) == ours
