"""The persistent level: flushed behind the training's back, and enough by itself to come back."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import exact
from tests.dist.training import Place, attach, make_job, rank, restored_into, train
from tierckpt.persistent import PersistentStore

STEPS = 9
PATIENCE_SECONDS = 60.0


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
    }


def come_back(place: Place, shared: str) -> dict[str, Any]:
    job = make_job(seed=2)
    attached = attach(job, place, memory_every_steps=0, **settings(shared))
    told = restored_into(job, attached)
    attached.ckpt.close()
    return told


def lose_the_nodes(place: Place) -> None:
    """Every node's disk and memory are gone."""
    shutil.rmtree(place.path)
    shutil.rmtree(place.shm)
    Path(place.shm).mkdir()


@pytest.mark.parametrize("now", [1, 2, 3])
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


def test_a_damaged_version_is_passed_over(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    place, shared = Place.under(tmp_path, shm_dir), str(tmp_path / "shared")
    before = ranks(2).run(train_and_close, place, shared, {})
    lose_the_nodes(place)
    newest = PersistentStore(shared).versions()[-1]
    (shards,) = (tmp_path / "shared" / newest.stem).glob("*.shards")
    with shards.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    for number, told in enumerate(ranks(2).run(come_back, place, shared)):
        assert told["restored"] == (8, {"persistent": 2})
        assert "differ from their checksum" in told["rejected"][0]
        assert told["digest"] == before[number]["course"][8]


def with_an_agent_killed_in_mid_flush(place: Place, shared: str) -> dict[str, Any]:
    job = make_job()
    more = settings(shared, persistent_bytes_per_second=1, persistent_every_steps=1000)
    attached = attach(job, place, **more)
    ckpt = attached.ckpt
    train(job, ckpt, range(3))
    ckpt.save(now=True)
    if rank() == 0:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not list(Path(shared).rglob("*")):
            ckpt._agent.poll()
            assert time.monotonic() < deadline
        assert ckpt._agent.behind() == ["persistent"]
        assert ckpt._agent.pid is not None
        os.kill(ckpt._agent.pid, signal.SIGKILL)
        # The one that follows has more bandwidth, or this test would take hours.
        fast = {**(ckpt._agent.desk.persistent or {}), "bytes_per_second": 0}
        object.__setattr__(ckpt._agent.desk, "persistent", fast)
        assert ckpt._agent.wait(PATIENCE_SECONDS, everything=True)
        ckpt._collect()
    ckpt.abandon()
    return {
        "flushed": attached.versions("committed", "persistent"),
        "notices": [e.message for e in attached.events if e.name == "notice"],
    }


def test_an_agent_that_is_killed_leaves_its_flush_to_the_next(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place, shared = Place.under(tmp_path, shm_dir), str(tmp_path / "shared")
    zero, _ = ranks(2).run(with_an_agent_killed_in_mid_flush, place, shared)
    (version,) = zero["flushed"]
    assert any("agent ended unexpectedly" in text for text in zero["notices"])
    assert [n.id.version for n in PersistentStore(shared).versions()] == [version]


def test_a_place_that_cannot_be_written_costs_that_level_only(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    (tmp_path / "file").write_text("not a directory")
    shared = str(tmp_path / "file" / "shared")
    zero, one = ranks(2).run(train_and_close, place, shared, {})
    assert zero["flushed"] == one["flushed"] == []
    assert len(zero["failed"]) == 3
    assert all("training goes on" in text and shared in text for text in zero["failed"])
    assert zero["local"] == one["local"] == [4, 8, STEPS]
