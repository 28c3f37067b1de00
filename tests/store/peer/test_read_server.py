"""The read server of an agent, while the agent itself continues to change the node's shards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests.support.peer_shards import SECRET
from tests.support.processes import end, python
from tests.support.shards import IMAGE_BYTES, manifest
from tierckpt.core import AGENT, Inventory
from tierckpt.format import Manifest, ShardKey
from tierckpt.peer import RemoteNode, Transport, remote_reads
from tierckpt.storage import (
    ImageFile,
    JobDirectory,
    LocalStore,
    Slot,
    lock_shared,
    seal_area_bytes,
    slots,
)
from tierckpt.storage.persistent import VersionName


@pytest.fixture
def slot(shm_dir: Path) -> Iterator[Slot]:
    """A sealed slot, pinned as by an agent that commits it."""
    job = JobDirectory.at(shm_dir, "job")
    job.create()
    made = sealed(job.slot_path(0, 0), manifest())
    lock_shared(made.fd)
    yield made
    made.remove()


def sealed(path: Path, shard: Manifest, store: LocalStore | None = None) -> Slot:
    """A slot with that shard, filled with its version's number; `store` has its image."""
    file = store and ImageFile.make(path, store, shard.shard, IMAGE_BYTES)
    made = Slot.create(path, path.name, seal_area_bytes(8), 0 if file else IMAGE_BYTES, file)
    with made.image() as image:
        image[:] = bytes([shard.id.version]) * IMAGE_BYTES
    made.seal(shard.encode())
    return made


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(tmp_path / "local")
    made.create()
    return made


@pytest.fixture
def agent(slot: Slot, store: LocalStore) -> Iterator[Transport]:
    assert slot.path is not None
    root, job = slot.path.parent.parent, slot.path.parent.name
    with Transport(SECRET, "127.0.0.1") as made:
        made.read_server.add(store, JobDirectory(root, job))
        yield made


@pytest.fixture
def node(agent: Transport) -> Iterator[RemoteNode]:
    """A reader of the shards in the node's memory."""
    with closing(RemoteNode("node 1", agent.address, SECRET, in_memory=True)) as made:
        yield made


def name_of(shard: Manifest) -> VersionName:
    return VersionName(shard.id, shard.facts.shards, shard.facts.run_id)


