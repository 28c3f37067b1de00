"""Keep-best and pins on several nodes: all keep the same versions, whatever each measured."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.support.rank_pool import GLOO, HOROVODRUN
from tests.support.training import Attached, Job, Place, attach, make_horovod_job, make_job, rank
from tierckpt.storage import LocalPins, LocalStore

STEPS, LATER = 6, 9
LOSSES = [
    {1: -3.0, 2: -7.5, 3: -1.0, 4: 2.0, 5: 0.0, 6: -2.0},
    {1: -3.0, 2: -1.0, 3: -9.0, 4: -8.0, 5: -7.0, 6: -6.0},
]
"""Metrics of each rank. Rank 0's count, and v2 is its best; v3 would be rank 1's."""


def place_of(tmp_path: Path, shm_dir: Path) -> Place:
    return Place(str(tmp_path / "{node}"), str(shm_dir))


def start(kind: str, place: Place, **settings: Any) -> tuple[Job, Attached]:
    job = make_job() if kind == GLOO else make_horovod_job()
    given = {"local_every_steps": 1, "local_keep": 1, "slots": 3, "when_busy": "wait"}
    return job, attach(job, place, node=f"node{rank()}", **{**given, **settings})


def train(job: Job, ckpt: tierckpt.Checkpointer, iterations: range) -> dict[int, str]:
    course = {}
    for iteration in iterations:
        job.iterate(iteration)
        ckpt.step(metric=LOSSES[rank()].get(iteration + 1))
        course[iteration + 1] = job.digest()
    return course


def train_and_close(kind: str, place: Place, **settings: Any) -> tuple[dict[int, str], list[int]]:
    job, attached = start(kind, place, **settings)
    course = train(job, attached.ckpt, range(STEPS))
    attached.ckpt.close()
    return course, on_node(attached)


def on_node(attached: Attached) -> list[int]:
    store = LocalStore(attached.ckpt.config.directory)
    return sorted({key.id.version for key in store.keys()})  # noqa: SIM118


def resume(kind: str, place: Place, **settings: Any) -> list[int]:
    job, attached = start(kind, place, **settings)
    restored = attached.ckpt.restore()
    train(job, attached.ckpt, range(int(restored), LATER))
    attached.ckpt.close()
    return on_node(attached)


def go_back(kind: str, place: Place, version: int) -> str:
    job, attached = start(kind, place)
    attached.ckpt.restore(version=version)
    attached.ckpt.abandon()
    return job.digest()


def test_rank_zeros_metric_decides_on_all_nodes(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    place, kind = place_of(tmp_path, shm_dir), HOROVODRUN
    before = ranks(2, kind).run(train_and_close, kind, place, local_keep="1, best 1")
    assert [kept for _, kept in before] == [[2, STEPS]] * 2
    # A run that finds only the files knows the best version, too.
    shutil.rmtree(shm_dir)
    shm_dir.mkdir()
    assert ranks(2, kind).run(resume, kind, place, local_keep="1, best 1") == [[2, LATER]] * 2
    assert ranks(2, kind).run(go_back, kind, place, 2) == [course[2] for course, _ in before]


def pin_one(place: Place) -> tuple[Any, ...]:
    # Otherwise v1 would stay until a newer version is known to be the same on all ranks.
    job, attached = start(GLOO, place, replicas="off")
    course = train(job, attached.ckpt, range(3))
    attached.ckpt.save(now=True)
    pinned = attached.ckpt.pin(3)
    course |= train(job, attached.ckpt, range(3, STEPS))
    with pytest.raises(tierckpt.PinError, match="cannot pin v1: there is no such version"):
        attached.ckpt.pin(1)
    attached.ckpt.close()
    return course[3], pinned, on_node(attached)


def unpin(place: Place) -> tuple[tuple[str, ...], list[int]]:
    job, attached = start(GLOO, place)
    restored = attached.ckpt.restore()
    unpinned = attached.ckpt.unpin(3)
    train(job, attached.ckpt, range(int(restored), LATER))
    attached.ckpt.close()
    return unpinned, on_node(attached)


def test_a_pin_holds_on_all_nodes(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    place = place_of(tmp_path, shm_dir)
    before = ranks(2).run(pin_one, place)
    assert [told[1:] for told in before] == [(("local",), [3, STEPS])] * 2
    assert ranks(2).run(go_back, GLOO, place, 3) == [digest for digest, *_ in before]
    assert ranks(2).run(unpin, place) == [(("local",), [LATER])] * 2
    for node in ("node0", "node1"):
        assert LocalPins(tmp_path / node).marked() == set()


def pin_and_fail(place: Place) -> str:
    if rank() == 1:
        Path(place.path.replace("{node}", "node1")).parent.write_text("no directory")
    _, attached = start(GLOO, place)
    with pytest.raises(tierckpt.PinError) as refused:
        attached.ckpt.pin(1)
    attached.ckpt.abandon()
    return str(refused.value)


def test_a_node_that_cannot_be_asked_is_an_error_on_all_ranks(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place(str(tmp_path / "{node}" / "ckpts"), str(shm_dir))
    for text in ranks(2).run(pin_and_fail, place):
        assert text.startswith("rank 1 cannot reach its pins")
        assert str(tmp_path / "node1") in text
