"""Retention: the versions that may be removed, on the local and on the persistent level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.facts import facts_of
from tests.support.histories import histories
from tierckpt.core import HeldVersion, RetentionPolicy, milestones, retirable, retirable_names
from tierckpt.format import Lineage, VersionFacts, VersionId, VersionName, newest_first, on_lineage


def stands_for_a_multiple(id_: VersionId, line: list[VersionId], every: int) -> bool:
    """Whether a version is a multiple, or the first one after a missing multiple."""
    if not every or not id_.version % every:
        return bool(every)
    multiple = id_.version - id_.version % every
    return multiple > 0 and not any(multiple <= i.version < id_.version for i in line)


@given(histories(), st.data())
def test_retention_keeps_its_promises(
    written: dict[VersionId, Lineage], data: st.DataObject
) -> None:
    lineage = written[max(written)]
    line = newest_first(written.items())
    safe = data.draw(st.sampled_from(line))
    keep_last = data.draw(st.integers(1, 4))
    keep_every = data.draw(st.integers(0, 4))
    gone = retirable(written, RetentionPolicy(keep_last, keep_every), safe, lineage)
    ours = {generation for generation, _ in lineage}

    assert safe not in gone
    assert all(i <= safe for i in gone), "what is newer than the safe version may be all there is"
    assert all(i.generation in ours for i in gone), "other runs are not ours to end"
    past = [i for i in line if i <= safe]
    assert not set(past[:keep_last]) & set(gone), "the last ones stay"
    points = [i for i in past if stands_for_a_multiple(i, past, keep_every)]
    assert not {*points} & {*gone}
    assert {*past[keep_last:]} - {*points} <= {*gone}, "what nobody asked to keep goes"
    assert gone == sorted(gone)
    assert len(gone) == len(set(gone))


@given(histories(), st.data())
def test_an_incomplete_version_costs_no_complete_one(
    written: dict[VersionId, Lineage], data: st.DataObject
) -> None:
    """A rank with its shard of a void version keeps the same complete versions as one without."""
    lineage = written[max(written)]
    safe = data.draw(st.sampled_from(newest_first(written.items())))
    void = data.draw(st.sets(st.sampled_from(sorted(written)))) - {safe}
    policy = RetentionPolicy(data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4)))
    gone = set(retirable(written, policy, safe, lineage, void=void))
    assert gone - void == set(retirable(set(written) - void, policy, safe, lineage))
    newer = {i for i in void if i > safe}
    assert {i for i in gone if i in newer} == {i for i in newer if i.generation == lineage[-1][0]}
    assert void - newer <= gone
    assert set(retirable(written, policy, None, lineage, void=void)) <= void


def test_versions_that_an_ancestor_wrote_after_the_fork_go_once_this_run_is_safe() -> None:
    lineage = ((1, 0), (2, 5))
    held = [VersionId(1, v) for v in (4, 5, 9)] + [VersionId(2, 6)]
    assert VersionId(1, 9) not in retirable(held, RetentionPolicy(2), VersionId(1, 5), lineage)
    assert retirable(held, RetentionPolicy(2), VersionId(2, 6), lineage) == [
        VersionId(1, 4),
        VersionId(1, 9),
    ]


def test_of_versions_of_one_number_the_newest_counts_alone() -> None:
    """v5 was taken again, twice: it is one of the two that are kept, once the last is safe."""
    lineage = ((1, 0), (2, 5), (3, 5))
    first, second, third = (VersionId(generation, 5) for generation in (1, 2, 3))
    held = [VersionId(1, 3), VersionId(1, 4), first, second, third]
    assert retirable(held, RetentionPolicy(2), third, lineage) == [VersionId(1, 3), first, second]
    assert retirable(held, RetentionPolicy(2, 5), third, lineage) == [
        VersionId(1, 3),
        first,
        second,
    ]
    assert retirable(held, RetentionPolicy(2), first, lineage) == [VersionId(1, 3)]


# --- on the persistent level ---------------------------------------------------------------------


def life_of(lineage: Lineage) -> str:
    return f"{lineage[-1][0]}"


def asking(run_id: str, lineage: Lineage) -> VersionFacts:
    """A version of the run that asks."""
    return facts_of(VersionId(lineage[-1][0], 0), 1, run_id, lineage)


def held_of(draw: st.DrawFn) -> list[HeldVersion]:
    """Several runs, each from a version of the run before or from nothing, with their versions."""
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
    """The reference: retention, version by version, as the documents describe it."""
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
            on_line = [o.name.id for o in mine if on_lineage(o.name.id, lineage)]
            point = stands_for_a_multiple(h.name.id, on_line, policy.keep_every)
            if newer >= max(policy.keep_last, 1) and not point:
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
def test_retention_follows_the_rules(
    situation: tuple[list[HeldVersion], Lineage], policy: RetentionPolicy
) -> None:
    held, lineage = situation
    gone = retirable_names(held, policy, asking(life_of(lineage), lineage))
    assert gone == sorted(oracle(held, policy, lineage))


def held_by(run_id: str, generation: int, *versions: int, lineage: Lineage) -> list[HeldVersion]:
    ids = [VersionId(generation, version) for version in versions]
    return [HeldVersion(facts_of(id_, 1, run_id, lineage)) for id_ in ids]


def test_two_runs_of_one_generation_leave_each_other_alone() -> None:
    """Two experiments with the same place, or runs that never saw each other's nodes."""
    here = held_by("aaaa", 1, 1, 2, 3, lineage=((1, 0),))
    there = held_by("bbbb", 1, 4, 5, 6, lineage=((1, 0),))
    policy = RetentionPolicy(keep_last=1)
    gone = retirable_names(here + there, policy, asking("aaaa", ((1, 0),)))
    assert gone == [h.name for h in here[:2]]


def test_of_two_runs_that_may_be_the_ancestor_neither_is_touched() -> None:
    now = held_by("cccc", 2, 9, 10, lineage=((1, 8), (2, 8)))
    one = held_by("aaaa", 1, 7, 8, lineage=((1, 0),))
    other = held_by("bbbb", 1, 6, lineage=((1, 0),))
    policy, lineage = RetentionPolicy(keep_last=1), ((1, 8), (2, 8))
    assert retirable_names(now + one, policy, asking("cccc", lineage)) == [
        *(h.name for h in one),
        now[0].name,
    ]
    assert retirable_names(now + one + other, policy, asking("cccc", lineage)) == [now[0].name]


def test_the_newest_version_not_suspect_stays_however_many_follow() -> None:
    held = held_by("aaaa", 1, 1, 2, 3, 4, 5, lineage=((1, 0),))
    held[2:] = [replace(h, suspect=True) for h in held[2:]]
    gone = retirable_names(held, RetentionPolicy(keep_last=1), asking("aaaa", ((1, 0),)))
    assert [name.id.version for name in gone] == [1, 3, 4]


@pytest.mark.parametrize(
    ("there", "kept"),
    [
        ([10, 20, 30], {10, 20, 30}),
        ([1, 5, 10, 15, 20], {10, 20}),
        ([5, 13, 17, 24, 31, 40], {13, 24, 31, 40}),
        ([0, 3, 45], {0, 45}),
        ([], set()),
    ],
)
def test_without_a_multiple_the_next_version_stands_for_it(
    there: list[int], kept: set[int]
) -> None:
    assert milestones(there, 10) == kept
    assert milestones(there, 0) == set()
