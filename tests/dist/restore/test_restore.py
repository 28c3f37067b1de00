"""A restore gives one version, the same on all ranks, wherever they run and however many there
are."""

from __future__ import annotations

import logging
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import tierckpt
import tierckpt.coordination.settings_check
from tests.support import exact
from tests.support.training import (
    Net,
    Place,
    attach,
    crash_after,
    make_job,
    rank,
    restored_into,
    train,
    working_in,
)

normed = partial(Net, norm=nn.BatchNorm1d)
VERSION = 4


class Position:
    """Position of a data loader, different on each rank."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


# --- another world size --------------------------------------------------------------------------


def leave_behind(place: Place, local: bool) -> tuple[str, list[str]]:
    """Train, crash, and return the state at the last boundary: the common and the per-rank part."""
    job = make_job(net=normed, broadcast_buffers=False)
    position = Position()
    extra = {"position": position}
    every = {"local_every_steps": VERSION} if local else {}
    attached = attach(job, place, extra_per_rank=extra, **every)
    train(job, attached.ckpt, range(VERSION - 1))
    job.iterate(VERSION - 1)
    position.at = 100 + rank()
    attached.ckpt.step()
    replicated = exact.digest(job.replicated())
    own = [exact.digest(exact.buffers(job.bare)), exact.digest(exact.streams())]
    job.iterate(VERSION)
    attached.ckpt.abandon()
    return replicated, own


def take_up(place: Place) -> dict[str, Any]:
    job = make_job(net=normed, broadcast_buffers=False, seed=2)
    position = Position()
    position.at = -1
    attached = attach(job, place, extra_per_rank={"position": position})
    restored = attached.ckpt.restore()
    told = {
        "restored": (int(restored), restored.version, restored.levels),
        "replicated": exact.digest(job.replicated()),
        "own": [exact.digest(exact.buffers(job.bare)), exact.digest(exact.streams())],
        "position": position.at,
        "notices": [e.message for e in attached.events if e.name == "notice"],
    }
    # The training continues, with another number of shards.
    train(job, attached.ckpt, range(restored, restored + 3))
    told["course"] = exact.digest(job.replicated())
    attached.ckpt.close()
    return told


@pytest.mark.parametrize(("before", "now", "local"), [(3, 2, False), (2, 2, True), (2, 3, True)])
def test_any_number_of_ranks_can_continue(
    before: int, now: int, local: bool, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    left = ranks(before).run(leave_behind, place, local)
    if local:
        shutil.rmtree(next(shm_dir.iterdir()))
    told = ranks(now).run(take_up, place)
    level = "local" if local else "memory"
    assert len({t["course"] for t in told}) == 1
    for number, found in enumerate(told):
        assert found["restored"] == (VERSION, VERSION, {level: before})
        assert found["replicated"] == left[0][0]
        buffers, streams = left[number % before][1]
        assert found["own"][0] == buffers
        if number < before:
            assert found["own"][1] == streams
        if before == now:
            assert found["position"] == 100 + number
            assert found["notices"] == []
        else:
            assert found["position"] == -1
            assert any("position" in text for text in found["notices"])
    assert len({t["own"][1] for t in told}) == now, "no two ranks have the same random stream"
    assert place.segments() == []


# --- ranks on machines of their own --------------------------------------------------------------


def on_hosts(root: Path, hosts: list[int], crash: bool) -> dict[str, Any]:
    """Rank r runs on machine `hosts[r]`, which has its own disk, memory and name.

    Settings are the same on all ranks, so the paths are relative, and machines are folders.
    """
    host = hosts[rank()]
    with working_in(root / f"host{host}"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tierckpt.coordination.settings_check, "host_id", lambda node: f"host{host}")
        patch.setattr("tierckpt.restore.rebuild.BROADCAST_BYTES", 1000)
        Path("memory").mkdir(exist_ok=True)
        place = Place("disk", "memory")
        if crash:
            job = make_job()
            attached = attach(job, place, local_every_steps=2)
            attached.ckpt._agent.wait(None)
            course = train(job, attached.ckpt, range(2))
            job.iterate(2)
            attached.ckpt._agent.wait(None)
            attached.ckpt.step()
            course[3] = job.digest()
            job.iterate(3)
            attached.ckpt.abandon()
            return {"course": course, "replicated": exact.digest(job.replicated())}
        job = make_job(seed=2)
        attached = attach(job, place)
        restored = attached.ckpt.restore()
        told = {
            "restored": (restored.version, restored.levels),
            "digest": job.digest(),
            "replicated": exact.digest(job.replicated()),
            "complaints": [e.text() for e in attached.events if e.severity > 20],
        }
        attached.ckpt.abandon()
        return told


@pytest.mark.parametrize("hosts", [[0, 1], [2, 1, 0]], ids=str)
def test_machines_that_share_nothing_send_each_other_their_shards(
    hosts: list[int], ranks: Any, tmp_path: Path
) -> None:
    """Also where ranks come back on another machine, or on more of them: shards are named by their
    content, not by the place or the rank that wrote them."""
    left = ranks(2).run(on_hosts, tmp_path, [0, 1], True)
    told = ranks(len(hosts)).run(on_hosts, tmp_path, hosts, False)
    assert [t["restored"] for t in told] == [(3, {"memory": 2})] * len(hosts)
    assert [t["digest"] for t in told[:2]] == [side["course"][3] for side in left]
    assert len({t["replicated"] for t in told}) == 1
    if hosts == [0, 1]:
        assert [t["complaints"] for t in told] == [[], []]


def test_without_one_of_the_machines_nothing_is_made_up(ranks: Any, tmp_path: Path) -> None:
    """No version is complete any more; nor did any rank learn that one was on all disks."""
    ranks(2).run(on_hosts, tmp_path, [0, 1], True)
    shutil.rmtree(tmp_path / "host1", ignore_errors=True)  # an agent that ends tidies up there
    told = ranks(2).run(on_hosts, tmp_path, [0, 1], False)
    assert [t["restored"] for t in told] == [(0, {}), (0, {})]
    said = "found: 1 of 2 shards of v3, shard 1 missing; 1 of 2 shards of v2, shard 1 missing"
    assert [sum(said in text for text in t["complaints"]) for t in told] == [1, 1]


def test_shards_of_two_runs_are_counted_apart(ranks: Any, tmp_path: Path) -> None:
    """Two jobs of one path, on machines that did not see each other; then one of each restarts."""
    for hosts in ([0, 2], [3, 1]):
        ranks(2).run(on_hosts, tmp_path, hosts, True)
    told = ranks(2).run(on_hosts, tmp_path, [0, 1], False)
    assert [t["restored"] for t in told] == [(0, {}), (0, {})]
    first, second = (rf"1 of 2 shards of v3 of run \w+ \(on \S+\), shard {n} missing" for n in "01")
    for text in (" ".join(t["complaints"]) for t in told):
        assert "2 of 2 shards" not in text
        assert re.search(f"({first}; {second}|{second}; {first}); ", text), text
        assert "shards of different runs of the job do not make one version" in text


# --- damage --------------------------------------------------------------------------------------


def leave_versions_on_disk(place: Place) -> dict[int, str]:
    job = make_job()
    attached = attach(job, place, local_every_steps=1000, local_keep=4)
    course = {}
    for version in range(1, 4):
        course.update(train(job, attached.ckpt, range(version - 1, version)))
        attached.ckpt.save(now=True)
    attached.ckpt.abandon()
    return course


def restore_what_is_sound(place: Place) -> dict[str, Any]:
    job = make_job(seed=2)
    attached = attach(job, place)
    told = restored_into(job, attached)
    attached.ckpt.abandon()
    told["loud"] = len([e for e in attached.events if e.severity >= 40])
    return told


def shard_of(place: Place, version: int, number: int) -> Path:
    (file,) = Path(place.path).glob(f"v{version:010d}.*.s{number:05d}of*.safetensors")
    return file


def test_truncated_here_and_missing_there(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """One damaged shard, or a lost one, is in the golden directories."""
    place = Place.under(tmp_path, shm_dir)
    left = ranks(2).run(leave_versions_on_disk, place)
    shutil.rmtree(next(shm_dir.iterdir()))
    file = shard_of(place, 3, 0)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    shard_of(place, 2, 1).unlink()
    told = ranks(2).run(restore_what_is_sound, place)
    for each, course in zip(told, left, strict=True):
        assert each["restored"] == (1, {"local": 2})
        assert each["digest"] == course[1]
        assert len(each["rejected"]) == 2


# --- mismatches ----------------------------------------------------------------------------------


def restore_into_another(what: str, place: Place) -> tuple[str, bool, list[str]]:
    crash_after(job := make_job(), attach(job, place), 3)
    job = make_job(net=partial(Net, layers=5) if what == "another layer" else Net, seed=2)
    position = Position()
    given_here = {"position": position} if what == "an extra on rank 1" and rank() == 1 else {}
    attached = attach(job, place, extra_per_rank=given_here)
    before = job.digest()
    with pytest.raises(tierckpt.StateMismatchError) as caught:
        attached.ckpt.restore()
    untouched = job.digest() == before
    attached.ckpt.restore(strict=False)
    accepted = [e.text() for e in attached.events if e.severity == logging.WARNING]
    attached.ckpt.abandon()
    return str(caught.value), untouched, [text for text in accepted if "strict=False" in text]


class Choosy(Position):
    """Does not accept its own saved state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("nope")


