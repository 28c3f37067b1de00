"""The scripts of examples/restarts, run for real.

Slurm's are in test_slurm.py, except for a decision that needs many restarts; the demo runs the one
for elastic Horovod (test_demo.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.metadata_server import Aws, serving
from tests.support.rank_pool import MPIRUN
from tests.support.restart_job import (
    EXAMPLES,
    STEPS,
    Curve,
    RestartJob,
    kill,
    state_of,
    undisturbed_curves,
)
from tests.support.thorough import on_demand
from tests.support.warm_python.servers import PYTHON
from tierckpt.storage.persistent import PersistentStore
from tierckpt.testing import free_ports

RANKS = 2
HALF = STEPS // 2
HALTED = 75


@pytest.fixture(scope="module")
def undisturbed() -> list[Curve]:
    return undisturbed_curves(RANKS)


@pytest.fixture
def job(undisturbed: list[Curve], tmp_path: Path, shm_dir: Path) -> Iterator[RestartJob]:
    made = RestartJob(tmp_path, shm_dir)
    yield made
    made.end()


def continued(job: RestartJob, undisturbed: list[Curve], levels: dict[str, int]) -> None:
    """Check that there was one restart, from these levels, without a trace in the curves."""
    _, second = job.starts()
    assert second["start"] > 0
    assert second["levels"] == levels
    assert [job.curve(rank) for rank in range(RANKS)] == undisturbed


def test_torchrun_starts_the_processes_of_a_node_again(
    job: RestartJob, undisturbed: list[Curve]
) -> None:
    torchrun = job.start("./torchrun_cold.sh", *job.options, TIERCKPT_PATH=str(job.disks))
    job.wait_for(lambda: job.step() >= HALF, "half of the training")
    kill(job.trainers()[-1])
    job.over(torchrun, RANKS)
    continued(job, undisturbed, {"memory": RANKS})


def test_mpirun_in_a_loop(
    job: RestartJob, undisturbed: list[Curve], launchable: Callable[[str], None]
) -> None:
    launchable(MPIRUN)
    mpirun = job.start(
        "./mpirun_again.sh",
        *job.options,
        TIERCKPT_PATH=str(job.disks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_ports(1)[0]),
        MPIRUN_OPTIONS="--allow-run-as-root --oversubscribe --bind-to none",
    )
    job.wait_for(lambda: job.step() >= HALF, "half of the training")
    kill(job.trainers()[-1])
    job.over(mpirun, RANKS)
    assert mpirun.returncode == 0
    continued(job, undisturbed, {"memory": RANKS})


def test_migration(job: RestartJob, undisturbed: list[Curve], tmp_path: Path) -> None:
    """The first machine is gone with all it had but its persistent level."""
    there, here = tmp_path / "there", tmp_path / "here"
    first = job.start(
        "./torchrun_cold.sh",
        *job.options,
        TIERCKPT_NODE="old",
        TIERCKPT_PATH=str(job.disks / "old"),
        TIERCKPT_PERSISTENT_PATH=str(there),
        TIERCKPT_PERSISTENT_EVERY_STEPS="8",
        TIERCKPT_PERSISTENT_EVERY_SECONDS="0",
    )
    job.wait_for(lambda: job.step() >= HALF and job.kept(1, "persistent"), "a flush")
    kill(first.pid)
    first.wait()
    job.wipe("old")
    assert PersistentStore(str(there)).versions()
    second = job.start(
        "./migrate.sh",
        str(there),
        str(here),
        *job.options,
        TIERCKPT_NODE="new",
        TIERCKPT_PATH=str(job.disks / "new"),
    )
    job.over(second, RANKS)
    continued(job, undisturbed, {"persistent": RANKS})


def test_suspending(job: RestartJob, undisturbed: list[Curve]) -> None:
    # The script looks for processes that torchrun started: they must be its children.
    own = {"TIERCKPT_PATH": str(job.disks), "WARM_PYTHON_SERVERS": ""}
    torchrun = job.start("./torchrun_cold.sh", *job.options, **own)
    job.wait_for(lambda: job.step() >= HALF, "half of the training")
    job.start("./suspend.sh", "STOP", str(torchrun.pid)).wait()
    stopped = job.trainers()
    assert len(stopped) == RANKS
    # The signal is on its way when the script ends.
    job.wait_for(lambda: all(state_of(pid) == "T" for pid in stopped), "all to stand still")
    assert job.step() < STEPS - 1
    job.start("./suspend.sh", "CONT", str(torchrun.pid)).wait()
    job.over(torchrun, RANKS)
    assert len(job.starts()) == 1
    assert [job.curve(rank) for rank in range(RANKS)] == undisturbed


def listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@on_demand("40 s; a lost node and a job that shrinks are in tests/crash/examples/test_spares.py")
def test_torchrun_shrinks_and_grows(job: RestartJob) -> None:
    """Three nodes, two, and three again; the others provide the shards of the lost one."""
    port = free_ports(1)[0]
    meeting = f"127.0.0.1:{port}"

    def start(node: str) -> int:
        more = {"TIERCKPT_NODE": node, "LAST_CALL_SECONDS": "1"}
        path = str(job.disks / "{node}")
        command = ["./torchrun_elastic.sh", meeting, *job.options, "--steps", "100000"]
        return job.start(*command, TIERCKPT_PATH=path, **more).pid

    def begins(ranks: int, protected: bool = True) -> None:
        job.wait_for(
            lambda: (
                job.newest_life(0)[0].get("ranks") == ranks
                and job.step() > 4
                and (not protected or job.kept(ranks, "peer"))
            ),
            f"a run of {ranks} ranks that is protected",
        )

    start("node0")
    # All are on this machine, so the first one keeps the rendezvous: it must not be lost.
    job.wait_for(lambda: listening(port), "node 0's meeting place")
    start("node1")
    start("node2")
    begins(3)
    job.wipe("node2")
    begins(2)
    start("spare")
    begins(3)
    lives = job.starts()
    assert [x["ranks"] for x in lives] == [3, 2, 3]
    assert lives[1]["levels"]["peer"] == 1
    job.lost_nothing()


# --- spot machines -------------------------------------------------------------------------------


def start_on_spot_machines(
    job: RestartJob, endpoint: str, step_seconds: float
) -> list[subprocess.Popen[bytes]]:
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


def test_a_job_on_spot_machines_ends_in_time_and_resumes(
    job: RestartJob, undisturbed: list[Curve], shm_dir: Path
) -> None:
    """The service is bad until the job has made steps, and is asked every 5 s. The next run has
    other machines with the old disks, but not their memory."""
    cloud, ends = Aws(), list[float]()

    def reply(*request: Any) -> tuple[int, str]:
        if not ends:
            if job.step() < 2:
                return 503, ""
            ends.append(cloud.announce(110))
        return cloud(*request)

    with serving(reply) as server:
        ranks = start_on_spot_machines(job, server.endpoint, step_seconds=0.3)
        for rank in ranks:
            rank.wait(120)
        assert time.time() < ends[0]
        # The latter is gloo's, now and then, after all work.
        assert {rank.returncode for rank in ranks} <= {HALTED, -signal.SIGABRT}
        assert [job.newest_life(rank)[-1] for rank in range(RANKS)] == [{"done": False}] * RANKS
        log = (job.folder / "log").read_text()
        assert "the cloud takes this node away (action terminate) at" in log
        assert "the job ends early: the cloud takes a node away" in log
        (last,) = {job.step(rank) for rank in range(RANKS)}
        assert 0 < last < STEPS - 1
        assert job.kept(RANKS, "local")

        for folder in shm_dir.iterdir():
            shutil.rmtree(folder)
        server.reply = Aws()
        for rank in start_on_spot_machines(job, server.endpoint, step_seconds=0.0):
            job.over(rank, RANKS)
    first, second = job.starts()
    assert (first["start"], second["start"]) == (0, last + 1)
    assert second["levels"] == {"local": RANKS}
    assert [job.curve(rank) for rank in range(RANKS)] == undisturbed


# --- whether Slurm is asked to start it again ----------------------------------------------------


@pytest.mark.parametrize(
    ("status", "restarts", "again"),
    [(75, 0, True), (75, 10, True), (75, 300, True), (1, 9, True), (1, 10, False), (0, 0, False)],
)
def test_a_halted_job_is_always_requeued_and_a_failed_one_ten_times(
    status: int, restarts: int, again: bool, tmp_path: Path
) -> None:
    """With replacements of Slurm's programs, which record their arguments."""
    for name, answer in (("srun", status), ("scontrol", 0), ("squeue", 0)):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/asked\nexit {answer}\n')
        program.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURM_RESTART_COUNT": str(restarts)}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    script = ["bash", str(EXAMPLES / "slurm_requeue.sbatch"), "--steps", "5"]
    done = subprocess.run(script, env={**os.environ, **slurm, "PATH": path}, capture_output=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert any(line.startswith("srun ") and line.endswith(" --steps 5") for line in asked)
    assert ("scontrol requeue 7" in asked) is again
    assert done.returncode == (1 if status else 0)
