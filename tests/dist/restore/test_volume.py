"""Every byte is read from storage once per job, however many ranks need it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import tierckpt.coordination.settings_check
import tierckpt.restore.rebuild
from tests.dist.peer import test_peer_level as peer
from tests.dist.storage import test_persistent_level as persistent
from tests.support.training import Place, attach, crash_after, make_job, rank, working_in
from tierckpt.format import Manifest
from tierckpt.restore import ShardImage
from tierckpt.storage.persistent import ShardReader


def volume(place: Place, settings: dict[str, Any], host: int | None = None) -> dict[str, Any]:
    """Restore, and return the bytes by target, and the bytes requested from storage."""
    asked: list[int] = []
    read, read_into = ShardReader.read, ShardReader.read_into

    def counted(reader: ShardReader, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = read(reader, offset, nbytes)
        asked.append(len(data))
        return data

    def counted_into(reader: ShardReader, offset: int, into: memoryview) -> None:
        read_into(reader, offset, into)
        asked.append(len(into))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardReader, "read", counted)
        patch.setattr(ShardReader, "read_into", counted_into)
        if host is not None:
            patch.setattr(
                tierckpt.coordination.settings_check, "host_id", lambda node: f"host{host}"
            )
        attached = attach(make_job(seed=2), place, **settings)
        restored = attached.ckpt.restore()
        attached.ckpt.abandon()
    return {
        "all": restored.nbytes,
        "read": restored.read_bytes,
        "exchanged": restored.exchanged_bytes,
        "asked": sum(asked),
        "levels": restored.shard_levels,
        "seconds": set(restored.seconds),
    }


def total(told: list[dict[str, Any]], what: str) -> int:
    return sum(each[what] for each in told)


def leave_on_disk(place: Place) -> None:
    attached = attach(job := make_job(), place, local_every_steps=2)
    crash_after(job, attached, 2)


def test_ranks_of_a_node_read_a_shard_once(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    place = Place.under(tmp_path, shm_dir)
    ranks(2).run(leave_on_disk, place)
    shutil.rmtree(next(shm_dir.iterdir()))
    told = ranks(3).run(volume, place, {})
    assert total(told, "read") == told[0]["all"] > 0
    assert total(told, "exchanged") == 0
    assert told[0]["levels"] == ("local", "local")
    assert told[0]["seconds"] == {"inventory", "verify", "load", "total"}


def on_machines(root: Path, crash: bool) -> dict[str, Any] | None:
    with working_in(root / f"host{rank()}"), pytest.MonkeyPatch.context() as patch:
        Path("memory").mkdir(exist_ok=True)
        place = Place("disk", "memory")
        if not crash:
            return volume(place, {}, rank())
        patch.setattr(tierckpt.coordination.settings_check, "host_id", lambda node: f"host{rank()}")
        attached = attach(job := make_job(), place)
        crash_after(job, attached, 2)
    return None


def test_machines_read_their_own_and_send_it(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(on_machines, tmp_path, True)
    told = ranks(2).run(on_machines, tmp_path, False)
    assert total(told, "read") == told[0]["all"] > 0
    assert told[0]["read"] == told[1]["exchanged"]
    assert told[1]["read"] == told[0]["exchanged"]


def test_the_persistent_level_is_read_once_a_job(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    place, shared = Place.under(tmp_path, shm_dir), str(tmp_path / "shared")
    ranks(2).run(persistent.train_and_close, place, shared, {})
    persistent.lose_the_nodes(place)
    told = ranks(3).run(volume, place, persistent.settings(shared))
    assert total(told, "asked") == total(told, "read") == told[0]["all"] > 0
    assert total(told, "exchanged") == 2 * told[0]["all"]


def rebuilt(place: Place, scheme: str = "xor") -> dict[str, Any]:
    """Restore, and return also the rebuilt shards that this rank held."""
    held: list[int] = []
    plain = tierckpt.restore.rebuild.in_memory

    def counted(manifest: Manifest) -> ShardImage:
        held.append(manifest.shard)
        return plain(manifest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tierckpt.restore.rebuild, "in_memory", counted)
        return volume(place, peer.settings(scheme)) | {"held": held}


@pytest.mark.parametrize(("now", "held"), [(3, [[], [1], [2]]), (1, [[1, 2]])])
def test_a_rebuilt_shard_is_in_the_memory_of_one_rank(
    now: int, held: list[list[int]], ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = peer.place_of(tmp_path, shm_dir)
    ranks(3).run(peer.leave_behind, place, "partner 2")
    peer.lose(place, tmp_path, 1, 2)
    told = ranks(now).run(rebuilt, place, "partner 2")
    assert told[0]["levels"] == ("local", "peer", "peer")
    assert [each["held"] for each in told] == held


def test_a_rebuild_reads_the_remaining_shards_once(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = peer.place_of(tmp_path, shm_dir)
    ranks(3).run(peer.leave_behind, place, "xor")
    peer.lose(place, tmp_path, 1)
    told = ranks(3).run(rebuilt, place)
    newest = f"v{peer.STEPS:010d}"
    left = [p for n in (0, 2) for p in (tmp_path / f"node{n}" / "ckpts").glob(f"{newest}.*")]
    bytes_left = sum(p.stat().st_size for p in left if p.suffix in (".safetensors", ".parity"))
    assert total(told, "read") == bytes_left > 0
    assert told[0]["levels"] == ("local", "peer", "local")
    assert "rebuild" in told[0]["seconds"]


def test_a_fetched_shard_is_not_fetched_again_when_another_shard_is_damaged(
    ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    """Shard 0 is remote only. Shard 1 is here, and damaged, which is found during the read."""
    place, shared = Place.under(tmp_path, shm_dir), str(tmp_path / "shared")
    ranks(2).run(persistent.train_and_close, place, shared, {})
    folder = Path(place.path)
    for lost in folder.glob("v*.s00000of00002.*"):
        lost.unlink()
    for damaged in folder.glob("v*.s00001of00002.safetensors"):
        content = bytearray(damaged.read_bytes())
        content[-5000] ^= 1
        damaged.write_bytes(content)
    told = ranks(2).run(volume, place, persistent.settings(shared))
    assert told[0]["levels"] == ("persistent", "persistent")
    assert total(told, "asked") == told[0]["all"] > 0
