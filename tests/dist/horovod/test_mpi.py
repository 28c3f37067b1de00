"""The adapter gives the same results over MPI as over Gloo: scenarios of the other modules, on one
pool.

The options of `DistributedOptimizer` and the Groups have their own tests over MPI, in their
modules.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.horovod import test_barrier as barrier
from tests.dist.horovod import test_callbacks as callbacks
from tests.dist.horovod import test_crossing as crossing
from tests.dist.horovod import test_several as several
from tests.dist.horovod import test_training as training
from tests.dist.horovod import test_ways_in as ways_in
from tests.support import exact
from tests.support.rank_pool import GLOO, MPIRUN, RankPool
from tests.support.training import Attached, Job, Net, Place, attach, rank, through_a_crash


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
    barrier.check_trained(pool.run(barrier.trained_after, cut, name, place))


def test_install(pool: RankPool, place: Place) -> None:
    assert pool.run(ways_in.installed, place) == [ways_in.INSTALLED] * 3


def test_the_drop_in(pool: RankPool, place: Place) -> None:
    assert pool.run(ways_in.all_in_one, place, positional=True) == [(True, 3, 3)] * 3


def test_a_script_with_another_import(pool: RankPool, place: Place) -> None:
    plain = pool.run(ways_in.run_plainly, 8)
    first = pool.run(ways_in.run_with_checkpoints, place, 6)
    second = pool.run(ways_in.run_with_checkpoints, place, 8)
    ways_in.check_script(first, second, plain)


def test_callbacks(pool: RankPool, place: Place) -> None:
    assert pool.run(callbacks.heard, place) == [callbacks.HEARD] * 3


def test_training_in_a_process_set(pool: RankPool, place: Place) -> None:
    several.check_part(pool.run(several.in_a_part_of_the_job, place))


def test_two_process_sets_side_by_side(pool: RankPool, tmp_path: Path, shm_dir: Path) -> None:
    told = pool.run(several.side_by_side, str(tmp_path), str(shm_dir))
    several.check_side_by_side(told, tmp_path)


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


class MPIJob(Job):
    """A loop that reduces gradients itself, by mpi4py."""

    def iterate(self, iteration: int) -> str:
        mpi = importlib.import_module("mpi4py.MPI")
        self.optimizer.zero_grad()
        self.loss(iteration).backward()
        for param in self.model.parameters():
            assert param.grad is not None
            mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, param.grad.numpy())
            param.grad /= mpi.COMM_WORLD.size
        self.optimizer.step()
        return exact.digest(exact.gradients(self.bare))


def over_mpi_alone(place: Place) -> dict[str, Any]:
    """Through a crash, each rank on a node of its own."""

    def new(seed: int) -> Job:
        torch.manual_seed(seed)
        model = Net()
        torch.manual_seed(1000 * seed + rank())
        return MPIJob(model, [torch.optim.Adam(model.parameters())], adapter="tierckpt")

    def attached(job: Job, place: Place) -> Attached:
        group = importlib.import_module("tierckpt.mpi").MPIGroup()
        return attach(job, place, group=group, node=f"node{rank()}")

    return through_a_crash(new, place, 4, 7, attached)


def test_ranks_that_speak_mpi_only(pool: RankPool, place: Place) -> None:
    for told in pool.run(over_mpi_alone, place):
        assert told["restored"] == (4, {"memory": 3})
        assert told["course"] == told["plain"]


@pytest.mark.parametrize("name", ["default", "two backward passes"])
def test_a_job_of_one(name: str, ranks: Any, place: Place) -> None:
    (told,) = ranks(1, MPIRUN).run(training.trained_with_and_without, name, place)
    training.check(name, 1, "memory", told)
