"""The records that lead on from a version, as all ranks find them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tierckpt.errors import CorruptShardError
from tierckpt.format import ShardKey, VersionId
from tierckpt.journal import BOUNDARY, FrameHead, SegmentName
from tierckpt.journal.segments import RecordKey, chain_from, outdated, rebuildable

RUN = "a run"


def v(version: int, generation: int = 1) -> VersionId:
    return VersionId(generation, version)


def keys(*ids: VersionId, run_id: str = RUN) -> list[RecordKey]:
    return [RecordKey(after, id_, run_id, 1) for after, id_ in pairwise(ids)]


def ids_of(
    base: VersionId, *ranks: list[RecordKey], **rollback: tuple[int, int]
) -> list[VersionId]:
    return [key.id for key in chain_from(base, ranks, **rollback)]


def test_the_rank_with_the_shortest_journal_ends_it() -> None:
    long, short = keys(v(4), v(5), v(6), v(7)), keys(v(4), v(5), v(6))
    assert ids_of(v(4), long, short) == [v(5), v(6)]
    assert ids_of(v(5), long, short) == [v(6)], "from any version on the way"
    assert ids_of(v(6), long, short) == []
    assert ids_of(v(4), long, []) == []


def test_a_hole_ends_it() -> None:
    whole = keys(v(4), v(5), v(6), v(7))
    assert ids_of(v(4), whole, [whole[0], whole[2]]) == [v(5)]


def test_other_numbers_of_steps_end_it() -> None:
    two = [RecordKey(v(4), v(6), RUN, 2)]
    assert ids_of(v(4), two, two) == [v(6)]
    assert ids_of(v(4), two, keys(v(4), v(6))) == []


def test_records_of_two_runs_with_the_same_number_are_not_mixed() -> None:
    one, other = keys(v(4), v(5), v(6)), keys(v(4), v(5), v(6), run_id="a run beside it")
    assert ids_of(v(4), one, other) == []
    assert ids_of(v(4), [*one, *other], one) == [v(5), v(6)]


def test_it_continues_through_runs_and_the_newer_one_counts() -> None:
    first = keys(v(4), v(5), v(6))
    second = keys(v(5), v(6, 2), v(7, 2))
    both = [*first, *second]
    assert ids_of(v(4), both, both) == [v(5), v(6, 2), v(7, 2)]
    assert ids_of(v(4), both, first) == [v(5), v(6)], "one rank has not begun it"


def test_records_that_a_rollback_gave_up_do_not_count() -> None:
    first = keys(v(4), v(5), v(6), v(7))
    assert ids_of(v(4), first, rollback=(2, 4)) == []
    assert ids_of(v(4), first, rollback=(2, 6)) == [v(5), v(6)]
    assert ids_of(v(4), first, rollback=(1, 0)) == [v(5), v(6), v(7)]


def test_files_before_the_versions_that_stay_are_outdated() -> None:
    bases = [v(9), v(1), v(5), v(13)]
    assert outdated(bases, v(9), 2) == {v(1)}
    assert outdated(bases, v(9), 1) == {v(1), v(5)}
    assert outdated(bases, v(4), 1) == set()
    assert outdated(bases, None, 1) == set()
    assert outdated([v(20), v(3, 2)], v(3, 2), 1) == {v(20)}, "of an earlier run"


def test_names_and_heads_are_read_as_they_were_written() -> None:
    name = SegmentName(ShardKey(v(40), 1, 2), 3)
    assert str(name) == "v0000000040.g000001.s00001of00002.by000003.journal"
    assert SegmentName.parse(str(name)) == name
    copy = SegmentName(ShardKey(v(40), 1, 2), 3, 0)
    assert str(copy) == "v0000000040.g000001.s00001of00002.by000003.copy00000.journal"
    assert SegmentName.parse(str(copy)) == copy
    assert (name.rank, copy.rank) == (1, 0)
    assert SegmentName.parse("v0000000040.g000001.s00001of00002.manifest") is None
    head = FrameHead(BOUNDARY, v(40), 2**64 - 1, 700, 8192)
    data = head.encode()
    assert len(data) == 64
    assert FrameHead.decode(data) == head
    for place in range(64):
        wrong = bytearray(data)
        wrong[place] ^= 1
        with pytest.raises(CorruptShardError):
            FrameHead.decode(bytes(wrong))
    with pytest.raises(CorruptShardError):
        FrameHead.decode(data[:63])


def test_a_restart_starts_with_a_protected_version_not_too_old() -> None:
    assert rebuildable(v(9), v(5), 4) == v(5)
    assert rebuildable(v(9), v(5), 3) == v(9)
    assert rebuildable(v(9), None, 4) == v(9)
    assert rebuildable(None, v(5), 4) is None
    assert rebuildable(v(3, 2), v(5), 4) == v(5), "of an earlier run"
