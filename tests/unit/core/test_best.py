"""Keep-best: rank 0's metric decides, alike on all ranks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.core import NO_METRIC, Best, as_vote, best_of, of_vote
from tierckpt.format import VersionId

finite = st.floats(allow_nan=False, allow_infinity=False)
measured = st.dictionaries(st.builds(VersionId, st.just(1), st.integers(0, 30)), finite, max_size=9)


@given(finite, st.integers(0, 4))
def test_the_minimum_of_all_votes_is_rank_zeros(metric: float, others: int) -> None:
    votes = [as_vote(metric), *[as_vote(None)] * others]
    found = of_vote(min(votes))
    assert found == metric
    assert math.copysign(1, found) == math.copysign(1, metric)


@pytest.mark.parametrize("metric", [None, math.nan, math.inf, -math.inf])
def test_a_value_but_no_number_is_no_metric(metric: float | None) -> None:
    assert as_vote(metric) == NO_METRIC
    assert of_vote(NO_METRIC) is None


@given(measured, st.integers(0, 5), st.booleans())
def test_the_best_are_those_that_few_are_better_than(
    metrics: dict[VersionId, float], count: int, lowest: bool
) -> None:
    def better(one: VersionId, other: VersionId) -> bool:
        if metrics[one] == metrics[other]:
            return one > other
        return (metrics[one] < metrics[other]) == lowest

    expected = {v for v in metrics if sum(better(other, v) for other in metrics) < count}
    assert best_of(metrics, count, lowest) == expected


@given(measured, measured, st.integers(0, 4), st.booleans())
def test_the_book_has_the_best_of_all_there_ever_were(
    before: dict[VersionId, float], after: dict[VersionId, float], count: int, lowest: bool
) -> None:
    # A version taken again replaces the one before.
    before = {v: m for v, m in before.items() if v.version not in {v.version for v in after}}
    best = Best(count, lowest)
    best.restart(before)
    newer = {VersionId(2, v.version): metric for v, metric in after.items()}
    for version, metric in newer.items():
        best.add(version, metric)
        best.add(VersionId(3, version.version), None)
    assert best.versions == best_of({**before, **newer}, count, lowest)
