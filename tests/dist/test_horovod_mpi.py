"""Over MPI the adapter does what it does over Gloo: scenarios of the other modules, on one pool.

The options of `DistributedOptimizer` and the Groups have their own tests over MPI, where they are.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.dist import test_horovod_barrier as barrier
from tests.dist import test_horovod_callbacks as callbacks
from tests.dist import test_horovod_crossing as crossing
from tests.dist import test_horovod_training as training
from tests.dist import test_horovod_ways_in as ways_in
from tests.dist.rankpool import GLOO, MPIRUN, RankPool
from tests.dist.training import Place


@pytest.fixture
def pool(ranks: Any) -> RankPool:
    found: RankPool = ranks(3, MPIRUN)
    return found


@pytest.fixture
def place(tmp_path: Path, shm_dir: Path) -> Place:
    return Place.under(tmp_path, shm_dir)


@pytest.mark.parametrize("name", ["default", "groups"])
def test_layers_are_copied_while_their_gradients_are_reduced(
    name: str, pool: RankPool, place: Place
) -> None:
    barrier.check_released(name, pool.run(barrier.layers_released_by_backward, name, place))


@pytest.mark.parametrize("loop", barrier.LOOPS.values(), ids=barrier.LOOPS)
def test_no_weight_changes_before_it_is_copied(loop: Any, pool: RankPool, place: Place) -> None:
    told = pool.run(barrier.restored_from_late_copies, loop, barrier.intact, place)
    assert told == [(3, [])] * 3


def test_it_is_the_barrier_that_keeps_the_optimizer_off(pool: RankPool, place: Place) -> None:
    loop = barrier.LOOPS["outer and inner step"]
    told = pool.run(barrier.restored_from_late_copies, loop, barrier.no_barrier, place)
    assert all(torn for _, torn in told)


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


@pytest.mark.parametrize("ddp_first", [True, False], ids=["from DDP", "to DDP"])
def test_crossing(
    ddp_first: bool, pool: RankPool, place: Place, ranks: Any, shm_root: Path
) -> None:
    """On another number of ranks, from disk."""
    jobs = [ranks(2, GLOO), pool] if ddp_first else [pool, ranks(2, GLOO)]
    memory = shm_root / "before"
    memory.mkdir()
    made = jobs[0].run(crossing.leave_behind, Place(place.path, str(memory)))
    shutil.rmtree(memory)
    crossing.check_taken_up(jobs[1].run(crossing.take_up, place), made)


@pytest.mark.parametrize("name", ["default", "two backward passes"])
def test_a_job_of_one(name: str, ranks: Any, place: Place) -> None:
    (told,) = ranks(1, MPIRUN).run(training.trained_with_and_without, name, place)
    training.check(name, 1, "memory", told)
