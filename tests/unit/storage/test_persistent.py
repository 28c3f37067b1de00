"""The persistent level's rules: names, groups, places, records, turns, bandwidth, retention."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.facts import facts_of
from tierckpt.errors import CorruptShardError, FlushCancelledError, FormatError
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import Lineage, VersionId, on_lineage
from tierckpt.format.version_names import Groups, SharedPlaces, parse_run, run_name
from tierckpt.format.version_records import (
    ShardRecord,
    decode_shards,
    encode_shards,
    seal,
    unseal,
)
from tierckpt.storage.persistent import (
    FlushPacer,
    HeldVersion,
    RetentionPolicy,
    Throttle,
    TimeSlots,
    VersionManifest,
    VersionName,
    retirable,
)

lives = st.text("0123456789abcdef", min_size=1, max_size=16)
ids = st.builds(VersionId, st.integers(0, 10**7), st.integers(0, 10**11))
names = st.builds(VersionName, ids, st.integers(1, 10**6), lives)
sizes = st.integers(1, 20_000)
per_group = st.integers(1, 200)


class FakeClock:
    """Time passes when somebody sleeps."""

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


@given(names, names)
def test_different_versions_have_different_stems(one: VersionName, other: VersionName) -> None:
    assert (one.stem == other.stem) == (one == other)


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


def test_a_versions_manifest_is_read_back_without_what_is_no_number() -> None:
    facts = facts_of(VersionId(2, 8), 3, lineage=((1, 0), (2, 7)), metric=0.5, suspect="model/a")
    made = VersionManifest(facts, 4096, 64, (("g", "abc"),), 12345)
    assert VersionManifest.decode(made.encode()) == made
    bad = replace(made, facts=replace(facts, metric=math.nan))
    assert VersionManifest.decode(bad.encode()).facts == replace(facts, metric=None)


# --- turns and bandwidth -----------------------------------------------------------------------

turns = st.tuples(st.integers(1, 300), st.integers(1, 300), st.floats(0.5, 600))


@given(turns, st.floats(0, 4e9))
def test_no_more_nodes_than_allowed_flush_at_once(rule: tuple[int, int, float], now: float) -> None:
    nodes, at_once, seconds = rule
    busy = [n for n in range(nodes) if not TimeSlots(n, nodes, at_once, seconds).wait_seconds(now)]
    assert len(busy) <= at_once


@given(turns, st.data(), st.floats(0, 4e9))
def test_every_node_has_its_turn_before_long(
    rule: tuple[int, int, float], data: st.DataObject, now: float
) -> None:
    nodes, at_once, seconds = rule
    turn = TimeSlots(data.draw(st.integers(0, nodes - 1)), nodes, at_once, seconds)
    wait = turn.wait_seconds(now)
    assert 0 <= wait <= (turn.count - 1) * seconds * (1 + 1e-9)
    assert turn.count == -(-nodes // at_once)
    assert turn.wait_seconds(now + wait + seconds / 1000) == 0.0


def windows_of(
    turns: TimeSlots, begin: float, seconds: float, window_seconds: float
) -> list[float]:
    """When a node begins each of its windows."""
    now, begun = begin, []
    for _ in range(math.ceil(seconds / window_seconds)):
        while wait := turns.wait_seconds(now):
            now += wait + 1e-3
        begun.append(now)
        now += window_seconds
    return begun


@pytest.mark.parametrize("longest_seconds", [1.0, 10.0, 31.0])
def test_ten_thousand_nodes_are_through_soon_after_the_least_time_there_is(
    longest_seconds: float,
) -> None:
    """Work differs, and one node in ten has none. 100 at once, so 100 turns a round."""
    nodes, at_once, window_seconds, begin = 10_000, 100, 0.5, 1_234_567.8
    busy: dict[int, set[int]] = {}
    ends = []
    for node in range(nodes):
        turns = TimeSlots(node, nodes, at_once)
        seconds = longest_seconds * (node * 7919 % 10) / 9
        begun = windows_of(turns, begin, seconds, window_seconds)
        for at in begun:
            busy.setdefault(int(at / turns.turn_seconds), set()).add(node)
        ends += [at + window_seconds for at in begun[-1:]]
    assert max(map(len, busy.values())) <= at_once
    rounds = math.ceil(longest_seconds / turns.turn_seconds) + 1
    assert max(ends) - begin <= rounds * turns.count * turns.turn_seconds
    assert turns.turn_seconds <= 5.0, "a round without work for anybody is that many seconds each"


def test_without_a_limit_nobody_waits() -> None:
    assert TimeSlots(7, 1000, 0).wait_seconds(12345.6) == 0.0


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


def test_a_pace_waits_for_its_turn_and_for_its_bandwidth() -> None:
    clock = FakeClock()
    clock.seconds = 0.0
    pace = FlushPacer(Throttle(100.0, 0, 0.0), TimeSlots(1, 2, 1, 10.0), clock=clock)
    pace(200)
    assert clock.seconds == pytest.approx(10.0, abs=0.01), "bandwidth gathers meanwhile"
    pace(900)
    assert clock.seconds == pytest.approx(19.0, abs=0.01)
    pace(200)
    assert clock.seconds == pytest.approx(30.0, abs=0.01), "its turn was over when it might send"


def test_a_superseded_flush_ends_while_it_waits() -> None:
    clock, kept = FakeClock(), []
    begin = clock.now()
    pace = FlushPacer(
        turns=TimeSlots(1, 1000, 1, 60.0),
        superseded=lambda: clock.now() > begin + 3,
        keep=lambda: kept.append(clock.now()),
        clock=clock,
    )
    clock.seconds = begin = 120_060.5 - 3600  # far from its turn
    with pytest.raises(FlushCancelledError, match="superseded"):
        pace(1)
    assert clock.now() <= begin + 4
    assert len(kept) >= 6


# --- retention ---------------------------------------------------------------------------------


def life_of(lineage: Lineage) -> str:
    return f"{lineage[-1][0]}"


def asking(run_id: str, lineage: Lineage) -> VersionFacts:
    """A version of the run that asks."""
    return facts_of(VersionId(lineage[-1][0], 0), 1, run_id, lineage)


def held_of(draw: st.DrawFn) -> list[HeldVersion]:
    """Some lives, each from a version of the one before or afresh, with some versions each."""
    found: list[HeldVersion] = []
    lineage: Lineage = ()
    for generation in range(1, draw(st.integers(1, 4)) + 1):
        base = draw(st.integers(0, 12)) if lineage else 0
        afresh = draw(st.integers(0, 3)) == 0
        lineage = (*(() if afresh else lineage), (generation, 0 if afresh else base))
        job = draw(st.sampled_from(["job", "job", "job", "other"]))
        start = lineage[-1][1]
        for version in draw(st.sets(st.integers(start + 1, start + 12), max_size=8)):
            metric = None if draw(st.booleans()) else float(draw(st.integers(0, 4)))
            id_, run_id = VersionId(generation, version), life_of(lineage)
            facts = facts_of(id_, 1, run_id, lineage, job, metric=metric)
            found.append(HeldVersion(facts, draw(st.integers(0, 5)) == 0))
    return found


policies = st.builds(
    RetentionPolicy,
    keep_last=st.integers(0, 4),
    keep_every=st.integers(0, 5),
    keep_best=st.integers(0, 3),
    best_is_low=st.booleans(),
)


def oracle(
    held: list[HeldVersion], policy: RetentionPolicy, lineage: Lineage
) -> Iterator[VersionName]:
    """Retention, version by version, as the documents say it."""
    ours = {g for g, _ in lineage}
    mine = [h for h in held if h.facts.job == "job" and h.name.id.generation in ours]
    if not mine:
        return
    newest_life = max(mine, key=lambda h: h.name.id).facts.lineage
    line = [h for h in mine if on_lineage(h.name.id, newest_life)]
    safe = max(line, key=lambda h: h.name.id)
    sign = 1 if policy.best_is_low else -1
    for h in mine:
        newer = sum(on_lineage(o.name.id, lineage) and o.name.id > h.name.id for o in mine)
        better = [
            o
            for o in line
            if o.facts.metric is not None
            and h.facts.metric is not None
            and (sign * o.facts.metric, -o.name.id.version)
            < (sign * h.facts.metric, -h.name.id.version)
        ]
        is_best = h in line and h.facts.metric is not None and len(better) < policy.keep_best
        if h.pinned or is_best or h.name.id >= safe.name.id:
            continue
        if on_lineage(h.name.id, lineage):
            every = policy.keep_every and h.name.id.version % policy.keep_every == 0
            if newer >= max(policy.keep_last, 1) and not every:
                yield h.name
        elif safe.name.id.generation == lineage[-1][0]:
            yield h.name


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[HeldVersion], Lineage]:
    held = held_of(draw)
    if not held:
        return [], ((1, 0),)
    return held, draw(st.sampled_from([h.facts.lineage for h in held]))


@given(situations(), policies)
def test_retention_does_what_the_rules_say(
    situation: tuple[list[HeldVersion], Lineage], policy: RetentionPolicy
) -> None:
    held, lineage = situation
    gone = retirable(held, policy, asking(life_of(lineage), lineage))
    assert gone == sorted(oracle(held, policy, lineage))


@given(situations(), policies)
def test_the_last_restorable_version_is_safe_from_every_policy(
    situation: tuple[list[HeldVersion], Lineage], policy: RetentionPolicy
) -> None:
    held, lineage = situation
    gone = set(retirable(held, policy, asking(life_of(lineage), lineage)))
    ours = {g for g, _ in lineage}
    mine = [h for h in held if h.facts.job == "job" and h.name.id.generation in ours]
    if mine:
        assert max(h.name for h in mine) not in gone
    for h in held:
        if h.facts.job != "job" or h.pinned or h.name.id.generation not in ours:
            assert h.name not in gone


def held_by(run_id: str, generation: int, *versions: int, lineage: Lineage) -> list[HeldVersion]:
    ids = [VersionId(generation, version) for version in versions]
    return [HeldVersion(facts_of(id_, 1, run_id, lineage)) for id_ in ids]


def test_a_version_that_was_taken_again_takes_one_place_among_the_best() -> None:
    lineage = ((1, 0), (2, 3), (3, 8))
    scores = {(1, 2): 0.2, (1, 3): 0.1, (2, 3): 0.1, (2, 8): 0.9, (3, 9): 0.9}
    held = [
        HeldVersion(facts_of(VersionId(*id_), 1, "aaaa", lineage, metric=score))
        for id_, score in scores.items()
    ]
    policy = RetentionPolicy(keep_last=1, keep_best=2, best_is_low=True)
    gone = retirable(held, policy, asking("aaaa", lineage))
    assert {(name.id.generation, name.id.version) for name in gone} == {(1, 3), (2, 8)}


def test_two_lives_of_one_generation_leave_each_other_alone() -> None:
    """Two experiments that were given the same place, or never saw each other's nodes."""
    here = held_by("aaaa", 1, 1, 2, 3, lineage=((1, 0),))
    there = held_by("bbbb", 1, 4, 5, 6, lineage=((1, 0),))
    policy = RetentionPolicy(keep_last=1)
    gone = retirable(here + there, policy, asking("aaaa", ((1, 0),)))
    assert gone == [h.name for h in here[:2]]


