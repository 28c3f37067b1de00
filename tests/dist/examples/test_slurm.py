"""The scripts of examples/restarts for Slurm, under a real one with several nodes here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.restart_job import (
    EXAMPLES,
    STEPS,
    Curve,
    RestartJob,
    state_of,
    undisturbed_curves,
)
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_here import slurm_missing
from tests.support.thorough import on_demand

pytestmark = pytest.mark.skipif(bool(slurm_missing()), reason=slurm_missing())

RANKS = 2
HALF = STEPS // 2


@pytest.fixture(scope="module")
def undisturbed() -> list[Curve]:
    return undisturbed_curves(RANKS)


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=3) as made:
        yield made


@pytest.fixture
def job(
    undisturbed: list[Curve], cluster: SlurmCluster, tmp_path: Path, shm_dir: Path
) -> RestartJob:
    return RestartJob(tmp_path, shm_dir, cluster.folder)


def submit(cluster: SlurmCluster, job: RestartJob, script: str, *options: str) -> int:
    """Submit the script in examples/restarts, as in its README."""
    log = f"--output={job.folder}/slurm-%j.out"
    command = [log, *options, script, *job.options]
    return cluster.submit(command, job.environment(), EXAMPLES)


def ended_well(cluster: SlurmCluster, job: RestartJob, number: int) -> None:
    living = ("PENDING", "RUNNING", "COMPLETING", "NODE_FAIL", "REQUEUED")
    job.wait_for(lambda: cluster.job(number)["JobState"] not in living, "the end of the job")
    if cluster.job(number)["JobState"] != "COMPLETED":
        job.give_up(str(cluster.job(number)))


def output_of(job: RestartJob, number: int) -> str:
    """Output of the script and the ranks of a job, in all runs."""
    return (job.folder / f"slurm-{number}.out").read_text()


def lose_the_second_node(cluster: SlurmCluster, job: RestartJob, number: int) -> tuple[str, str]:
    """Lose a node in the middle of a protected job; returns the nodes of the job."""
    job.wait_for(lambda: job.step() >= HALF and job.kept(RANKS, "peer"), "protection")
    first, second = cluster.nodes_of(number)[:RANKS]
    cluster.lose(second)
    job.wipe(second)
    return first, second


def test_a_job_that_lost_a_node_is_requeued_and_continues_with_another(
    cluster: SlurmCluster, job: RestartJob, undisturbed: list[Curve]
) -> None:
    number = submit(cluster, job, "slurm_requeue.sbatch", f"--nodes={RANKS}")
    first, second = lose_the_second_node(cluster, job, number)
    job.wait_for(lambda: len(job.starts(1)) == 2, "the second run")
    now = cluster.nodes_of(number)
    assert first in now
    assert second not in now
    ended_well(cluster, job, number)
    assert cluster.job(number)["Restarts"] == "1"
    again = job.starts()[1]
    assert again["start"] > 0
    assert again["levels"].pop("peer") == 1, "the lost node's shard"
    assert again["levels"] in ({"memory": 1}, {"local": 1}), "what the other node had"
    assert [job.curve(rank) for rank in range(RANKS)] == undisturbed


def test_an_allocation_with_a_spare_node_is_not_given_up_nor_one_without(
    cluster: SlurmCluster, job: RestartJob, undisturbed: list[Curve]
) -> None:
    """The spare node takes over from a lost one; when it is lost itself, fewer ranks continue."""
    job.options += ["--step-seconds", "0.15"]
    number = submit(cluster, job, "slurm_spare.sbatch", f"--nodes={RANKS + 1}")
    job.wait_for(job.starts, "the job")
    first, second, spare = cluster.nodes_of(number)
    assert lose_the_second_node(cluster, job, number) == (first, second)
    job.wait_for(lambda: len(job.starts(1)) == 2, "the second run")
    job.wait_for(lambda: job.step() > HALF and job.kept(RANKS, "peer"), "protection once more")
    cluster.lose(spare)
    job.wipe(spare)
    ended_well(cluster, job, number)
    assert cluster.job(number)["Restarts"] == "0"
    _, again, alone = job.starts()
    assert (again["ranks"], alone["ranks"]) == (RANKS, 1)
    for life in (again, alone):
        assert life["start"] > 0
        assert life["levels"]["peer"] == 1, "the lost node's shard"
    for rank in range(RANKS):
        curve = curve_of_all(job, rank)
        assert len(curve) > HALF
        assert curve.items() <= undisturbed[rank].items()
    job.lost_nothing()
    assert job.newest_life(0)[-1] == {"done": True}


def curve_of_all(job: RestartJob, rank: int) -> Curve:
    """Exact loss by step in the runs with all ranks; fewer ranks read other data."""
    curve, ranks = {}, 0
    for line in job.lines(rank):
        ranks = line.get("ranks", ranks)
        if "step" in line and ranks == RANKS:
            curve[line["step"]] = line["loss"]
    return curve


def test_a_suspended_job_receives_the_signal_of_its_time_limit(
    cluster: SlurmCluster, job: RestartJob, undisturbed: list[Curve]
) -> None:
    number = submit(cluster, job, "slurm_requeue.sbatch", f"--nodes={RANKS}")
    job.wait_for(lambda: job.step() >= HALF // 2, "a quarter of the training")
    cluster.scontrol("suspend", str(number))
    job.wait_for(lambda: {state_of(pid) for pid in job.trainers()} == {"T"}, "the suspension")
    assert job.step() < HALF
    cluster.scontrol("resume", str(number))
    job.wait_for(lambda: job.step() >= HALF, "half of the training")
    assert len(job.starts()) == 1
    cluster.scancel("--signal=USR1", str(number))
    ended_well(cluster, job, number)
    assert cluster.job(number)["Restarts"] == "1"
    assert "ended with status 75\n" in output_of(job, number), "what is requeued however often"
    assert job.starts()[1]["start"] > HALF
    assert [x["step"] for x in job.lines(0) if "step" in x] == list(range(STEPS)), "nothing twice"
    assert [job.curve(rank) for rank in range(RANKS)] == undisturbed


@on_demand("a limit of Slurm's is a minute at least; the same end is tested with times made up")
def test_the_allocations_end_is_seen_before_slurm_sees_to_it(
    cluster: SlurmCluster,
    job: RestartJob,
    undisturbed: list[Curve],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIERCKPT_HALT_SECONDS_LEFT", "40")
    job.options += ["--step-seconds", "0.35"]
    limit = ["--time=1", "--signal=USR1@1"]  # which would be too late
    number = submit(cluster, job, "slurm_requeue.sbatch", f"--nodes={RANKS}", *limit)
    job.wait_for(lambda: len(job.starts()) == 2, "the second run")
    assert 0 < job.starts()[1]["start"] < STEPS
    ended_well(cluster, job, number)
    assert int(cluster.job(number)["Restarts"]) >= 1
    assert [x["step"] for x in job.lines(0) if "step" in x] == list(range(STEPS)), "nothing twice"
    assert [job.curve(rank) for rank in range(RANKS)] == undisturbed
