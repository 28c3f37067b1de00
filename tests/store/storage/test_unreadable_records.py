"""Unreadable records are no fresh start, and none of them is removed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.support.facts import found_at
from tierckpt import RestoreError
from tierckpt.config import load_config
from tierckpt.coordination import JobHistory
from tierckpt.core import Found, Location
from tierckpt.format import ParityKey, ShardKey, VersionId
from tierckpt.group import SingleGroup
from tierckpt.storage import JobDirectory, LocalStore
from tierckpt.testing import TinyJob, commit_one, key_of

STEPS = 4
HANG_SECONDS = 60
OBSTACLES: dict[str, Callable[[Path], object]] = {
    "a directory": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link that leads nowhere": lambda path: path.symlink_to(path.with_name("nowhere")),
    "a FIFO": os.mkfifo,
}


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Opening a FIFO waits for its writer."""

    def give_up(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANG_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class Left:
    """Records that a job left on one level alone, and a later job."""

    def __init__(self, level: str, folder: Path, shm_dir: Path) -> None:
        self._level, self._folder = level, folder
        self._settings: dict[str, Any] = {"shm_dir": str(shm_dir), "job_id": "job"}
        self._settings["agent"] = "inline"
        if level == "persistent":
            self._settings |= {
                "persistent_path": str(folder / "shared"),
                "persistent_every_steps": 1,
                "persistent_keep": 2,
            }
        else:
            self._settings["local_keep"] = 2
        with self.job() as job:
            job.run(STEPS)
        if level == "persistent":
            shutil.rmtree(folder / "ckpts")

    def job(self) -> TinyJob:
        return TinyJob(self._folder / "ckpts", **self._settings)

    @property
    def where(self) -> Path:
        return self._folder / ("shared" if self._level == "persistent" else "ckpts")

    def records(self) -> list[Path]:
        """Oldest first."""
        found = sorted(self.where.glob("v*.manifest"))
        assert len(found) == 2
        return found

    def files(self) -> set[str]:
        return {str(path) for path in self.where.rglob("*")}

    def refusal(self) -> str:
        there = self.files()
        with self.job() as job:
            with pytest.raises(RestoreError) as caught:
                job.restore()
            job.checkpointer.abandon()
        assert self.files() >= there, "and nothing is removed"
        return str(caught.value)


@pytest.fixture(params=["local", "persistent"])
def left(request: pytest.FixtureRequest, tmp_path: Path, shm_dir: Path) -> Left:
    return Left(request.param, tmp_path, shm_dir)


@pytest.mark.parametrize(
    ("left", "obstacle"),
    [*zip(2 * ["local", "persistent"], OBSTACLES, strict=True)],
    indirect=["left"],
)
def test_no_fresh_start_beside_records_that_cannot_be_read(obstacle: str, left: Left) -> None:
    for path in left.records():
        path.unlink()
        OBSTACLES[obstacle](path)
    text = left.refusal()
    assert f"could not be read: {left.where}" in text
    assert f"v{STEPS}" in text or f"v{STEPS:010d}" in text


@pytest.mark.parametrize(
    ("left", "obstacle"),
    [*zip(2 * ["persistent", "local"], OBSTACLES, strict=True)],
    indirect=["left"],
)
def test_one_unreadable_record_is_reported_and_the_previous_version_is_taken(
    obstacle: str, left: Left
) -> None:
    newest = left.records()[-1]
    newest.unlink()
    OBSTACLES[obstacle](newest)
    with left.job() as job:
        restored = job.restore()
        (said,) = [event.message for event in job.heard("rejected")]
        job.run(STEPS + 2)
    assert restored == STEPS - 1
    assert f"v{STEPS}" in said or f"v{STEPS:010d}" in said


def test_damage_in_every_record_is_no_fresh_start(left: Left) -> None:
    """Records are written last: even a damaged one proves that its version was complete."""
    for path in left.records():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    text = left.refusal()
    assert f"this job had complete checkpoints (v{STEPS} was one)" in text
    assert text.count("truncated or damaged") == 2
    assert "To give them up: another path, or moving the remaining files away" in text


MANY = 300
"""Shards of one version."""


def newer(path: Path) -> object:
    line = json.dumps({"format": "tierckpt-manifest", "format_version": "99.0"}).encode()
    return path.write_bytes(line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n")


@pytest.mark.parametrize(
    "spoil",
    [newer, lambda path: path.write_bytes(b"?"), lambda path: path.symlink_to(path.name)],
    ids=["newer", "damaged", "unseen"],
)
def test_damage_in_many_shards_is_reported_for_a_few(
    spoil: Callable[[Path], object], tmp_path: Path, shm_dir: Path
) -> None:
    """Every rank of a job of thousands reports it."""
    for shard in range(MANY):
        spoil(tmp_path / f"v0000000100.g000001.s{shard:05d}of{MANY:05d}.manifest")
    with TinyJob(tmp_path, shm_dir=str(shm_dir), agent="inline") as job:
        with pytest.raises(RestoreError) as caught:
            job.restore()
        said = [event.message for event in job.heard("rejected")]
        job.checkpointer.abandon()
    text = str(caught.value)
    assert "s00002of" in text or "s2of" in text or "s2 " in text, text
    assert f"{MANY - 3} more" in text
    assert len(text) < 3000
    assert len(said) < 10
    assert not said or said[-1] == f"and {MANY - len(said) + 1} more"


def test_a_version_with_any_manifest_is_not_cleaned_away(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create()
    for version, obstacle in enumerate(OBSTACLES.values()):
        commit_one(store, key_of(version))
        store._manifest(key_of(version)).unlink()
        obstacle(store._manifest(key_of(version)))
    commit_one(store, key_of(9))
    store._manifest(key_of(9)).unlink()
    assert store.clean(0) == [store._data(key_of(9)).name]


# --- of several ranks ----------------------------------------------------------------------------

V7 = VersionId(1, 7)


def shard(number: int, run_id: str = "") -> Found:
    return found_at(ShardKey(V7, number, 2), Location("local", "a", "x"), ((1, 0),), run_id)


@pytest.mark.parametrize(
    ("found", "damaged", "once"),
    [
        ([], [ShardKey(V7, 0, 2), ShardKey(V7, 1, 2)], V7),
        ([shard(0)], [ShardKey(V7, 1, 2)], V7),
        ([], [ShardKey(V7, 1, 2)], None),
        ([shard(0)], [ShardKey(V7, 0, 2)], None),
        ([shard(0, "one")], [ShardKey(V7, 1, 3), ShardKey(V7, 2, 3)], None),
        ([], [ParityKey(V7, 0, 2)], V7),
    ],
)
def test_a_version_of_which_every_manifest_is_there_was_complete(
    found: list[Found],
    damaged: list[ShardKey],
    once: VersionId | None,
    tmp_path: Path,
    shm_dir: Path,
) -> None:
    where = (JobDirectory.at(shm_dir, "job"), LocalStore(tmp_path), "a")
    lives = JobHistory(load_config({"path": str(tmp_path)}), SingleGroup(), *where)
    lives.found, lives.damaged = [tuple(found)], set(damaged)
    assert lives.once_complete() == once
