"""The persistent level's rules: names, groups, places, records, turns, bandwidth."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.facts import facts_of
from tierckpt.errors import CorruptShardError, FlushCancelledError, FormatError
from tierckpt.format import (
    Groups,
    ShardRecord,
    SharedPlaces,
    VersionId,
    decode_shards,
    encode_shards,
    parse_run,
    run_name,
    seal,
    unseal,
)
from tierckpt.storage.persistent import (
    FlushPacer,
    Throttle,
    VersionManifest,
    VersionName,
)

lives = st.text("0123456789abcdef", min_size=1, max_size=16)
ids = st.builds(VersionId, st.integers(0, 10**7), st.integers(0, 10**11))
names = st.builds(VersionName, ids, st.integers(1, 10**6), lives)
sizes = st.integers(1, 20_000)
per_group = st.integers(1, 200)


class FakeClock:
    """A clock that advances only when someone sleeps."""

    def __init__(self) -> None:
        self.seconds = 1.7e9

    def now(self) -> float:
        return self.seconds

    monotonic = now

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


# --- names and groups ------------------------------------------------------------------------


@given(names)
def test_a_versions_stem_is_parsed_back(name: VersionName) -> None:
    assert VersionName.parse(name.stem) == name


@given(names)
def test_other_names_are_no_versions(name: VersionName) -> None:
    for text in (f".{name.stem}", f"{name.stem}.manifest", f"{name.stem}/", "lease.000001", ""):
        assert VersionName.parse(text) is None


@given(sizes, per_group)
def test_every_shard_is_in_exactly_one_group(shards: int, size: int) -> None:
    groups = Groups(shards, size)
    assert [s for g in range(groups.count) for s in groups.members(g)] == list(range(shards))
    assert all(groups.of(s) == g for g in range(groups.count) for s in groups.members(g))


@given(st.sets(st.integers(0, 300)), per_group)
def test_runs_are_consecutive_and_within_a_group(shards: set[int], size: int) -> None:
    groups = Groups(301, size)
    runs = list(groups.runs(shards))
    assert [s for run in runs for s in run] == sorted(shards)
    assert all(groups.of(run[0]) == groups.of(run[-1]) for run in runs)
    for run, following in itertools.pairwise(runs):  # none could be longer
        assert run.stop < following.start or groups.of(run[0]) != groups.of(following[0])
    assert all(parse_run(run_name(run)) == run for run in runs)


@pytest.mark.parametrize(("ranks", "files"), [(1, 1), (8, 1), (1_000, 16), (10_000, 157)])
def test_many_ranks_make_few_files(ranks: int, files: int) -> None:
    assert Groups(ranks).count == files


@given(st.integers(1, 64), st.integers(1, 1 << 34))
def test_places_in_a_shared_file_do_not_overlap(members: int, largest: int) -> None:
    places = SharedPlaces(members, largest)
    table = [(places.record_offset(i), places.record_bytes) for i in range(members)]
    images = [(places.image_offset(i), largest) for i in range(members)]
    end = 0
    for offset, nbytes in table + images:
        assert offset >= end
        end = offset + nbytes
    align = 1 << 20 if largest >= 1 << 20 else 4096
    assert all(offset % align == 0 for offset, _ in images)
    blocks = largest // (512 << 10) + 2
    assert places.record_bytes >= 1000 + 2 * blocks * 8 * 4 / 3 * 4 / 3, "a manifest fits"


# --- records -----------------------------------------------------------------------------------

records = st.builds(
    ShardRecord,
    st.integers(0, 10**6),
    st.text(max_size=20),
    st.integers(0, 1 << 50),
    st.integers(0, 1 << 50),
    st.text("0123456789abcdef", min_size=32, max_size=32),
    st.binary(max_size=200),
)


@given(st.lists(records, unique_by=lambda r: r.shard), st.integers(0, 100))
def test_records_are_read_back_and_their_order_does_not_matter(
    made: list[ShardRecord], zeros: int
) -> None:
    data = encode_shards("group", made)
    assert encode_shards("group", reversed(made)) == data
    assert decode_shards("group", data + bytes(zeros)) == {r.shard: r for r in made}


def test_a_record_with_any_byte_changed_is_refused() -> None:
    data = encode_shards("shard", [ShardRecord(1, "f", 2, 3, "4", b"five")])
    for index in range(len(data)):
        for bit in (1, 128):
            damaged = bytearray(data)
            damaged[index] ^= bit
            with pytest.raises(CorruptShardError):
                decode_shards("shard", bytes(damaged))
    for length in range(len(data)):
        with pytest.raises(CorruptShardError):
            decode_shards("shard", data[:length])


def test_a_record_of_another_kind_or_of_the_future_is_refused() -> None:
    with pytest.raises(FormatError, match="tierckpt-lease"):
        unseal("group", seal("lease", {}))
    with pytest.raises(FormatError, match="format version 2"):
        unseal("group", seal("group", {"format_version": "2.0"}))


def test_a_manifest_is_read_back_without_values_that_are_not_numbers() -> None:
    facts = facts_of(VersionId(2, 8), 3, lineage=((1, 0), (2, 7)), metric=0.5, suspect="model/a")
    made = VersionManifest(facts, 4096, 64, (("g", "abc"),), 12345)
    assert VersionManifest.decode(made.encode()) == made
    dated = replace(made, created_seconds=1.5)
    assert VersionManifest.decode(dated.encode()) == dated
    bad = replace(made, facts=replace(facts, metric=math.nan))
    assert VersionManifest.decode(bad.encode()).facts == replace(facts, metric=None)


# --- bandwidth -----------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 20)), max_size=30),
    st.floats(1, 1e4),
    st.integers(0, 20_000),
)
def test_bandwidth_is_never_more_than_the_rate_and_one_burst(
    windows: list[tuple[int, float]], rate: float, burst: int
) -> None:
    throttle, now, sent = Throttle(rate, burst, 0.0), 0.0, 0
    for nbytes, idle in windows:
        now += idle
        now += throttle.reserve(nbytes, now)
        sent += nbytes
        assert sent <= burst + rate * now + 1e-6 * sent


def test_a_busy_sender_gets_all_of_its_bandwidth() -> None:
    throttle, now = Throttle(1000.0, 0, 0.0), 0.0
    for _ in range(100):
        now += throttle.reserve(500, now)
    assert now == pytest.approx(50.0)


def test_a_cancelled_flush_ends_while_it_waits() -> None:
    clock, kept = FakeClock(), []
    first = clock.now()
    throttle = Throttle(1.0, 0, clock.monotonic())

    def cancelled() -> bool:
        return clock.now() > first + 3

    pace = FlushPacer(throttle, cancelled, lambda: kept.append(clock.now()), clock)
    with pytest.raises(FlushCancelledError, match="given up"):
        pace(60)
    assert first + 3 < clock.now() <= first + 4
    assert len(kept) >= 6


def test_it_is_imported_without_clients_torch_or_numpy() -> None:
    """The agent stays small; a directory needs no client for object stores."""
    program = (
        "import sys, tierckpt.storage.persistent.store as s; "
        "s.PersistentStore('/nowhere').versions()\n"
        "print([m for m in ('fsspec', 'obstore', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
