"""Over MPI the adapter does what it does over Gloo: scenarios of the other modules, on one pool.

The options of `DistributedOptimizer` and the Groups have their own tests over MPI, where they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import test_horovod_barrier as barrier
from tests.dist import test_horovod_callbacks as callbacks
from tests.dist import test_horovod_ways_in as ways_in
from tests.dist.rankpool import MPIRUN, RankPool
from tests.dist.training import Place


@pytest.fixture
def pool(ranks: Any) -> RankPool:
    found: RankPool = ranks(3, MPIRUN)
    return found


@pytest.fixture
def place(tmp_path: Path, shm_dir: Path) -> Place:
    return Place.under(tmp_path, shm_dir)


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("default", "in_the_backward_of_rank_0"),
        ("groups", "before_the_step_of_rank_0"),
        ("unused parameters", "before_the_step"),
        ("sparse and dense", "before_the_forward_of_rank_0"),
    ],
)
def test_an_iteration_cut_short(name: str, cut: str, pool: RankPool, place: Place) -> None:
    barrier.check_gone_on(pool.run(barrier.gone_on_after, cut, name, place))


def test_install(pool: RankPool, place: Place) -> None:
    assert pool.run(ways_in.installed, place) == [ways_in.INSTALLED] * 3


def test_the_drop_in(pool: RankPool, place: Place) -> None:
    assert pool.run(ways_in.all_in_one, place, positional=True) == [(True, 3, 2)] * 3


def test_a_script_with_another_import(pool: RankPool, place: Place) -> None:
    plain = pool.run(ways_in.run_plainly, 8)
    first = pool.run(ways_in.run_with_checkpoints, place, 6)
    second = pool.run(ways_in.run_with_checkpoints, place, 8)
    ways_in.check_script(first, second, plain)


def test_callbacks(pool: RankPool, place: Place) -> None:
    assert pool.run(callbacks.heard, place) == [callbacks.HEARD] * 3


def test_training_in_a_process_set(pool: RankPool, place: Place) -> None:
    ways_in.check_part(pool.run(ways_in.in_a_part_of_the_job, place))


def test_two_process_sets_side_by_side(pool: RankPool, tmp_path: Path, shm_dir: Path) -> None:
    told = pool.run(ways_in.side_by_side, str(tmp_path), str(shm_dir))
    ways_in.check_side_by_side(told, tmp_path)
