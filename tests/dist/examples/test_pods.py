"""Pods of Kubernetes: process 1, a grace period, a read-only root, volumes that stay or go."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pod import Pod, require_pods
from tests.support.restart_job import EXAMPLES, PATIENCE_SECONDS, STEPS, RestartJob, state_of
from tests.support.thorough import on_demand
from tierckpt.testing import free_ports

HALTED = 75


@pytest.fixture(autouse=True)
def _pods() -> None:
    require_pods()


@pytest.mark.parametrize(
    ("status", "expected"), [(signal.SIGKILL, 137), (signal.SIGTERM, 143), (3 << 8, 3)]
)
def test_the_shim_ends_as_its_script_also_as_process_1(status: int, expected: int) -> None:
    """No signal ends process 1 by its default effect: without care the pod would never end."""
    code = f"from tierckpt.run.process import end_like; end_like({int(status)})"
    command = ["unshare", "-fp", "--mount-proc", "--kill-child", sys.executable, "-c", code]
    assert subprocess.run(command, timeout=PATIENCE_SECONDS).returncode == expected


def test_a_signal_during_the_imports_ends_process_1() -> None:
    """A pod deleted in its first seconds must not use up its grace period."""
    code = (
        "import os, signal; from tierckpt.run.process import ends_by_sigterm\n"
        "with ends_by_sigterm(): os.kill(1, signal.SIGTERM); os.sched_yield()"
    )
    command = ["unshare", "-fp", "--mount-proc", "--kill-child", sys.executable, "-c", code]
    assert subprocess.run(command, timeout=PATIENCE_SECONDS).returncode == 143


@pytest.mark.parametrize("boundary", ["", "signals.passed_boundary(); kill(); sleep(6); "])
def test_a_signal_that_ends_a_script_ends_process_1(boundary: str) -> None:
    """One before the first boundary, and the same one again much later."""
    code = (
        "import os, signal; from time import sleep; import tierckpt.halt.signals as module; "
        "module.REPEATED_SECONDS = 0.1; sleep = lambda seconds: __import__('time').sleep(0.2); "
        "kill = lambda: os.kill(os.getpid(), signal.SIGTERM); "
        f"signals = module.Signals([signal.SIGTERM]); {boundary}kill()"
    )
    command = ["unshare", "-fp", "--mount-proc", "--kill-child", sys.executable, "-c", code]
    assert subprocess.run(command, timeout=PATIENCE_SECONDS).returncode == 143


@pytest.fixture
def job(tmp_path: Path, shm_dir: Path) -> RestartJob:
    return RestartJob(tmp_path, shm_dir)


@pytest.fixture
def pod(job: RestartJob, shm_dir: Path) -> Iterator[Pod]:
    made = Pod("training-node-0-0", shm_dir / "pod", job.folder)
    yield made
    made.end()


def start(job: RestartJob, pod: Pod, *, step_seconds: float) -> None:
    """Start a container with `tierckpt run` as process 1."""
    environment = job.environment(
        PYTHONDONTWRITEBYTECODE="1",
        TIERCKPT_SHM_DIR="/dev/shm",
        TIERCKPT_NODE="machine-7",  # as from spec.nodeName
        TIERCKPT_PATH=str(job.disks / "{node}"),
        TIERCKPT_LOCAL_EVERY_STEPS="1000",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_ports(1)[0]),
        RANK="0",
        WORLD_SIZE="1",
    )
    environment = {n: v for n, v in environment.items() if not n.startswith("WARM_PYTHON")}
    command = [sys.executable, "-m", "tierckpt.run", "train.py", *job.options]
    command += ["--step-seconds", str(step_seconds), "--halted-status", str(HALTED)]
    pod.start(command, environment, EXAMPLES, job.folder / "log")


@on_demand("half a minute: each of its three containers imports torch")
def test_containers_and_pods_are_replaced(job: RestartJob, pod: Pod, shm_dir: Path) -> None:
    """The first container is killed, the second ended in its grace period; then the whole pod is
    another one, with another name, on the same node's disk."""
    start(job, pod, step_seconds=0.05)
    job.wait_for(lambda: job.step() >= 5, "the first steps")
    everything = pod.processes()
    assert len(everything) >= 3, "the shim, its witness, the script"
    pod.signal(signal.SIGKILL)
    assert pod.wait(PATIENCE_SECONDS) != 0
    job.wait_for(lambda: not any(map(state_of, everything)), "the end of all of its processes")

    start(job, pod, step_seconds=0.05)
    job.wait_for(lambda: len(job.starts()) == 2 and job.step() > 10, "the second container")
    pod.signal(signal.SIGTERM)
    assert pod.wait(PATIENCE_SECONDS) == HALTED
    last = job.step()
    assert last < STEPS - 1, "it was ended half-way"
    assert job.kept(1, "local")

    assert [path.name for path in job.disks.iterdir()] == ["machine-7"]
    other = Pod("training-x7b2q", shm_dir / "other", job.folder)
    try:
        start(job, other, step_seconds=0)
        assert other.wait(PATIENCE_SECONDS) == 0
    finally:
        other.end()
    first, second, third = job.starts()
    assert first["start"] == 0
    assert (second["start"] > 5, second["levels"]) == (True, {"memory": 1})
    assert (third["start"], third["levels"]) == (last + 1, {"local": 1})
    assert job.newest_life(0)[-1] == {"done": True}
    assert len(job.curve(0)) == STEPS
    job.lost_nothing()
    assert "Read-only" not in (log := (job.folder / "log").read_text()), log
    assert not list(shm_dir.glob("*/*/*")), "the job ended well"
