"""A rank's reads of a restart: every byte is read once and checked, and damage is reported."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.peer_shards import shard_of
from tierckpt.codecs import CodecError
from tierckpt.core import Location, RestorePlan, Source
from tierckpt.errors import CorruptShardError, FormatError
from tierckpt.format import (
    Manifest,
    RankState,
    ShardSummary,
    VersionId,
    VersionSummary,
    decode_header,
)
from tierckpt.group import SingleGroup
from tierckpt.restore import (
    FaultScope,
    Progress,
    Reads,
    ShardBroadcaster,
    ShardImage,
    VerifiedVersion,
    runs_of,
    shards,
)
from tierckpt.restore.shards import in_file
from tierckpt.restored import TransferStats
from tierckpt.storage.persistent import PersistentError

RUN_BYTES = 1 << 20
SHARD_BYTES = 2 * RUN_BYTES + 3 * 4096
SHARDS = 3


class Disk:
    """Shards that are read range by range, from possibly damaged bytes, into an empty image."""

    def __init__(self) -> None:
        self.stored: dict[int, bytearray] = {}
        self.manifests: dict[int, Manifest] = {}
        self.brought: dict[int, list[tuple[int, int]]] = {}
        self.closed: list[int] = []
        self.broken: set[int] = set()
        self._lock = threading.Lock()
        for number in range(SHARDS):
            image, record = shard_of(number, SHARD_BYTES, SHARDS)
            self.stored[number] = bytearray(image)
            self.manifests[number] = replace(Manifest.decode(record), shard=number)
            self.brought[number] = []

    def open_image(self, key: Any, place: Location, run_id: str, *rest: Any) -> ShardImage:
        number = key.shard
        if number in self.broken:
            raise FileNotFoundError(f"shard {number} cannot be opened")
        view = memoryview(bytearray(len(self.stored[number])))

        def bring(low: int, high: int) -> None:
            with self._lock:
                self.brought[number].append((low, high))
            view[low:high] = self.stored[number][low:high]

        return ShardImage(self.manifests[number], view, lambda: self.closed.append(number), bring)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(shards, "open_image", made.open_image)
    monkeypatch.setattr(shards, "RUN_BYTES", RUN_BYTES)
    return made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as made:
        yield made


def sources(readers: list[int]) -> tuple[Source, ...]:
    place = Location("persistent", "*", "somewhere")
    return tuple(Source(s, place, reader, direct=False) for s, reader in enumerate(readers))


def read(
    pool: ThreadPoolExecutor, volume: TransferStats
) -> tuple[list[tuple[int, str]], dict[int, ShardImage], Reads]:
    images: dict[int, ShardImage] = {}
    reads = Reads(pool, images, volume.read)
    reads.open(VersionId(1, 1), SHARDS, "", sources([0] * SHARDS))
    return [(failure.key.shard, failure.why) for failure in reads.finish()], images, reads


def test_every_byte_is_brought_once(disk: Disk, pool: ThreadPoolExecutor) -> None:
    volume = TransferStats()
    failures, images, reads = read(pool, volume)
    assert failures == []
    assert reads.opened()
    for number, ranges in disk.brought.items():
        assert [high for _, high in sorted(ranges)][-1] == SHARD_BYTES
        assert [low for low, _ in sorted(ranges)] == [0, *(h for _, h in sorted(ranges)[:-1])]
        assert images[number].view == disk.stored[number]
    assert volume.read_bytes == SHARDS * SHARD_BYTES


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (100, "(the header) differ"),
        (4096, "bytes 4096 to 528384 differ"),
        (SHARD_BYTES - 1, f"to {SHARD_BYTES} differ"),
    ],
)
def test_damage_is_named_and_the_rest_is_still_read(
    at: int, said: str, disk: Disk, pool: ThreadPoolExecutor
) -> None:
    disk.stored[1][at] ^= 1
    failures, _, reads = read(pool, TransferStats())
    ((number, why),) = failures
    assert number == 1
    assert said in why
    assert 2 in reads.headers


def test_the_first_damage_of_several_is_named(disk: Disk, pool: ThreadPoolExecutor) -> None:
    for at in (5000, SHARD_BYTES - 1):
        disk.stored[0][at] ^= 1
    failures, _, _ = read(pool, TransferStats())
    assert "bytes 4096 to" in failures[0][1]
    assert len(failures) == 1


def test_sound_parts_are_shown_in_order_up_to_the_first_damage(
    disk: Disk, pool: ThreadPoolExecutor
) -> None:
    disk.stored[1][4096 + RUN_BYTES] ^= 1
    disk.broken.add(2)
    _, _, reads = read(pool, TransferStats())
    shown: dict[int, bytes] = {0: b"", 1: b""}
    for shard, offset, window in reads.sound():
        assert offset == len(shown[shard]), "nothing is left out"
        assert offset > 0 or len(window) == reads.headers[shard].header_bytes
        shown[shard] += window
    assert shown[0] == disk.stored[0]
    run = next(runs_of(reads.headers[1]))
    assert shown[1] == disk.stored[1][: run.high]


def test_a_short_or_unreadable_shard_is_lost(disk: Disk, pool: ThreadPoolExecutor) -> None:
    del disk.stored[0][-4096:]
    disk.broken.add(2)
    failures, images, reads = read(pool, TransferStats())
    assert [number for number, _ in failures] == [0, 2]
    assert failures[0][1] == f"truncated: {SHARD_BYTES - 4096} of {SHARD_BYTES} bytes"
    assert failures[1][1] == "shard 2 cannot be opened"
    assert list(images) == [1]
    assert disk.closed == [0]
    assert not reads.opened()


def test_a_mistake_of_ours_is_no_damage(disk: Disk, pool: ThreadPoolExecutor) -> None:
    """It is not raised either: the other ranks wait for the report."""
    disk.manifests[0] = replace(disk.manifests[0], digests=None)  # type: ignore[arg-type]
    images: dict[int, ShardImage] = {}
    reads = Reads(pool, images)
    reads.open(VersionId(1, 1), SHARDS, "", sources([0] * SHARDS))
    (failure,) = reads.finish()
    assert (failure.key.shard, failure.blame) == (0, FaultScope.RANK)
    assert failure.why.startswith("TypeError: ")
    assert sorted(images) == [1, 2]


def test_a_spilled_shard_is_read_back_and_a_disk_that_lost_it_is_not_blamed_on_a_copy(
    disk: Disk, pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = in_file(disk.manifests[0], tmp_path)
    image.view[:] = disk.stored[0]
    image.rest(0, SHARD_BYTES)
    image.settle()
    image.touch(100, 9000)
    assert image.view == disk.stored[0]
    assert list(tmp_path.iterdir()) == [], "it has no name"

    def fail(number: int) -> None:
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr("tierckpt.restore.shards.os.fsync", fail)
    monkeypatch.setattr(shards, "open_image", lambda *_: image)
    reads = Reads(pool, {})
    reads.open(VersionId(1, 1), SHARDS, "", sources([0])[:1])
    (failure,) = reads.finish()
    assert failure.blame is FaultScope.RANK
    assert f"cannot be kept in {tmp_path}" in failure.why
    image.close()


def wrapped(cause: Exception) -> PersistentError:
    error = PersistentError("given up", "s3://b/k", True)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "near", "far"),
    [
        (CorruptShardError("differs"), FaultScope.COPY, FaultScope.COPY),
        (FormatError("what is this"), FaultScope.COPY, FaultScope.COPY),
        (EOFError("truncated"), FaultScope.COPY, FaultScope.COPY),
        (CodecError("no key"), FaultScope.COPY, FaultScope.COPY),
        (FileNotFoundError(errno.ENOENT, "gone"), FaultScope.COPY, FaultScope.SIGHT),
        (FileNotFoundError("slot is gone"), FaultScope.COPY, FaultScope.SIGHT),
        (OSError(errno.EIO, "disk fails"), FaultScope.COPY, FaultScope.SIGHT),
        (PermissionError(errno.EACCES, "no right"), FaultScope.SIGHT, FaultScope.SIGHT),
        (OSError(errno.ESTALE, "stale"), FaultScope.SIGHT, FaultScope.SIGHT),
        (wrapped(TimeoutError()), FaultScope.SIGHT, FaultScope.SIGHT),
        (ImportError("no client"), FaultScope.SIGHT, FaultScope.SIGHT),
        (OSError(errno.ENOMEM, "no memory"), FaultScope.RANK, FaultScope.RANK),
        (OSError(errno.EMFILE, "too many"), FaultScope.RANK, FaultScope.RANK),
        (wrapped(OSError(errno.ENFILE, "too many")), FaultScope.RANK, FaultScope.RANK),
        (MemoryError(), FaultScope.RANK, FaultScope.RANK),
        (RuntimeError("a client's own"), FaultScope.RANK, FaultScope.RANK),
    ],
    ids=str,
)
def test_the_scope_of_a_fault_follows_from_the_place_and_the_error(
    error: Exception, near: FaultScope, far: FaultScope
) -> None:
    """All ranks that see a node's copy see the same bytes; each rank has its own path to a remote
    copy."""
    assert FaultScope.of(Location("local", "node", "/disk"), error) is near
    assert FaultScope.of(Location("persistent", "*", "/far"), error) is far


@given(st.lists(st.integers(1, shards.RUN_BYTES), max_size=40))
def test_runs_are_all_blocks_in_order(block_bytes: list[int]) -> None:
    header: Any = SimpleNamespace(header_bytes=8192, block_bytes=tuple(block_bytes))
    low, number, seen = 8192, 1, []
    for run in runs_of(header):
        assert (run.low, run.first) == (low, number)
        assert 0 < sum(run.block_bytes) <= shards.RUN_BYTES
        low, number = low + sum(run.block_bytes), number + len(run.block_bytes)
        seen += run.block_bytes
    assert seen == block_bytes


# --- showing to others ---------------------------------------------------------------------------


class Other(SingleGroup):
    """Rank 1 of two; rank 0 broadcasts the given bytes."""

    rank, size = 1, 2

    def __init__(self, said: bytes) -> None:
        self.said, self.lengths = said, list[int]()

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        self.lengths.append(len(buffer))
        if source == 0:
            at = sum(self.lengths) - len(buffer)
            buffer.copy_(torch.tensor(list(self.said[at : at + len(buffer)]), dtype=torch.uint8))


def test_a_rank_holds_only_a_window_of_shards_that_others_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tierckpt.restore.rebuild.BROADCAST_BYTES", 1000)
    said = bytes(i % 251 for i in range(2500))
    group, volume, seen = Other(said), TransferStats(), bytearray()
    broadcaster = ShardBroadcaster(group, volume)
    (source, _) = sources([0, 1])[:2]

    def visit(shard: int, offset: int, window: memoryview) -> None:
        assert (shard, offset) == (0, len(seen))
        seen.extend(window)

    broadcaster.show(source, outline(100, 2400), None, visit)
    assert seen == said
    assert group.lengths == [1000, 1000, 500]
    assert volume.exchanged_bytes == 2500


def test_the_first_window_has_the_whole_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierckpt.restore.rebuild.BROADCAST_BYTES", 1000)
    group = Other(bytes(2500))
    ShardBroadcaster(group, TransferStats()).show(
        sources([0, 1])[0], outline(1400, 1100), None, lambda shard, offset, window: None
    )
    assert group.lengths == [1400, 1000, 100]


@pytest.mark.parametrize("direct", [True, False])
def test_mapped_pages_are_loaded_again_before_they_are_shown(
    direct: bool, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have left memory since then; access to a page that cannot be read again is SIGBUS."""
    monkeypatch.setattr("tierckpt.restore.rebuild.BROADCAST_BYTES", 1000)
    monkeypatch.setattr("tierckpt.restore.rebuild.MAPPED_BYTES", 1000)
    touched: list[tuple[int, int]] = []
    shown: list[int] = []

    def touch(low: int, high: int) -> None:
        assert len(shown) == len(touched)
        touched.append((low, high))
        if low == 2400:
            raise OSError(errno.EIO, "the disk fails")

    data = bytearray(i % 251 for i in range(4000))
    image = ShardImage(disk.manifests[0], memoryview(data), lambda: None, touch=touch)
    sent = Sender()
    broadcaster = ShardBroadcaster(sent, TransferStats())
    source = replace(sources([0])[0], direct=direct)

    def visit(shard: int, offset: int, window: memoryview) -> None:
        assert window == data[offset : offset + len(window)]
        shown.append(offset)

    broadcaster.show(source, outline(1400, 2600), image, visit)
    assert shown == [0, 1400]
    assert touched == [(0, 1400), (1400, 2400), (2400, 3400)], "not a second time"
    assert "the disk fails" in broadcaster.trouble
    assert broadcaster.trouble_of_any() == broadcaster.trouble
    assert sent.lengths == ([] if direct else [1400, 1000, 1000, 600]), "others wait for each"


