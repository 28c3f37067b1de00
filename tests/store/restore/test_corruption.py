"""Damaged bytes are never loaded: another copy or an older version is, and an event says so."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tierckpt import RestoreError
from tierckpt.restore import shards
from tierckpt.storage import JobDirectory
from tierckpt.testing import TinyJob

STEPS = 4
ROUNDS = 150
"""Number of damages in all, distributed over the targets."""


@dataclass(frozen=True)
class Left:
    """Files and slots of an ended job: v3 and v4 on disk, v4 (and v3) in memory."""

    path: Path
    shm: Path
    prints: dict[int, str]

    def copy_to(self, folder: Path) -> Left:
        """A copy to be damaged. Its job id is set explicitly: it would otherwise follow from the
        path."""
        shutil.copytree(self.path, folder / "ckpts")
        shutil.copytree(self.shm, folder / "shm", ignore=shutil.ignore_patterns("*.lock"))
        return Left(folder / "ckpts", folder / "shm", self.prints)

    def settings(self) -> dict[str, Any]:
        return {"shm_dir": str(self.shm), "job_id": "job", "local_keep": 2}

    def data(self, version: int) -> Path:
        (found,) = self.path.glob(f"v{version:010d}.*.safetensors")
        return found

    def record(self, version: int) -> Path:
        (found,) = self.path.glob(f"v{version:010d}.*.manifest")
        return found

    def slot(self, version: int) -> Path:
        folder = JobDirectory.at(self.shm, "job")
        return next(p for p, m in folder.sealed() if m.id.version == version)

    def forget_memory(self) -> None:
        for slot in JobDirectory.at(self.shm, "job").segments():
            slot.unlink()


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, shm_root: Path) -> Any:
    folder = tmp_path_factory.mktemp("left")
    made = Left(folder / "ckpts", folder / "shm", {})
    made.shm.mkdir()

    def note(job: TinyJob) -> None:
        made.prints[job.iteration] = job.fingerprint()

    job = TinyJob(made.path, on_step=note, **made.settings())
    job.run(STEPS)
    job.checkpointer.save(now=True)
    job.checkpointer.abandon()
    assert len(list(made.path.glob("*.manifest"))) == 2
    assert made.slot(STEPS)
    return made


def flip_bit(chance: random.Random, low: int, high: int | None, path: Path) -> None:
    content = bytearray(path.read_bytes())
    position = chance.randrange(low * 8, (len(content) if high is None else high) * 8)
    content[position // 8] ^= 1 << position % 8
    path.write_bytes(content)


def overwrite(chance: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    start = chance.randrange(len(content) - 600)
    content[start : start + 512] = chance.randbytes(512)
    path.write_bytes(content)


def truncate(chance: random.Random, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def swap(chance: random.Random, path: Path) -> None:
    """Sound bytes, of another version."""
    other = path.with_name(path.name.replace(f"v{STEPS:010d}", f"v{STEPS - 1:010d}"))
    path.write_bytes(other.read_bytes())


HEADER_BYTES = 4096
Damage = Callable[[random.Random, Path], None]
LOCAL: dict[str, tuple[str, Damage]] = {
    "a bit of the header": ("data", lambda c, p: flip_bit(c, 0, HEADER_BYTES, p)),
    "a bit of the data": ("data", lambda c, p: flip_bit(c, HEADER_BYTES, None, p)),
    "a stretch of the data": ("data", overwrite),
    "the end of the data": ("data", truncate),
    "all of the data, as a crash of the machine may": ("data", lambda c, p: os.truncate(p, 0)),
    "all of the data, another version's": ("data", swap),
    "a bit of the manifest": ("record", lambda c, p: flip_bit(c, 0, None, p)),
    "the end of the manifest": ("record", truncate),
    "all of the manifest, another version's": ("record", swap),
    "the data file is gone": ("data", lambda c, p: p.unlink()),
}


def restored_after(damaged: Left) -> tuple[Any, list[str], str]:
    # Nothing needs to be written: without an agent this is faster.
    with TinyJob(damaged.path, seed=99, local_every_steps=0, **damaged.settings()) as job:
        restored = job.restore()
        said = [e.message for e in job.heard("rejected")]
        print_ = job.fingerprint()
        job.checkpointer.abandon()
    return restored, said, print_


@pytest.mark.parametrize("what", LOCAL)
def test_damage_on_disk_falls_back_to_the_version_before(
    what: str, left: Left, tmp_path: Path
) -> None:
    kind, damage = LOCAL[what]
    fallen_back = 0
    rounds = ROUNDS // (len(LOCAL) + 2)
    for seed in range(rounds):
        damaged = left.copy_to(tmp_path / str(seed))
        damaged.forget_memory()
        target = damaged.data(STEPS) if kind == "data" else damaged.record(STEPS)
        damage(random.Random(f"{what} {seed}"), target)
        restored, said, print_ = restored_after(damaged)
        assert print_ == left.prints[int(restored)], f"seed {seed}: wrong bytes were loaded"
        assert restored == STEPS - 1, f"seed {seed}: the damage was not seen"
        assert len(said) == 1
        assert list(restored.rejected) == said
        fallen_back += 1
    assert fallen_back == rounds


def test_damage_in_every_seal_is_no_fresh_start(left: Left, tmp_path: Path) -> None:
    """A job with versions in memory alone. A seal exists only if a version was complete on its
    rank, whatever its content is now; if a seal can be read, its version is restored."""
    copy = left.copy_to(tmp_path)
    shutil.rmtree(copy.path)
    versions = range(STEPS, STEPS - 3, -1)
    slots = [copy.slot(version) for version in versions]
    for version, slot in zip(versions, slots, strict=True):
        flip_bit(random.Random(1), 100, 101, slot)
        with TinyJob(copy.path, **copy.settings()) as job:
            if slot is not slots[-1]:
                assert job.restore().version == version - 1
                assert job.fingerprint() == left.prints[version - 1]
            else:
                with pytest.raises(
                    RestoreError, match="does not start from the beginning"
                ) as raised:
                    job.restore()
                assert all(str(each) in str(raised.value) for each in slots)
            job.checkpointer.abandon()


@pytest.mark.parametrize("what", ["a bit of the image", "a bit of the seal", "the end"])
def test_damage_in_memory_falls_back_to_the_disk(what: str, left: Left, tmp_path: Path) -> None:
    rejected = 0
    rounds = ROUNDS // (len(LOCAL) + 2)
    for seed in range(rounds):
        damaged = left.copy_to(tmp_path / str(seed))
        chance = random.Random(f"{what} {seed}")
        slot = damaged.slot(STEPS)
        seal_bytes = int.from_bytes(slot.read_bytes()[8:16], "little")
        manifest_bytes = int.from_bytes(slot.read_bytes()[16:24], "little")
        if what == "a bit of the image":
            used = damaged.data(STEPS).stat().st_size
            flip_bit(chance, seal_bytes, seal_bytes + used, slot)
        elif what == "a bit of the seal":
            flip_bit(chance, 24, 24 + manifest_bytes, slot)
        else:
            truncate(chance, slot)
        restored, said, print_ = restored_after(damaged)
        assert print_ == left.prints[STEPS], f"seed {seed}: wrong bytes were loaded"
        assert restored == STEPS
        assert restored.levels == {"local": 1}
        assert list(restored.rejected) == said
        rejected += len(said)
    assert rejected == rounds, "every damage is reported"


@pytest.mark.parametrize("position", range(24))
def test_a_damaged_slot_head_makes_it_no_slot(position: int, left: Left, tmp_path: Path) -> None:
    """Magic and lengths have no checksum of their own; the bytes they lead to do."""
    damaged = left.copy_to(tmp_path)
    slot = damaged.slot(STEPS)
    content = bytearray(slot.read_bytes())
    content[position] ^= 1 << position % 8
    slot.write_bytes(content)
    restored, _, print_ = restored_after(damaged)
    assert (restored, restored.levels) == (STEPS, {"local": 1})
    assert print_ == left.prints[STEPS]


def test_memory_and_disk_damaged_the_older_version_is_found(left: Left, tmp_path: Path) -> None:
    damaged = left.copy_to(tmp_path)
    chance = random.Random(0)
    overwrite(chance, damaged.data(STEPS))
    content = bytearray(damaged.slot(STEPS).read_bytes())
    content[-3 * 4096 :] = chance.randbytes(3 * 4096)
    damaged.slot(STEPS).write_bytes(content)
    restored, said, print_ = restored_after(damaged)
    assert restored == STEPS - 1
    assert print_ == left.prints[STEPS - 1]
    assert sorted("memory" in s.split(" (")[0] for s in said) == [False, True]
    assert list(restored.rejected) == said


def test_without_a_sound_version_damaged_ones_prevent_a_fresh_start(
    left: Left, tmp_path: Path
) -> None:
    damaged = left.copy_to(tmp_path)
    damaged.forget_memory()
    for version in (STEPS - 1, STEPS):
        truncate(random.Random(version), damaged.data(version))
    with TinyJob(damaged.path, **damaged.settings()) as job:
        with pytest.raises(RestoreError, match=rf"\(v{STEPS} was one\) and has none") as caught:
            job.restore()
        assert str(caught.value).count("truncated") == 2
        assert "moving the remaining files away" in str(caught.value)
        job.checkpointer.abandon()


def test_a_disk_that_fails_is_a_damaged_copy(
    left: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the header. An unreadable mapped page would end the process instead."""
    damaged = left.copy_to(tmp_path)
    damaged.forget_memory()
    check_header = shards.check_header

    def cut_short_then(image: Any) -> Any:
        header = check_header(image)
        if image.manifest.id.version == STEPS:
            os.truncate(damaged.data(STEPS), header.header_bytes)
        return header

    monkeypatch.setattr(shards, "check_header", cut_short_then)
    restored, said, print_ = restored_after(damaged)
    assert (restored, print_) == (STEPS - 1, left.prints[STEPS - 1])
    assert "the disk fails" in said[0]


def test_the_job_continues_in_a_slot_that_was_damaged(left: Left, tmp_path: Path) -> None:
    damaged = left.copy_to(tmp_path)
    truncate(random.Random(3), damaged.slot(STEPS))
    with TinyJob(damaged.path, seed=99, **damaged.settings()) as job:
        job.restore()
        job.run(STEPS + 4)
        assert not job.heard("failed")
