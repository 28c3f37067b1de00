"""Names, and the order of versions across runs of a job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.histories import histories
from tierckpt.errors import FormatError
from tierckpt.format import (
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


# --- runs ----------------------------------------------------------------------------------------
#
# A history is made as jobs make it: each run starts from a version on the lineage of the run before
# (or from nothing), and takes several versions.


def past_of(id_: VersionId, written: dict[VersionId, Lineage]) -> set[VersionId]:
    """The reference: walk from child to parent through the states that led to id_."""
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


def test_a_withdrawn_run_is_nobodys_ancestor() -> None:
    old, back = ((1, 0),), ((1, 0), (2, 5))
    written = {VersionId(1, v): old for v in (4, 5, 6, 12)} | {VersionId(2, 6): back}
    assert newest_first(written.items()) == [VersionId(2, 6), VersionId(1, 5), VersionId(1, 4)]
    assert not on_lineage(VersionId(1, 12), back)
    assert on_lineage(VersionId(2, 99), back)
    assert on_lineage(VersionId(1, 1), ())
    assert newest_first([]) == []
