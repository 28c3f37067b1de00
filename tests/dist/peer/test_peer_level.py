"""The peer level: shards of a node lost with disk and memory are rebuilt from the others."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import exact
from tests.support.training import Attached, Place, attach, make_job, rank, restored_into, train
from tierckpt.erasure import ParityManifest
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.format import Manifest
from tierckpt.restore import ShardImage, rebuild
from tierckpt.storage import LocalStore

EARLIER, STEPS = 3, 7


def settings(scheme: str, node: int | None = None) -> dict[str, Any]:
    return {
        "node": f"node{rank() if node is None else node}",
        "peer_redundancy": scheme,
        "peer_interface": "lo",
        "local_every_steps": 100,
        "local_every_seconds": 0,
        "slots": 3,
        "when_busy": "wait",
    }


def leave_behind(place: Place, scheme: str) -> dict[str, Any]:
    """Train, and end as in a crash, with the newest version protected."""
    job = make_job()
    attached = attach(job, place, **settings(scheme))
    ckpt = attached.ckpt
    course = train(job, ckpt, range(EARLIER))
    protected_at(EARLIER, attached)
    course |= train(job, ckpt, range(EARLIER, STEPS))
    protected_at(STEPS, attached)
    replicated = exact.digest(job.replicated())
    ckpt.abandon()
    return {
        "course": course,
        "replicated": replicated,
        "complaints": [e.text() for e in attached.events if e.severity > 30],
    }


def protected_at(version: int, attached: Attached) -> None:
    """Save, and wait for the agents; every rank is the first of its node."""
    attached.ckpt.save(now=True)
    attached.await_event("peer", version, "committed")


def come_back(place: Place, scheme: str) -> dict[str, Any]:
    job = make_job(seed=2)
    attached = attach(job, place, memory_every_steps=0, **settings(scheme))
    told = restored_into(job, attached)
    train(job, attached.ckpt, range(STEPS, STEPS + 2))
    attached.ckpt.close()
    return told


def place_of(tmp_path: Path, shm_dir: Path) -> Place:
    return Place(str(tmp_path / "{node}" / "ckpts"), str(shm_dir))


def lose(place: Place, tmp_path: Path, *nodes: int) -> None:
    """Remove these nodes' disks, and the memory of all nodes: everything was switched off."""
    for node in nodes:
        shutil.rmtree(tmp_path / f"node{node}")
    shutil.rmtree(place.shm)
    Path(place.shm).mkdir()


