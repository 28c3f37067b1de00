"""The persistent level: flushed in the background, and sufficient for a restore."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support import exact
from tests.support.training import Place, attach, make_job, rank, restored_into, train
from tierckpt.storage.persistent import PersistentStore

STEPS = 9


def settings(shared: str, **more: Any) -> dict[str, Any]:
    return {
        "persistent_path": shared,
        "persistent_every_steps": 4,
        "persistent_every_seconds": 0,
        "slots": 3,
        "when_busy": "wait",
        **more,
    }


def train_and_close(place: Place, shared: str, more: dict[str, Any]) -> dict[str, Any]:
    job = make_job()
    attached = attach(job, place, **settings(shared, **more))
    course = train(job, attached.ckpt, range(STEPS))
    attached.ckpt.close()
    return {
        "course": course,
        "replicated": exact.digest(job.replicated()),
        "flushed": attached.versions("committed", "persistent"),
        "failed": [e.message for e in attached.events if e.name == "failed"],
        "local": attached.versions("committed", "local"),
        "events": [e.text() for e in attached.events],
    }


def come_back(place: Place, shared: str, **more: Any) -> dict[str, Any]:
    job = make_job(seed=2)
    attached = attach(job, place, memory_every_steps=0, **settings(shared, **more))
    told = restored_into(job, attached)
    attached.ckpt.close()
    return told


def lose_the_nodes(place: Place) -> None:
    """Every node's disk and memory are gone."""
    shutil.rmtree(place.path)
    shutil.rmtree(place.shm)
    Path(place.shm).mkdir()


@pytest.mark.parametrize("now", [2, 3])
def test_it_is_enough_by_itself_on_any_number_of_ranks(
    now: int, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place, shared = Place.under(tmp_path, shm_dir), str(tmp_path / "shared")
    before = ranks(2).run(train_and_close, place, shared, {})
    assert before[0]["flushed"] == [4, 8, STEPS], "at its interval, and the final one"
    assert [told["failed"] for told in before] == [[], []]
    assert [n.id.version for n in PersistentStore(shared).versions()] == [8, STEPS]
    lose_the_nodes(place)
    after = ranks(now).run(come_back, place, shared)
    for number, told in enumerate(after):
        assert told["restored"] == (STEPS, {"persistent": 2})
        assert told["rejected"] == ()
        assert told["replicated"] == before[0]["replicated"]
        if now == 2:
            assert told["digest"] == before[number]["course"][STEPS]


def test_a_place_that_cannot_be_written_costs_that_level_only(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    (tmp_path / "file").write_text("not a directory")
    shared = str(tmp_path / "file" / "shared")
    zero, one = ranks(2).run(train_and_close, place, shared, {})
    assert zero["flushed"] == one["flushed"] == []
    assert len(zero["failed"]) == 3
    assert all("training continues" in text and shared in text for text in zero["failed"])
    assert zero["local"] == one["local"] == [4, 8, STEPS]


# --- several nodes, and files of several of them -----------------------------------------------


def on_two_nodes(place: Place, shared: str, more: dict[str, Any]) -> dict[str, Any]:
    """With two shards in a file, which only an agent of this process can be told."""
    of_two = partial(PersistentStore, shards_per_group=2)
    with mock.patch("tierckpt.agent.flusher.PersistentStore", of_two):
        given = {"node": f"node{rank() % 2}", "agent": "inline", **more}
        return train_and_close(place, shared, given)


def come_back_on_two_nodes(place: Place, shared: str) -> dict[str, Any]:
    return come_back(place, shared, node=f"node{rank() % 2}")


GROUPS_OF_TWO = {
    "shared": (True, ["00000of00002.shards", "00001of00002.shards"]),
    "own": (False, ["s00000-00000.shards", "s00001-00001.shards", "s00002-00002.shards"]),
}


@pytest.mark.parametrize(("layout", "now"), [("shared", 2), ("own", 3)])
def test_files_of_shards_that_do_not_divide_and_are_on_several_nodes(
    layout: str, now: int, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Three shards, two in a file; the first file is of two nodes, and each has its own disk."""
    shares, files = GROUPS_OF_TWO[layout]
    more = {"persistent_storage_options": {"shared_writes": shares}}
    place = Place(str(tmp_path / "{node}" / "ckpts"), str(shm_dir))
    shared = str(tmp_path / "shared")
    before = ranks(3).run(on_two_nodes, place, shared, more)
    assert [told["failed"] for told in before] == [[]] * 3
    found = PersistentStore(shared).versions()
    events = [each["events"] for each in before]
    assert [name.id.version for name in found] == [8, STEPS], events
    for name in found:
        there = (tmp_path / "shared" / name.stem).rglob("*.shards")
        assert sorted(path.name for path in there if path.is_file()) == files
    for node in ("node0", "node1"):
        shutil.rmtree(tmp_path / node)
    shutil.rmtree(place.shm)
    Path(place.shm).mkdir()
    # With the usual number of shards in a file.
    for number, told in enumerate(ranks(now).run(come_back_on_two_nodes, place, shared)):
        assert told["restored"] == (STEPS, {"persistent": 3})
        assert told["replicated"] == before[0]["replicated"]
        if now == 3:
            assert told["digest"] == before[number]["course"][STEPS]