def test_mapped_pages_that_are_not_wanted_are_not_touched(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierckpt.restore.rebuild.MAPPED_BYTES", 1000)
    touched: list[int] = []
    shown: list[int] = []
    image = ShardImage(
        disk.manifests[0],
        memoryview(bytearray(4000)),
        lambda: None,
        touch=lambda low, high: touched.append(low),
    )
    broadcaster = ShardBroadcaster(SingleGroup(), TransferStats())

    def wants(shard: int, low: int, high: int) -> bool:
        assert low > 0, "of the header nobody is asked"
        return (shard, low, high) == (0, 2400, 3400)

    broadcaster.show(
        replace(sources([0])[0], direct=True),
        outline(1400, 2600),
        image,
        lambda shard, offset, window: shown.append(offset),
        wants,
    )
    assert shown == touched == [0, 2400]
    assert not broadcaster.trouble


def test_a_shard_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may need it."""
    monkeypatch.setattr("tierckpt.restore.rebuild.BROADCAST_BYTES", 1000)
    group = Other(bytes(2500))
    broadcaster, source = ShardBroadcaster(group, TransferStats()), sources([0, 1])[0]
    broadcaster.show(source, outline(100, 2400), None, lambda *_: None, lambda *_: False)
    assert group.lengths == [1000, 1000, 500]


class Sender(SingleGroup):
    """Rank 0, and the bytes it sent in each call."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        self.lengths.append(len(buffer))


def outline(header_bytes: int, data_bytes: int) -> ShardSummary:
    return ShardSummary(header_bytes, data_bytes, (), 0, None)


def test_a_fetched_shard_is_freed_when_it_is_loaded(disk: Disk, pool: ThreadPoolExecutor) -> None:
    _, images, _ = read(pool, TransferStats())
    plan = RestorePlan(VersionId(1, 1), sources([0] * SHARDS))
    headers = [decode_header(bytes(disk.stored[s])) for s in range(SHARDS)]
    broadcaster = ShardBroadcaster(SingleGroup(), TransferStats())
    contents = VersionSummary(
        [ShardSummary.of(s, h) for s, h in enumerate(headers)], RankState(b"", b"", ())
    )
    attempt = VerifiedVersion(plan, broadcaster, Progress(False), images, contents)
    held = []
    attempt.visit(lambda shard, offset, window: held.append((shard, len(images))))
    assert held == [(0, 3), (1, 2), (2, 1)]
    assert images == {}
    assert disk.closed == [0, 1, 2]
