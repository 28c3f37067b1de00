"""Names, the order of versions across lives of a job, and retention."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tierckpt.core.retention import retired
from tierckpt.errors import FormatError
from tierckpt.format.ids import (
    Lineage,
    ShardKey,
    VersionId,
    check_version,
    newest_first,
    on_lineage,
    round_up,
)

ids = st.builds(VersionId, st.integers(0, 10**7), st.integers(0, 10**11))
keys = st.builds(ShardKey, ids, st.integers(0, 10**6), st.integers(1, 10**6))


@given(keys)
def test_a_stem_is_parsed_back(key: ShardKey) -> None:
    assert ShardKey.parse(key.stem) == key


@given(keys, keys)
def test_different_shards_have_different_stems(one: ShardKey, other: ShardKey) -> None:
    assert (one.stem == other.stem) == (one == other)


@given(keys)
def test_names_of_work_in_progress_are_no_stems(key: ShardKey) -> None:
    for name in (f".{key.stem}", f"{key.stem}.tmp", f"{key.stem}\n", f" {key.stem}", "", "notes"):
        assert ShardKey.parse(name) is None


@given(st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1))
def test_stems_of_one_generation_sort_as_versions_do(one: int, other: int) -> None:
    stems = [ShardKey(VersionId(1, v), 0, 1).stem for v in (one, other)]
    assert (stems[0] < stems[1]) == (one < other)


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_rounding_up_reaches_the_next_multiple_and_no_further(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


def test_only_a_newer_major_version_is_refused() -> None:
    for fine in ("0.9", "1.0", "1.7", "1"):
        check_version(fine, "shard")
    with pytest.raises(FormatError, match="this shard has format version 2"):
        check_version("2.0", "shard")


# --- lives ---------------------------------------------------------------------------------------
#
# A history is made as jobs make it: each run starts from a version on the line of the run before
# (or afresh), and goes on for some versions.


@st.composite
def histories(draw: st.DrawFn) -> dict[VersionId, Lineage]:
    """Versions that were written in some lives of a job, and the lineage each was written with."""
    written: dict[VersionId, Lineage] = {}
    generation = 0
    for _ in range(draw(st.integers(1, 5))):
        generation += draw(st.integers(1, 3))
        lineage: Lineage = ((generation, 0),)
        if written and draw(st.integers(0, 4)):
            parent = draw(st.sampled_from(newest_first(written.items())))
            lineage = (*written[parent], (generation, parent.version))
        base = lineage[-1][1]
        for version in range(base + 1, base + 1 + draw(st.integers(0, 5))):
            written[VersionId(generation, version)] = lineage
    assume(written)
    return written


def past_of(id_: VersionId, written: dict[VersionId, Lineage]) -> set[VersionId]:
    """By walking from child to parent: what was once the state of the training that led to id_."""
    line = set()
    top = id_.version
    for generation, base in reversed(written[id_]):
        line |= {i for i in written if i.generation == generation and i.version <= top}
        top = base
    return line


@given(histories())
def test_a_restart_sees_the_past_of_the_newest_version_and_nothing_else(
    written: dict[VersionId, Lineage],
) -> None:
    newest = max(written)
    order = newest_first(written.items())
    assert order[0] == newest
    assert order == sorted(order, reverse=True)
    assert set(order) == past_of(newest, written)


def test_what_was_taken_back_is_nobodys_past() -> None:
    old, back = ((1, 0),), ((1, 0), (2, 5))
    written = {VersionId(1, v): old for v in (4, 5, 6, 12)} | {VersionId(2, 6): back}
    assert newest_first(written.items()) == [VersionId(2, 6), VersionId(1, 5), VersionId(1, 4)]
    assert not on_lineage(VersionId(1, 12), back)
    assert on_lineage(VersionId(2, 99), back)
    assert on_lineage(VersionId(1, 1), ())
    assert newest_first([]) == []


@given(histories(), st.data())
def test_retention_keeps_its_promises(
    written: dict[VersionId, Lineage], data: st.DataObject
) -> None:
    lineage = written[max(written)]
    line = newest_first(written.items())
    safe = data.draw(st.sampled_from(line))
    keep_last = data.draw(st.integers(1, 4))
    keep_every = data.draw(st.integers(0, 4))
    gone = retired(written, safe, lineage, keep_last, keep_every)
    ours = {generation for generation, _ in lineage}

    assert safe not in gone
    assert all(i <= safe for i in gone), "what is newer than the safe version may be all there is"
    assert all(i.generation in ours for i in gone), "other runs are not ours to end"
    past = [i for i in line if i <= safe]
    assert not set(past[:keep_last]) & set(gone), "the last ones stay"
    assert not keep_every or not {i for i in past if i.version % keep_every == 0} & set(gone)
    superfluous = [i for i in past[keep_last:] if not keep_every or i.version % keep_every]
    assert set(superfluous) <= set(gone), "what nobody asked to keep goes"
    assert gone == sorted(gone)
    assert len(gone) == len(set(gone))


@given(histories(), st.integers(1, 4))
def test_nothing_goes_before_a_version_is_known_to_be_safe(
    written: dict[VersionId, Lineage], keep_last: int
) -> None:
    assert retired(written, None, written[max(written)], keep_last, 0) == []


@given(histories(), st.data())
def test_what_is_incomplete_costs_no_complete_version(
    written: dict[VersionId, Lineage], data: st.DataObject
) -> None:
    """A rank that has its shard of it keeps the same complete versions as one that has not."""
    lineage = written[max(written)]
    safe = data.draw(st.sampled_from(newest_first(written.items())))
    void = data.draw(st.sets(st.sampled_from(sorted(written)))) - {safe}
    policy = (data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4)))
    gone = set(retired(written, safe, lineage, *policy, void))
    assert gone - void == set(retired(set(written) - void, safe, lineage, *policy))
    newer = {i for i in void if i > safe}
    assert {i for i in gone if i in newer} == {i for i in newer if i.generation == lineage[-1][0]}
    assert void - newer <= gone
    assert set(retired(written, None, lineage, *policy, void)) <= void


def test_what_an_ancestor_wrote_after_the_fork_goes_once_this_life_is_safe() -> None:
    lineage = ((1, 0), (2, 5))
    held = [VersionId(1, v) for v in (4, 5, 9)] + [VersionId(2, 6)]
    assert VersionId(1, 9) not in retired(held, VersionId(1, 5), lineage, 2, 0)
    assert retired(held, VersionId(2, 6), lineage, 2, 0) == [VersionId(1, 4), VersionId(1, 9)]


def test_of_versions_of_one_number_the_newest_counts_alone() -> None:
    """v5 was taken again, twice: it is one of the two that are kept, once the last is safe."""
    lineage = ((1, 0), (2, 5), (3, 5))
    first, second, third = (VersionId(generation, 5) for generation in (1, 2, 3))
    held = [VersionId(1, 3), VersionId(1, 4), first, second, third]
    assert retired(held, third, lineage, 2, 0) == [VersionId(1, 3), first, second]
    assert retired(held, third, lineage, 2, 5) == [VersionId(1, 3), first, second]
    assert retired(held, first, lineage, 2, 0) == [VersionId(1, 3)]