def test_looking_at_slots_leaves_the_agents_own_pins(slot: Slot, node: RemoteNode) -> None:
    (found,) = node.inventory("node1").found
    assert (found.key, found.place.level) == (manifest().key, AGENT)
    file = node.open_shard(name_of(manifest()), manifest().shard)
    with slot.image() as image:
        assert file.read(0, 100) == bytes(image[:100])
    trainer = python(
        "import sys; from pathlib import Path; from tierckpt.storage.slots import Slot\n"
        "print(Slot.open(Path(sys.argv[1])).in_use_elsewhere())",
        slot.path,
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "True\n"
    end(trainer)


def test_a_shard_is_listed_and_read_in_memory_and_on_disk(
    slot: Slot, store: LocalStore, agent: Transport, node: RemoteNode
) -> None:
    """One of the two may be damaged, and must not hide the other. A killed trainer's slot is
    committed between two reads of it."""
    in_memory = node.open_shard(name_of(manifest()), manifest().shard)
    assert in_memory.read(0, 100) == bytes([1]) * 100
    store.commit(manifest().key, memoryview(bytes(IMAGE_BYTES)), manifest(created=1.0).encode())
    found = node.inventory("node1").found
    assert {(f.key, f.place.in_memory) for f in found} == {(manifest().key, i) for i in (0, 1)}
    assert in_memory.read(0, 100) == bytes([1]) * 100
    with closing(RemoteNode("node 1", agent.address, SECRET)) as disk:
        on_disk = disk.open_shard(name_of(manifest()), manifest().shard)
        assert on_disk.manifest != in_memory.manifest
        assert on_disk.read(0, 100) == bytes(100)


def test_a_file_that_was_replaced_counts_as_missing(
    slot: Slot, store: LocalStore, agent: Transport
) -> None:
    """The shard on disk is written again between two reads, with codecs: so its manifest is another
    one."""
    with slot.image() as image, closing(RemoteNode("node 1", agent.address, SECRET)) as node:
        store.commit(manifest().key, image, manifest().encode())
        file = node.open_shard(name_of(manifest()), manifest().shard)
        assert len(file.read(0, 100)) == 100
        store.commit(manifest().key, image, manifest(created=1.0).encode())
        with pytest.raises(FileNotFoundError, match="was moved or deleted"):
            file.read(100, 100)
        again = node.open_shard(name_of(manifest()), manifest().shard)
        assert len(again.read(100, 100)) == 100


def test_each_range_of_a_slot_costs_itself_alone(
    slot: Slot, node: RemoteNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plus a look at the seal: nothing is mapped or decoded, and no other slot is read."""
    assert slot.path is not None
    other = sealed(slot.path.with_suffix(".1"), manifest(2))
    file = node.open_shard(name_of(manifest(2)), manifest(2).shard)
    assert file.read(0, 10) == bytes([2]) * 10
    looked: set[Path] = set()
    open_plain = slots.open_plain

    def seen_opening(path: Path, buffering: int = -1) -> BinaryIO:
        looked.add(path)
        return open_plain(path, buffering)

    monkeypatch.setattr(slots, "open_plain", seen_opening)
    monkeypatch.setattr(Slot, "open", None)
    monkeypatch.setattr(Manifest, "decode", None)
    for offset in range(0, IMAGE_BYTES, 1000):
        assert file.read(offset, 10) == bytes([2]) * 10
    assert looked == {other.path}
    other.remove()


def test_a_slots_image_may_be_a_file_of_its_own(
    slot: Slot, store: LocalStore, node: RemoteNode
) -> None:
    assert slot.path is not None
    other = sealed(slot.path.with_suffix(".1"), manifest(2), store)
    file = node.open_shard(name_of(manifest(2)), manifest(2).shard)
    assert file.read(0, IMAGE_BYTES) == bytes([2]) * IMAGE_BYTES
    other.remove()


def test_a_shard_in_a_slot_that_was_filled_again_counts_as_missing(
    slot: Slot, node: RemoteNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is filled between two ranges, or while one is being read."""
    files = [node.open_shard(name_of(manifest()), manifest().shard) for _ in range(2)]
    read = slots.read_image

    def fill_again(*what: Any) -> bytes:
        slot.unseal()
        data = read(*what)
        slot.seal(manifest(2).encode())
        return data

    monkeypatch.setattr(remote_reads, "read_image", fill_again)
    for file in files:
        with pytest.raises(FileNotFoundError):
            file.read(0, 10)


def test_a_node_that_falls_silent_is_waited_for_once(
    agent: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wait for all its clients, however many ranges they still have to read."""
    down = threading.Event()
    asked = [RemoteNode("node 1", agent.address, SECRET, down, True) for _ in range(2)]
    files = [node.open_shard(name_of(manifest()), manifest().shard) for node in asked]
    calls: list[object] = []
    reach = remote_reads.reach
    monkeypatch.setattr(remote_reads, "reach", lambda *where: calls.append(where) or reach(*where))
    agent.close()
    for _ in range(3):
        for file in files:
            with pytest.raises(ConnectionError):
                file.read(0, 100)
    assert not calls
    for node in asked:
        node.close()


def test_a_shard_that_cannot_be_used_there_is_reported_as_of_any_node(
    slot: Slot, store: LocalStore, node: RemoteNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged seal, a manifest with only a readable name, a disk that fails."""
    assert slot.path is not None
    with slot.image() as image:
        store.commit(manifest(2).key, image, manifest(2).encode())
        store.commit(manifest(3).key, image, manifest(3).encode())
    with slot.path.open("r+b") as segment:
        segment.seek(100)
        segment.write(b"?")
    (store.directory / f"{manifest(2).key.stem}.manifest").write_bytes(b"?")
    read = LocalStore.read_manifest

    def read_or_fail(self: LocalStore, key: ShardKey) -> bytes:
        if key == manifest(3).key:
            raise OSError("the disk fails")
        return read(self, key)

    monkeypatch.setattr(LocalStore, "read_manifest", read_or_fail)
    mine = Inventory((), (), (), 0)
    seen = mine.plus([node.inventory("node1")])
    assert {problem.place.where for problem in (*seen.problems, *seen.unseen)} == {"node 1"}
    memory, disk = sorted(seen.problems, key=lambda problem: problem.keys)
    assert (str(slot.path) in memory.why, disk.keys) == (True, (manifest(2).key,))
    (hidden,) = seen.unseen
    assert "the disk fails" in hidden.why
