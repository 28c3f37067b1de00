"""A spot machine is taken away: the metadata service announces it, and the job ends in time."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.metadata_server import Aws, serving
from tests.support.restart_job import STEPS, Curve, RestartJob, undisturbed_curves
from tests.support.slurm_cluster import free_ports
from tests.support.warm_python.servers import PYTHON

RANKS = 2
HALTED = 75


@pytest.fixture(scope="module")
def undisturbed() -> list[Curve]:
    return undisturbed_curves(RANKS)


@pytest.fixture
def job(undisturbed: list[Curve], tmp_path: Path, shm_dir: Path) -> Iterator[RestartJob]:
    made = RestartJob(tmp_path, shm_dir)
    yield made
    made.end()


def start(job: RestartJob, endpoint: str, step_seconds: float) -> list[subprocess.Popen[bytes]]:
    """Start two nodes of one rank each; both ask the same service."""
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "WORLD_SIZE": str(RANKS),
        "TIERCKPT_PATH": str(job.disks / "{node}"),
        "TIERCKPT_LOCAL_EVERY_STEPS": "1000",
        "TIERCKPT_HALT_NOTICES": "aws",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint,
        "HTTP_PROXY": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }
    command = (PYTHON, "train.py", *job.options, "--step-seconds", str(step_seconds))
    command += ("--halted-status", str(HALTED))
    return [
        job.start(*command, **place, RANK=str(rank), TIERCKPT_NODE=f"node{rank}")
        for rank in range(RANKS)
    ]


def test_a_job_on_spot_machines_ends_in_time_and_goes_on(
    job: RestartJob, undisturbed: list[Curve], shm_dir: Path
) -> None:
    """The service is bad at first, and is asked every 5 s. The next run has other machines with the
    old disks, but not their memory."""
    with serving(lambda *request: (503, "")) as server:
        ranks = start(job, server.endpoint, step_seconds=0.15)
        job.wait_for(lambda: job.step() >= 2, "the first steps")
        server.reply = cloud = Aws()
        end = cloud.announce(60)
        for rank in ranks:
            rank.wait(60)
        assert time.time() < end
        assert [rank.returncode for rank in ranks] == [HALTED] * RANKS
        log = (job.folder / "log").read_text()
        assert "the cloud takes this node away (action terminate) at" in log
        assert "the job ends early: the cloud takes a node away" in log
        (last,) = {job.step(rank) for rank in range(RANKS)}
        assert 0 < last < STEPS - 1
        assert job.kept(RANKS, "local")

        for folder in shm_dir.iterdir():
            shutil.rmtree(folder)
        server.reply = Aws()
        for rank in start(job, server.endpoint, step_seconds=0.0):
            job.over(rank, RANKS)
    first, second = job.starts()
    assert (first["start"], second["start"]) == (0, last + 1)
    assert second["levels"] == {"local": RANKS}
    assert [job.curve(rank) for rank in range(RANKS)] == undisturbed
