"""The Group over Horovod fulfils the contract of Group, also after errors."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_pool import HOROVODRUN
from tests.support.training import horovod, rank_0_first
from tierckpt.coordination import GroupBallots
from tierckpt.testing import GroupConformance, Program

MEMBERS = {2: [0, 2], 3: [0, 1, 2]}
"""Of a job of three, by size."""


def horovod_group(*process_set: Any) -> Any:
    return importlib.import_module("horovod_ckpt").HorovodGroup(*process_set)


def on_process_set(members: list[int], program: Program) -> Any:
    """Run on a process set of these ranks; the others do nothing."""
    hvd = horovod()
    part = hvd.add_process_set(members)
    try:
        if part.included():
            group = horovod_group(part)
            outcome = program(group)
            group.close()
            return outcome
        return None
    finally:
        hvd.remove_process_set(part)


def on_whole_job(program: Program) -> Any:
    group = horovod_group()
    outcome = program(group)
    group.close()
    return outcome


# --- several on the same ranks -------------------------------------------------------------------


def votes_of_two_groups() -> list[Any]:
    """Rank 0 votes in both before any other rank does, and has made more groups than the others."""
    on_process_set([0], lambda group: None)
    groups = [horovod_group(), horovod_group()]
    with rank_0_first():
        pending = [g.all_reduce_min([10 * number, g.rank]) for number, g in enumerate(groups)]
    return [p.wait() for p in pending]


def test_votes_of_two_groups_do_not_meet(ranks: Any) -> None:
    """Also ranks of one group find each other: those that joined an elastic job later have made
    fewer groups."""
    told = ranks(3, HOROVODRUN).run(votes_of_two_groups)
    assert told == [[[0, 0], [10, 0]]] * 3


# --- after errors --------------------------------------------------------------------------------


def votes_after_one_rank_left_some_out(votes: int, left_out: int) -> list[Any]:
    """As when a rank raises before the boundary, and then all restore."""
    group = horovod_group()
    box = GroupBallots(group, 2)
    for turn in range(votes - (left_out if group.rank == 0 else 0)):
        pending = box.all_reduce_min([turn, group.rank])
        if turn < votes - left_out:
            pending.wait()
    box.even_out()
    group.all_gather_object("restore")
    later = [box.all_reduce_min([100 + turn, 100]) for turn in range(10)]
    return [p.wait() for p in later]


@pytest.mark.parametrize(("votes", "left_out"), [(3, 1), (12, 3)])
def test_votes_of_one_boundary_meet_also_when_a_rank_left_some_out(
    votes: int, left_out: int, ranks: Any
) -> None:
    expected = [[100 + turn, 100] for turn in range(10)]
    pool = ranks(3, HOROVODRUN)
    assert pool.run(votes_after_one_rank_left_some_out, votes, left_out) == [expected] * 3


def many_votes_under_way(count: int) -> list[Any]:
    group = horovod_group()
    pending = [group.all_reduce_min([turn, -group.rank]) for turn in range(count)]
    return [p.wait() for p in reversed(pending)]


def test_more_votes_may_be_under_way_than_have_names(ranks: Any) -> None:
    expected = [[turn, -2] for turn in reversed(range(20))]
    assert ranks(3, HOROVODRUN).run(many_votes_under_way, 20) == [expected] * 3


def ask_twice_after_an_error() -> list[str]:
    """Ranks that disagree about the length get an error from Horovod, as when one is gone."""
    hvd = horovod()
    group = horovod_group()
    pending = group.all_reduce_min([0] * (1 + group.rank))
    said = []
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError) as caught:
            pending.wait()
        said.append(str(caught.value))
    return said


def test_the_second_caller_gets_the_same_error(ranks: Any) -> None:
    """The copier thread may have asked before the training thread, and elastic Horovod restarts a
    job only for this error."""
    pool = ranks(3, HOROVODRUN)
    for first, second in pool.run(ask_twice_after_an_error):
        assert first == second
        assert "Mismatched" in first


# --- the contract ---------------------------------------------------------------------------------


class OnThree(GroupConformance):
    """Size 2 is a part of a job of three."""

    __test__ = False
    kind = HOROVODRUN
    sizes = (2, 3)

    @pytest.fixture(autouse=True)
    def use_pool(self, ranks: Any) -> None:
        self.pool = ranks(3, self.kind)

    def run(self, size: int, program: Program) -> list[Any]:
        members = MEMBERS[size]
        told = self.pool.run(*self.scenario(members), program)
        assert all(told[r] is None for r in range(3) if r not in members)
        return [told[r] for r in members]

    def scenario(self, members: list[int]) -> tuple[Any, ...]:
        return (on_process_set, members) if len(members) < 3 else (on_whole_job,)


class TestHorovodGroupOverGloo(OnThree):
    __test__ = True

    def test_a_rank_alone_at_the_end_is_reported(self, tmp_path: Path) -> None:
        """It waits on for the rank that never came, so it needs new ranks afterwards."""
        super().test_a_rank_alone_at_the_end_is_reported(tmp_path)
        self.pool.kill()
