"""Parity on a disk: all guarantees of shards hold for it, and damaged parity is never used."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import asdict, replace

from tests.support.peer_shards import (
    SECRET,
    Members,
    memory_reader,
    nothing_of,
    parity_key_of,
    rank_of,
    reader,
    shard_of,
)
from tierckpt.erasure import Code, ParityManifest
from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format import BLOCK_BYTES, Manifest, ParityKey, ShardKey, VersionId
from tierckpt.net import Address
from tierckpt.peer import Read, RemoteNode, Transport, check_parity, rebuild, remote_reads
from tierckpt.storage import LocalStore
from tierckpt.storage.persistent import VersionName
from tierckpt.testing import commit_one, injected, key_of

CODE = Code(3, 2, 1)
LENGTHS = [600 << 10, 900 << 10, 300 << 10]


def parity_of(key: ShardKey) -> ParityKey:
    return ParityKey(key.id, key.shard, key.shards)


# --- beside shards -------------------------------------------------------------------------------


def test_a_shard_and_the_parity_beside_it_are_two_things(tmp_path: Path) -> None:
    store, key = LocalStore(tmp_path), key_of(1)
    commit_one(store, key)
    commit_one(store, parity_of(key), pages=5)
    assert (store.keys(), store.parities()) == ([key], [parity_of(key)])
    assert key != parity_of(key)
    store.retire(key)
    assert (store.keys(), store.parities()) == ([], [parity_of(key)])
    commit_one(store, key_of(2))
    store.retire(parity_of(key))
    assert (store.keys(), store.parities()) == ([key_of(2)], [])
    # The shard took the shard's retired file; the parity's is kept for parity.
    assert {p.name for p in tmp_path.glob(".*")} == {".spare.p00000of"}
    store.drop_spare(0)
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_this_process_is_writing_is_not_cleaned_away(tmp_path: Path) -> None:
    """A restarted trainer cleans up while an exchange of its predecessor is in progress."""
    store, key = LocalStore(tmp_path), parity_of(key_of(1))
    with store.draft(key, 8192) as draft:
        draft.write(memoryview(bytes(8192)), 0)
        assert store.clean(0) == []
        draft.commit(b"manifest")
        assert store.clean(0) == []
    assert store.parities() == [key]


def test_a_file_without_a_commit_counts_as_missing(tmp_path: Path) -> None:
    store, key = LocalStore(tmp_path), parity_of(key_of(1))
    with store.draft(key, 8192) as draft:
        draft.write(memoryview(bytes(4096)), 4096)
    assert list(tmp_path.iterdir()) == []


# --- faults in an exchange -----------------------------------------------------------------------


def test_an_error_at_any_file_operation_costs_one_parity_at_most(tmp_path: Path) -> None:
    """Kills at the k-th operation of all members, for every k; existing parity is sound."""
    for hit in range(1, 200):
        with Members(tmp_path / str(hit), CODE, LENGTHS) as members:
            with injected(f"eio@file:hit={hit}"):
                members.run([members.exchange(member) for member in range(3)])
            there = members.parities()
            assert sorted([*there, *members.errors]) == [0, 1, 2]
            for error in members.errors.values():
                assert "injected" in str(error)
                assert isinstance(error, OSError)
            names = {p.name for p in (tmp_path / str(hit)).rglob("*") if p.is_file()}
            assert len(names) == 2 * len(there), f"half-done files after operation {hit}: {names}"
            for lost in members.errors:
                assert members.rebuilt({lost}) == {lost: members.image(lost)}
            if not members.errors:
                assert hit > 15, "the writer does not announce its operations"
                return
    pytest.fail("the sweep does not end")


# --- damage --------------------------------------------------------------------------------------


def flip(chance: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    bit = chance.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def cut(chance: random.Random, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


@pytest.mark.parametrize("damage", [flip, cut], ids=["a bit", "the end"])
@pytest.mark.parametrize("suffix", ["parity", "manifest"])
def test_damage_is_always_found(
    suffix: str, damage: Callable[[random.Random, Path], None], tmp_path: Path
) -> None:
    with Members(tmp_path, CODE, LENGTHS) as members:
        members.protect()
        store, key = members.store(0), parity_key_of(0, CODE)
        path = tmp_path / "node0" / f"{key.stem}.{suffix}"
        whole = path.read_bytes()
        for seed in range(40):
            damage(random.Random(seed), path)
            with pytest.raises((CorruptShardError, FormatError)):  # noqa: PT012
                record = ParityManifest.decode(store.read_manifest(key))
                check_parity(record, reader(store, key))
            path.write_bytes(whole)
        assert sorted(members.parities()) == [0, 1, 2]


def test_a_shard_rebuilt_from_unchecked_damage_is_refused(tmp_path: Path) -> None:
    """The parity was not checked before: the lost shard's own manifest reveals the damage."""
    with Members(tmp_path, CODE, LENGTHS) as members:
        members.protect()
        for seed in range(10):
            (path,) = (tmp_path / "node0").glob("*.parity")
            whole = path.read_bytes()
            bent = bytearray(whole)
            # In the used part: the first half of the segment belongs to both other shards.
            bent[random.Random(seed).randrange(len(bent) // 4)] ^= 1
            path.write_bytes(bent)
            with pytest.raises(CorruptShardError, match="some source was damaged"):  # noqa: PT012
                for lost in (1, 2):
                    members.rebuilt({lost})
            path.write_bytes(whole)
        assert members.rebuilt({1}) == {1: members.image(1)}


def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    shards = [Manifest.decode(shard_of(m, n, 3)[1]) for m, n in enumerate(LENGTHS)]
    record = ParityManifest.of(shards, CODE, 0, bytes(8))
    right = ParityManifest.of(shards, CODE, 0, bytes(8 * -(-record.image_bytes // (512 << 10))))
    assert ParityManifest.decode(right.encode()) == right
    strangers = [*shards[:2], Manifest.decode(shard_of(2, LENGTHS[2], 3, run_id="other")[1])]
    wrong = [
        {"k": 1},
        {"m": 3},
        {"segment_bytes": 4096},
        {"image_bytes": right.image_bytes + 1},
        {"digests": right.digests[8:]},
        {"group": (1, 5, 3)},
        {"group": (1, 3)},
        {"shard": 4},
        {"facts": replace(right.facts, run_id="other")},
        {"facts": replace(right.facts, id=VersionId(1, 2))},
        {"members": tuple(m.encode().decode() for m in strangers)},
        {"members": ("", "", "")},
    ]
    for values in wrong:
        bent = ParityManifest(**{**asdict(right), **values})
        with pytest.raises((FormatError, CorruptShardError)):
            ParityManifest.decode(bent.encode())


def test_room_must_be_there_for_exactly_the_lost_shards(tmp_path: Path) -> None:
    with Members(tmp_path, CODE, LENGTHS) as members:
        members.protect()
        record = ParityManifest.decode(members.store(0).read_manifest(parity_key_of(0, CODE)))
        shards = {m: memory_reader(members.image(m)) for m in (0, 2)}
        for room in ({1: memoryview(bytearray(5))}, {2: memoryview(bytearray(LENGTHS[2]))}):
            with pytest.raises(ValueError, match=r"members \[1\] are lost"):
                rebuild(record, shards, {}, room)


def test_only_the_segments_that_are_used_are_read(tmp_path: Path) -> None:
    with Members(tmp_path, Code(3, 1, 2), LENGTHS) as members:
        members.protect()
        key = parity_key_of(0, Code(3, 1, 2))
        record = ParityManifest.decode(members.store(0).read_manifest(key))
        asked: list[int] = []

        def read(offset: int, into: memoryview) -> None:
            asked.append(offset)
            reader(members.store(0), key)(offset, into)

        # Two segments of 900 KiB: blocks of 512 KiB start at 0, 512, 1024 and 1536.
        for segments, blocks in (((0,), [0, 1]), ((1,), [1, 2, 3]), ((0, 1), [0, 1, 2, 3])):
            asked.clear()
            nbytes = check_parity(record, read, segments)
            assert asked == [block * BLOCK_BYTES for block in blocks]
            assert nbytes == min(record.image_bytes, asked[-1] + BLOCK_BYTES) - asked[0]


def test_a_rank_that_rebuilds_a_part_reads_the_same_shards_as_all(tmp_path: Path) -> None:
    """Other members of the group rebuild the rest, from the same broadcasts."""
    code, lengths = Code(5, 2, 2), [*LENGTHS, 500 << 10, 700 << 10]
    with Members(tmp_path, code, lengths) as members:
        members.protect()
        keys = {m: parity_key_of(m, code) for m in range(1, 4)}
        record = ParityManifest.decode(members.store(1).read_manifest(keys[1]))
        asked: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for made in ((), (0,), (4,), (0, 4)):
            asked[made] = []

            def noted(read: Read, log: list[tuple[int, int]] = asked[made]) -> Read:
                def read_and_note(offset: int, room: memoryview) -> None:
                    log.append((offset, len(room)))
                    read(offset, room)

                return read_and_note

            into = {m: memoryview(bytearray(lengths[m])) for m in made}
            shards = {m: noted(memory_reader(members.image(m))) for m in keys}
            parities = {m: noted(reader(members.store(m), keys[m])) for m in keys}
            rebuild(record, shards, parities, into)
            assert {m: bytes(view) for m, view in into.items()} == {
                m: members.image(m) for m in made
            }
        assert asked[()] == asked[0,] == asked[4,] == asked[0, 4]


# --- fetching ------------------------------------------------------------------------------------


def test_a_shard_is_rebuilt_from_shards_of_other_nodes(tmp_path: Path) -> None:
    """The agents' own transport carries manifests, and ranges of files in pieces."""
    with Members(tmp_path, CODE, LENGTHS) as members:
        members.protect()
        for member in range(3):
            image, manifest = shard_of(member, LENGTHS[member], 3)
            key = ShardKey(parity_key_of(member, CODE).id, rank_of(member), rank_of(3))
            members.store(member).commit(key, image, manifest)

        def fetching(member: int, parity: bool) -> Callable[[int, memoryview], None]:
            key = parity_key_of(member, CODE)
            name = VersionName(key.id, key.shards, "life")
            node = nodes[member]
            file = node.open_parity(key) if parity else node.open_shard(name, key.shard)
            return lambda low, into: node.read(file, low, into)

        nodes = [RemoteNode(f"node {m}", a, SECRET) for m, a in enumerate(members.addresses)]
        record = ParityManifest.decode(nodes[2].open_parity(parity_key_of(2, CODE)).manifest)
        check_parity(record, fetching(2, True))
        into = {1: memoryview(bytearray(LENGTHS[1]))}
        shards = {m: fetching(m, False) for m in (0, 2)}
        rebuild(record, shards, {m: fetching(m, True) for m in (0, 2)}, into)
        assert bytes(into[1]) == members.image(1)
        assert nothing_of(tmp_path, 2)
        for node in nodes:
            node.close()


def test_fetching_continues_when_the_peers_agent_was_started_again(tmp_path: Path) -> None:
    """The first dead connection is replaced; no second failure follows."""
    with Members(tmp_path, CODE, LENGTHS) as members:
        members.protect()
        key, address = parity_key_of(1, CODE), members.addresses[1]
        with closing(RemoteNode("node 1", address, SECRET)) as node:
            found = node.open_parity(key).manifest
            members.transports[1].close()
            members.transports[1] = Transport(SECRET, address.host, address.port)
            members.transports[1].read_server.add(members.store(1))
            with pytest.raises(ConnectionError, match="node 1"):
                node.open_parity(key)
            with pytest.raises(ConnectionError, match="did not answer before"):
                node.open_parity(key)
        with closing(RemoteNode("node 1", address, SECRET)) as node:
            assert node.open_parity(key).manifest == found


def test_only_committed_files_can_be_fetched(tmp_path: Path) -> None:
    with Members(tmp_path, CODE, LENGTHS) as members:
        members.protect()
        (tmp_path / "secret").write_text("not for peers")
        caller, address = members.transports[0], members.addresses[1]
        key = parity_key_of(1, CODE)
        with closing(RemoteNode("node 1", address, SECRET)) as node:
            with pytest.raises(FileNotFoundError, match="is not here"):
                node.open_parity(parity_key_of(1, CODE, version=9))
            with pytest.raises(EOFError, match="in part"):
                node.open_parity(key).read(1 << 40, 9)
        stranger = RemoteNode("node 1", address, b"guessed")
        with pytest.raises(ConnectionError, match="refused"):
            stranger.open_parity(key)
        link = caller.connect(address)
        for stem in ("../secret", "/etc/passwd", f"../node1/{parity_key_of(1, CODE).stem}"):
            link.send({"op": "fetch", "stem": stem, "offset": 0, "length": 9, "copy": ""})
            assert "is no shard and no parity" in link.receive(20)["error"]
        for offset, length in ((-1, 9), (0, -1), (0, 1 << 40)):
            stem = parity_key_of(1, CODE).stem
            link.send({"op": "fetch", "stem": stem, "offset": offset, "length": length, "copy": ""})
            assert "cannot be requested" in link.receive(20)["error"]
        caller.drop(link)


def test_a_node_that_takes_the_call_and_says_nothing_counts_as_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that hangs: its kernel still accepts connections."""
    monkeypatch.setattr(remote_reads, "REACH_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        node = RemoteNode("node 1", Address(*silent.getsockname()), SECRET)
        with pytest.raises(ConnectionError, match=r"node 1: .* sent nothing for 0.1 s"):
            node.inventory("node1")
