"""A shard that was damaged or lost on one disk, and restored from elsewhere, is soon on disk
again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.storage.test_persistent_level import STEPS, settings, train_and_close
from tests.support.training import Place, attach, make_job, restored_into, train


def damage_data(file: Path) -> None:
    with file.open("r+b") as image:
        image.seek(-1000, os.SEEK_END)
        byte = image.read(1)
        image.seek(-1, os.SEEK_CUR)
        image.write(bytes([byte[0] ^ 1]))


def damage_manifest(file: Path) -> None:
    damage = file.with_suffix(".manifest")
    damage.write_bytes(damage.read_bytes()[:-10])


def remove(file: Path) -> None:
    file.unlink()
    file.with_suffix(".manifest").unlink()


def second_shard(place: Place) -> Path:
    return place.shards()[-1]


def come_back_and_crash(place: Place, **more: Any) -> dict[str, Any]:
    """No checkpoint is due by itself."""
    job = make_job(seed=2)
    attached = attach(job, place, **{"memory_every_steps": 0, **more})
    told = restored_into(job, attached)
    started = told["restored"][0]
    for step in range(started, started + 4):
        attached.ckpt.wait()  # so that the next vote can report it
        train(job, attached.ckpt, [step])
    told["committed"] = attached.versions("committed", "local")
    told["failed"] = attached.versions("failed", "memory")
    attached.ckpt.abandon()
    return told


def lose_memory(place: Place) -> None:
    shutil.rmtree(place.shm)
    Path(place.shm).mkdir()


@pytest.mark.parametrize("harm", [damage_data, remove])
def test_a_shard_fetched_for_one_disk_is_on_all_disks_with_the_next_version(
    harm: Callable[[Path], None], ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place, shared = Place.under(tmp_path, shm_dir), str(tmp_path / "shared")
    ranks(2).run(train_and_close, place, shared, {})
    harm(second_shard(place))
    more = settings(shared, persistent_every_steps=1000)
    for told in ranks(2).run(come_back_and_crash, place, **more):
        assert told["restored"] == (STEPS, {"local": 1, "persistent": 1})
        assert told["committed"] == [STEPS + 1]
    lose_memory(place)
    for told in ranks(2).run(come_back_and_crash, place, **more):
        assert told["restored"] == (STEPS + 1, {"local": 2})
        assert told["rejected"] == ()
        assert told["committed"] == [], "nothing was lost"


def leave_in_memory_and_on_disk(place: Place) -> None:
    job = make_job()
    attached = attach(job, place, local_every_steps=1000)
    train(job, attached.ckpt, range(STEPS))
    attached.ckpt.save(now=True)
    attached.ckpt.abandon()


def test_a_shard_taken_from_memory_replaces_its_damaged_file(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    ranks(2).run(leave_in_memory_and_on_disk, place)
    damage_manifest(second_shard(place))
    more = {"local_every_steps": 1000, "memory_every_steps": 1}
    zero, one = ranks(2).run(come_back_and_crash, place, **more)
    assert zero["restored"] == (STEPS, {"memory": 2})
    assert (zero["committed"], one["committed"]) == ([], [STEPS])
    assert (zero["failed"], one["failed"]) == ([], []), "it has its slot, and needs no second"
    lose_memory(place)
    for told in ranks(2).run(come_back_and_crash, place, **more):
        assert told["restored"] == (STEPS, {"local": 2})
        assert told["rejected"] == ()
