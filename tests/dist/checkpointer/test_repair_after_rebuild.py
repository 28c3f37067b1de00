"""After a rebuild the redundancy is restored: the rebuilt version survives the next failure,
too."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.dist.checkpointer.test_repair_after_damage import damage_data
from tests.dist.peer.test_peer_level import (
    STEPS,
    leave_behind,
    lose,
    place_of,
    settings,
)
from tests.support.training import (
    PATIENCE_SECONDS,
    Place,
    attach,
    make_job,
    restored_into,
    train,
)
from tierckpt.storage import LocalPins


def come_back_and_crash(
    place: Place, scheme: str, steps: int = 4, times: int = 1
) -> dict[str, Any]:
    """Restore, run some steps without a checkpoint to disk, and crash when the version is
    protected."""
    job = make_job(seed=2)
    attached = attach(job, place, memory_every_steps=0, **settings(scheme))
    ckpt = attached.ckpt
    for _ in range(times - 1):
        ckpt.restore()
    told = restored_into(job, attached)
    told["course"] = {}
    for step in range(STEPS, STEPS + steps):
        ckpt.wait()  # so that the next vote can report it
        told["course"] |= train(job, ckpt, [step])
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not attached.versions("committed", "peer"):
        assert time.monotonic() < deadline, [e.text() for e in attached.events]
        time.sleep(0.01)
        ckpt.wait()
    told["protected"] = attached.versions("committed", "peer")
    told["complaints"] = [e.text() for e in attached.events if e.severity > 30]
    ckpt.abandon()
    return told


def test_one_failure_after_the_other(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """The simulator has the other schemes, and kills within the repair."""
    place, scheme = place_of(tmp_path, shm_dir), "rs 1+2"
    before = ranks(3).run(leave_behind, place, scheme)
    for lost in ((1, 2), (0, 1)):
        lose(place, tmp_path, *lost)
        for number, told in enumerate(ranks(3).run(come_back_and_crash, place, scheme)):
            assert told["restored"] == (STEPS, {"local": 3 - len(lost), "peer": len(lost)})
            assert told["digest"] == before[number]["course"][STEPS]
            assert told["protected"] == [STEPS], "the restored version, not a later one"
            assert told["complaints"] == []


def pin_and_crash(place: Place) -> None:
    """The marks and versions that are left on all nodes."""
    attached = attach(make_job(seed=2), place, memory_every_steps=0, **settings("xor"))
    attached.ckpt.restore()
    attached.ckpt.pin(STEPS)
    attached.ckpt.abandon()


def test_a_pin_is_kept_on_the_node_that_replaces_a_lost_one(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Otherwise its part of a version that the others keep would be removed."""
    place = place_of(tmp_path, shm_dir)
    ranks(3).run(leave_behind, place, "xor")
    ranks(3).run(pin_and_crash, place)
    nodes = [LocalPins(path) for path in sorted(tmp_path.glob("node*/ckpts"))]
    (pin,) = nodes[0].pins()
    assert [node.pins() for node in nodes] == [((pin.version, True),)] * 3
    for node in nodes:  # as a user makes it
        node.unmark([pin.version])
        node.pin([pin.version])
    lose(place, tmp_path, 1)
    for told in ranks(3).run(come_back_and_crash, place, "xor", times=2):
        assert told["protected"] == [STEPS], "a second restore takes the repair up again"
        assert told["complaints"] == []
    assert [node.pins() for node in nodes] == [((pin.version, False),)] * 3


def test_on_fewer_ranks_a_new_version_is_protected(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = place_of(tmp_path, shm_dir)
    ranks(3).run(leave_behind, place, "xor")
    lose(place, tmp_path, 2)
    before = ranks(2).run(come_back_and_crash, place, "xor")
    assert [told["protected"] for told in before] == [[STEPS + 1]] * 2
    lose(place, tmp_path, 0)
    for number, told in enumerate(ranks(2).run(come_back_and_crash, place, "xor")):
        assert told["restored"] == (STEPS + 1, {"local": 1, "peer": 1})
        assert told["digest"] == before[number]["course"][STEPS + 1]


def test_a_damaged_shard_beside_lost_parity(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    """Its file still exists, but the version is complete on all disks only after the repair."""
    place = place_of(tmp_path, shm_dir)
    before = ranks(3).run(leave_behind, place, "partner")
    lose(place, tmp_path)
    (node,) = tmp_path.glob("node1/ckpts")
    (shard,) = node.glob(f"v*{STEPS}.*.safetensors")
    damage_data(shard)
    for file in node.glob(f"v*{STEPS}.*.p*"):
        file.unlink()
    for number, told in enumerate(ranks(3).run(come_back_and_crash, place, "partner")):
        assert told["restored"] == (STEPS, {"local": 2, "peer": 1})
        assert "checksum" in told["rejected"][0]
        assert told["digest"] == before[number]["course"][STEPS]
        assert told["protected"] == [STEPS]
    lose(place, tmp_path, 0)
    for told in ranks(3).run(come_back_and_crash, place, "partner"):
        assert told["restored"] == (STEPS, {"local": 2, "peer": 1})
