"""Codecs on several ranks: one rank decodes for all, and peers rebuild encoded shards."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.dist.peer.test_peer_level import lose, place_of, protected_at
from tests.dist.peer.test_peer_level import settings as peer_settings
from tests.dist.storage.test_persistent_level import lose_the_nodes
from tests.dist.storage.test_persistent_level import settings as persistent_settings
from tests.support import exact
from tests.support.training import Place, attach, make_job, restored_into, train
from tierckpt.format import Manifest
from tierckpt.storage import LocalStore
from tierckpt.storage.persistent import PersistentStore

STEPS = 5


def settings(shared: str) -> dict[str, Any]:
    more: dict[str, Any] = {"local_codecs": "incremental, zstd"}
    more |= {"persistent_codecs": "delta, zstd level=1, zstd", "persistent_keep": "2, every 1"}
    return persistent_settings(shared, local_every_steps=1, **more)


def train_and_close(place: Place, shared: str) -> dict[str, Any]:
    job = make_job()
    attached = attach(job, place, **settings(shared))
    course = train(job, attached.ckpt, range(STEPS - 1))
    attached.ckpt.wait()
    course |= train(job, attached.ckpt, range(STEPS - 1, STEPS))
    attached.ckpt.close()
    failed = [e.text() for e in attached.events if e.name == "failed"]
    return {"course": course, "replicated": exact.digest(job.replicated()), "failed": failed}


def come_back(place: Place, shared: str) -> dict[str, Any]:
    job = make_job(seed=2)
    attached = attach(job, place, memory_every_steps=0, **settings(shared))
    told = restored_into(job, attached)
    attached.ckpt.close()
    return told


@pytest.mark.parametrize(("level", "now"), [("local", 3), ("persistent", 1)])
def test_shards_encoded_by_two_ranks_are_restored_by_any_number(
    level: str, now: int, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place, shared = Place.under(tmp_path, shm_dir), str(tmp_path / "shared")
    before = ranks(2).run(train_and_close, place, shared)
    assert [told["failed"] for told in before] == [[], []]
    store = LocalStore(place.path)
    assert all(Manifest.decode(store.read_manifest(k)).encoding for k in store.keys())  # noqa: SIM118
    if level == "persistent":
        far = PersistentStore(shared)
        assert far.read_manifest(far.versions()[-1]).bases, "a difference, by both ranks"
        lose_the_nodes(place)
    else:
        shutil.rmtree(place.shm)
        Path(place.shm).mkdir()
    for told in ranks(now).run(come_back, place, shared):
        assert told["restored"] == (STEPS, {level: 2})
        assert told["rejected"] == ()
        assert told["replicated"] == before[0]["replicated"]


def encoded_peers() -> dict[str, Any]:
    return {**peer_settings("xor"), "local_codecs": "incremental, zstd"}


def leave_behind(place: Place) -> dict[str, Any]:
    job = make_job()
    attached = attach(job, place, **encoded_peers())
    course: dict[int, str] = {}
    for start, end in ((0, 2), (2, STEPS)):
        course |= train(job, attached.ckpt, range(start, end))
        protected_at(end, attached)
    attached.ckpt.abandon()
    return {"course": course, "replicated": exact.digest(job.replicated())}


def come_back_from_peers(place: Place) -> dict[str, Any]:
    job = make_job(seed=2)
    attached = attach(job, place, memory_every_steps=0, **encoded_peers())
    told = restored_into(job, attached)
    attached.ckpt.abandon()
    return told


def test_a_lost_node_is_rebuilt_from_encoded_shards(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Parity covers shards as they were sealed, whatever codecs their nodes use."""
    place = place_of(tmp_path, shm_dir)
    before = ranks(3).run(leave_behind, place)
    lose(place, tmp_path, 1)
    for number, told in enumerate(ranks(3).run(come_back_from_peers, place)):
        assert told["restored"] == (STEPS, {"local": 2, "peer": 1})
        assert told["rejected"] == ()
        assert told["digest"] == before[number]["course"][STEPS]
