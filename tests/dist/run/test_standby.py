"""Spares of `tierckpt run`: one takes the rank of a lost node."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.restart_job import STEPS, RestartJob, undisturbed_curves
from tests.support.slurm_cluster import free_ports
from tests.support.warm_python.servers import PYTHON

LATE_STEP = 20
ORDINARY, SPARE = (), ("--standby",)


@pytest.fixture
def job(tmp_path: Path, shm_dir: Path) -> Iterator[RestartJob]:
    made = RestartJob(tmp_path, shm_dir)
    yield made
    made.end()


@pytest.fixture
def start(job: RestartJob, tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Start the shim of a rank, or a spare, on a node; all of them meet at one port."""
    meeting, store = map(str, free_ports(2))

    def started(
        node: str, *options: str, rank: int | None = None, script: str = "train.py"
    ) -> subprocess.Popen[bytes]:
        place = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": "2"}
        return job.start(
            *(PYTHON, "-m", "tierckpt.run", "--rendezvous", f"127.0.0.1:{meeting}"),
            *options,
            *(script, *job.options),
            **{
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": store,
                "TIERCKPT_NODE": node,
                "TIERCKPT_PATH": str(job.disks / node),
                "TIERCKPT_PEER_REDUNDANCY": "xor",
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
                "WARM_PYTHON_RANK": str(rank or 0),
                **place,
            },
        )

    return started


def lose(job: RestartJob, node: str) -> None:
    """Wait until the nodes have protected a version, and lose the node with all its processes."""
    job.wait_for(lambda: job.step() >= LATE_STEP and job.kept(2, "peer"), "a protected version")
    job.wipe(node)


def test_a_spare_takes_the_rank_of_a_lost_node(
    job: RestartJob, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """It does so again when the next node is lost; the curves of the losses are exact. A spare that
    is not needed ends with the job."""
    first, _ = start("a", rank=0), start("b", rank=1)
    spare, second, third = (start(name, "--standby") for name in ("c", "d", "e"))
    lose(job, "b")
    job.wait_for(lambda: len(job.starts(1)) == 2, "the spare's start")
    job.over(first, 2)
    statuses = [each.wait(60) for each in (spare, second, third)]
    assert statuses == [0, 0, 0]
    log = (job.folder / "log").read_text()
    assert "node b is lost; spare c takes rank 1; attempt 2 of 4 starts" in log
    assert [job.curve(rank) for rank in range(2)] == undisturbed_curves(2)
    job.lost_nothing()
