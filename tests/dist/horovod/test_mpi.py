"""The adapter gives the same results over MPI as over Gloo: scenarios of the other modules, on one
pool. And the Groups over MPI."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.dist.horovod import test_barrier as barrier
from tests.dist.horovod import test_several as several
from tests.dist.horovod import test_training as training
from tests.dist.horovod.test_groups import OnThree
from tests.support import exact
from tests.support.rank_pool import MPIRUN, RankPool
from tests.support.training import Attached, Job, Net, Place, attach, rank, through_a_crash
from tierckpt.testing import Program


@pytest.fixture
def pool(ranks: Any) -> RankPool:
    found: RankPool = ranks(3, MPIRUN)
    return found


@pytest.mark.parametrize("name", ["default", "lists of groups"])
def test_every_iteration_is_bit_for_bit_as_without(
    name: str, pool: RankPool, losable: Place
) -> None:
    """In memory, and from disk."""
    local = name != "default"
    for told in pool.run(training.trained_with_and_without, name, losable, local=local):
        training.check(name, 3, "local" if local else "memory", told)


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("groups", "before_the_step_of_rank_0"),
        ("sparse and dense", "in_the_backward_of_rank_0"),
    ],
)
def test_an_iteration_cut_short(name: str, cut: str, pool: RankPool, place: Place) -> None:
    barrier.check_trained(pool.run(barrier.trained_after, cut, name, place))


def test_two_process_sets_side_by_side(pool: RankPool, tmp_path: Path, shm_dir: Path) -> None:
    told = pool.run(several.side_by_side, str(tmp_path), str(shm_dir))
    several.check_side_by_side(told, tmp_path)


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


# --- Groups --------------------------------------------------------------------------------------


def on_communicator(members: list[int], program: Program) -> Any:
    mpi = importlib.import_module("tierckpt.mpi")
    world = mpi.MPI.COMM_WORLD
    part = world.Split(int(world.rank in members))
    if world.rank not in members:
        return None
    group = mpi.MPIGroup(part)
    outcome = program(group)
    group.close()
    return outcome


class TestMPIGroup(OnThree):
    __test__ = True
    kind = MPIRUN

    def scenario(self, members: list[int]) -> tuple[Any, ...]:
        return (on_communicator, members)


def refused_without_threads() -> str:
    mpi = importlib.import_module("tierckpt.mpi")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi.MPI, "Query_thread", lambda: mpi.MPI.THREAD_SERIALIZED)
        with pytest.raises(Exception, match="MPI_THREAD_MULTIPLE") as caught:
            mpi.MPIGroup()
    return caught.type.__name__


def test_an_mpi_that_knows_no_threads_is_refused(pool: RankPool) -> None:
    assert pool.run(refused_without_threads) == ["ConfigError"] * 3


def of_two_ranks_of_three() -> str | int:
    """Rank 1 is in no communicator, and this object is false."""
    mpi = importlib.import_module("tierckpt.mpi")
    world = mpi.MPI.COMM_WORLD
    part = world.Split(mpi.MPI.UNDEFINED if world.rank == 1 else 0)
    if world.rank == 1:
        with pytest.raises(tierckpt.ConfigError) as caught:
            mpi.MPIGroup(part)
        return str(caught.value)
    group = mpi.MPIGroup(part)
    group.close()
    return int(group.size)


def test_a_rank_in_no_communicator_is_refused(pool: RankPool) -> None:
    """Otherwise it would count as a rank of all ranks, and wait for the others."""
    one, refused, other = pool.run(of_two_ranks_of_three)
    assert (one, other) == (2, 2)
    assert "MPI.COMM_NULL" in refused


class TestHorovodGroupOverMPI(OnThree):
    """The end that a rank does not reach is tried over Gloo: the ranks could not be used again."""

    __test__ = True
    kind = MPIRUN
    sizes = (2,)
    test_a_rank_alone_at_the_end_is_reported = None