def restore_what_an_object_refuses(place: Place) -> tuple[str, bool]:
    job = make_job()
    crash_after(job, attach(job, place, extra_per_rank={"position": Position()}), 3)
    again = make_job(seed=2)
    taker = Choosy() if rank() == 1 else Position()
    attached = attach(again, place, extra_per_rank={"position": taker})
    with pytest.raises(tierckpt.StateTornError) as caught:
        attached.ckpt.restore()
    attached.ckpt.abandon()
    return str(caught.value), attached.ckpt._state.torn


def test_an_object_that_does_not_take_its_state_is_an_error_on_all_ranks(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Rank 0 would train on alone."""
    place = Place.under(tmp_path, shm_dir)
    zero, one = ranks(2).run(restore_what_an_object_refuses, place)
    assert (zero[1], one[1]) == (False, True), "what is whole, and what is not"
    for text in (zero[0], one[0]):
        assert "rank 1: extra_per_rank['position'], a Choosy, did not take its state" in text
        assert "KeyError: 'nope'" in text


@pytest.mark.parametrize(
    ("what", "named"),
    [("another layer", "model/body.12.weight"), ("an extra on rank 1", "position")],
)
def test_another_structure_is_an_error_on_all_ranks(
    what: str, named: str, ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """It names the job's directory. A restore that accepts it says so once, not on each rank."""
    place = Place.under(tmp_path, shm_dir)
    accepted: list[list[str]] = []
    for text, untouched, said in ranks(2).run(restore_into_another, what, place):
        assert named in text
        assert f"of the job in {place.path} does not fit" in text
        assert untouched
        accepted.append(said)
    assert any(named in said for said in accepted[0]) == (what != "an extra on rank 1")
    assert bool(accepted[1]) == (what == "an extra on rank 1")


# --- going back ----------------------------------------------------------------------------------