@pytest.mark.parametrize(("scheme", "lost"), [("xor", (1,)), ("rs 1+2", (1, 2))])
def test_the_losses_that_the_scheme_covers_are_restored_bit_for_bit(
    scheme: str, lost: tuple[int, ...], ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = place_of(tmp_path, shm_dir)
    before = ranks(3).run(leave_behind, place, scheme)
    assert [told["complaints"] for told in before] == [[]] * 3
    lose(place, tmp_path, *lost)
    after = ranks(3).run(come_back, place, scheme)
    for number, told in enumerate(after):
        assert told["restored"] == (STEPS, {"local": 3 - len(lost), "peer": len(lost)})
        assert told["rejected"] == ()
        assert told["digest"] == before[number]["course"][STEPS]
        assert told["replicated"] == before[0]["replicated"]


def groups_of_parity(place: Place) -> list[tuple[int, ...]]:
    """The groups of the parity on this node, after a version; two nodes are in a rack."""
    own = {"peer_domain": f"rack{rank() // 2}"}
    attached = attach(make_job(), place, **settings("xor of 2"), **own)
    protected_at(0, attached)
    store = LocalStore(attached.ckpt.config.directory)
    found = [ParityManifest.decode(store.read_manifest(key)).group for key in store.parities()]
    attached.ckpt.abandon()
    return found


def test_groups_are_as_large_as_is_set_and_of_several_racks(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = place_of(tmp_path, shm_dir)
    groups = [set(theirs[0]) for theirs in ranks(4).run(groups_of_parity, place)]
    assert [len(group) for group in groups] == [2] * 4
    assert [{number // 2 for number in group} for group in groups] == [{0, 1}] * 4
    assert all(number in group for number, group in enumerate(groups))
    assert set().union(*groups) == {0, 1, 2, 3}


def come_back_without_room(place: Place, poor: int) -> tuple[str, bool, dict[str, Any]]:
    """One rank lacks memory for the shards that it must rebuild; in the next attempt it has
    enough."""

    def no_room(manifest: Manifest) -> ShardImage:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    job = make_job(seed=2)
    attached = attach(job, place, memory_every_steps=0, **settings("xor"))
    before = job.digest()
    with pytest.MonkeyPatch.context() as patch:
        if rank() == poor:
            patch.setattr(rebuild, "in_memory", no_room)
        with pytest.raises(RestoreError) as refusal:
            attached.ckpt.restore()
    untouched = job.digest() == before
    told = restored_into(job, attached)
    attached.ckpt.close()
    return str(refusal.value), untouched, told


def test_a_rank_without_memory_for_its_lost_shard_leaves_no_other_waiting(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = place_of(tmp_path, shm_dir)
    before = ranks(3).run(leave_behind, place, "xor")
    lose(place, tmp_path, 1)
    for number, (why, untouched, told) in enumerate(ranks(3).run(come_back_without_room, place, 1)):
        assert f"v{STEPS} " in why
        assert "cannot be rebuilt: rank 1 has no memory for shard 1" in why
        assert untouched
        assert told["digest"] == before[number]["course"][STEPS]


def save_every_step(place: Place) -> tuple[int, int | None]:
    """Final number of manifests on this node's disk, and the newest version known as protected."""
    job = make_job()
    attached = attach(job, place, **settings("xor"))
    for step in range(6):
        train(job, attached.ckpt, range(step, step + 1))
        protected_at(step + 1, attached)
    safe = attached.ckpt._agreement.peer.safe
    attached.ckpt.close()
    return len(list(Path(attached.ckpt.config.directory).glob("*.manifest"))), safe and safe.version


def test_versions_that_are_all_taken_on_demand_are_retired_too(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """A save settles everything between boundaries; the results of other nodes must arrive, too."""
    for kept, safe in ranks(3).run(save_every_step, place_of(tmp_path, shm_dir)):
        assert safe is not None
        assert safe >= 4
        assert kept <= 6, "shards and parities of three versions"


def save_without_pause(place: Place) -> list[set[str]]:
    """Save versions faster than they are protected, and close; returns the shards and parity on
    this node's disk."""
    job = make_job()
    attached = attach(job, place, **settings("rs 2+1"), local_keep=1)
    for step in range(6):
        train(job, attached.ckpt, range(step, step + 1))
        attached.ckpt.save(now=True)
    store = LocalStore(attached.ckpt.config.directory)
    attached.ckpt.close()
    return [{key.id.version for key in kind} for kind in (store.keys(), store.parities())]


def test_versions_protected_at_the_end_of_the_job_free_the_older_ones(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """No later boundary would free them."""
    for kept in ranks(3).run(save_without_pause, place_of(tmp_path, shm_dir)):
        assert kept == [{6}, {6}]


def test_on_fewer_ranks_too(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """And with another scheme."""
    place = place_of(tmp_path, shm_dir)
    before = ranks(4).run(leave_behind, place, "rs 2+2")
    lose(place, tmp_path, 2, 3)
    for told in ranks(2).run(come_back, place, "xor"):
        assert told["restored"] == (STEPS, {"local": 2, "peer": 2})
        assert told["replicated"] == before[0]["replicated"]


def refused(place: Place) -> str:
    with pytest.raises(ConfigError) as caught:
        attach(make_job(), place, **settings("rs 4+2"))
    return str(caught.value)


def come_back_unprotected(place: Place, scheme: str, steps: range) -> dict[str, Any]:
    """Restore within the scheme's promise, continue, and end as in a crash."""
    job = make_job(seed=2)
    attached = attach(job, place, memory_every_steps=0, **settings(scheme))
    told = restored_into(job, attached)
    told["complaints"] = [e.text() for e in attached.events if e.severity > 30]
    train(job, attached.ckpt, steps)
    attached.ckpt.abandon()
    return told


def test_a_scheme_that_needs_the_lost_node_does_not_forbid_the_restart(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """There is no spare. Protected versions are rebuilt, as often as needed, and a message says
    that no new version is protected."""
    place, scheme = place_of(tmp_path, shm_dir), "rs 1+2"
    before = ranks(3).run(leave_behind, place, scheme)
    lose(place, tmp_path, 2)
    for _ in range(2):
        after = ranks(2).run(come_back_unprotected, place, scheme, range(STEPS, STEPS + 2))
        for told in after:
            assert told["restored"] == (STEPS, {"local": 2, "peer": 1})
            assert told["replicated"] == before[0]["replicated"]
        (complaint,) = after[0]["complaints"]
        assert "the peer level is off: rs 1+2 needs 3 failure domains per group" in complaint
        assert "the job has 2" in complaint
        assert "Use partner 1" in complaint
        assert "a new version is lost with a node's disk" in complaint
        assert after[1]["complaints"] == [], "said once"
        shutil.rmtree(place.shm)  # the nodes were switched off, too
        Path(place.shm).mkdir()


def continue_without_peers(place: Place, steps: range) -> list[int]:
    """Restore, make an unprotected version durable, and crash; returns the versions with
    parity on this node."""
    job = make_job()
    attached = attach(job, place, **settings("xor"))
    ckpt = attached.ckpt
    peers: Any = ckpt._levels.peers
    peers.ready, peers.meet = False, lambda *_: None  # no agent gets through to another
    ckpt.restore()
    train(job, ckpt, steps)
    ckpt.save(now=True)
    ckpt.abandon()
    return [key.id.version for key in LocalStore(ckpt.config.directory).parities()]


def test_a_protected_version_stays_across_runs_until_a_newer_one_is_protected(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = place_of(tmp_path, shm_dir)
    before = ranks(3).run(leave_behind, place, "xor")
    for steps in (range(STEPS, STEPS + 2), range(STEPS + 2, STEPS + 4)):
        kept = ranks(3).run(continue_without_peers, place, steps)
        assert all(STEPS in versions for versions in kept), kept
    lose(place, tmp_path, 1)
    for number, told in enumerate(ranks(3).run(come_back, place, "xor")):
        assert told["restored"] == (STEPS, {"local": 2, "peer": 1})
        assert told["digest"] == before[number]["course"][STEPS]