def test_of_two_lives_that_may_be_the_ancestor_neither_is_touched() -> None:
    now = held_by("cccc", 2, 9, 10, lineage=((1, 8), (2, 8)))
    one = held_by("aaaa", 1, 7, 8, lineage=((1, 0),))
    other = held_by("bbbb", 1, 6, lineage=((1, 0),))
    policy, lineage = RetentionPolicy(keep_last=1), ((1, 8), (2, 8))
    assert retirable(now + one, policy, asking("cccc", lineage)) == [
        *(h.name for h in one),
        now[0].name,
    ]
    assert retirable(now + one + other, policy, asking("cccc", lineage)) == [now[0].name]


def test_it_is_imported_without_fsspec_torch_or_numpy() -> None:
    """The agent stays small; whoever names a directory needs no client of object stores."""
    program = (
        "import sys, tierckpt.storage.persistent.store as s; "
        "s.PersistentStore('/nowhere').versions()\n"
        "print([m for m in ('fsspec', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_newest_version_that_is_no_suspect_stays_however_many_follow() -> None:
    held = held_by("aaaa", 1, 1, 2, 3, 4, 5, lineage=((1, 0),))
    held[2:] = [replace(h, suspect=True) for h in held[2:]]
    gone = retirable(held, RetentionPolicy(keep_last=1), asking("aaaa", ((1, 0),)))
    assert [name.id.version for name in gone] == [1, 3, 4]
