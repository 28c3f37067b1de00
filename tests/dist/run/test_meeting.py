"""Shims without a launcher's store: on one machine they meet at a socket with the launch's name."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.warm_python.servers import PYTHON, THROUGHOUT
from tierckpt.testing import free_ports

SCRIPT = """
import os, sys
import torch.distributed as dist
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", sys.argv[1]
rank, attempt = int(os.environ["SLURM_PROCID"]), os.environ["TIERCKPT_ATTEMPT"]
dist.init_process_group("gloo", rank=rank, world_size=2)
dist.barrier()
print("ready", attempt, os.getpid(), os.getppid(), flush=True)
sys.stdin.readline()
dist.barrier()
print("done", flush=True)
os._exit(0)
"""


class Step:
    """The two tasks of a Slurm step, without Slurm."""

    def __init__(self, folder: Path, job: int, **more: str) -> None:
        (folder / "train.py").write_text(SCRIPT)
        self.tasks: list[subprocess.Popen[str]] = []
        port = str(free_ports(1)[0])
        for rank in range(2):
            env = {
                **os.environ,
                **THROUGHOUT,
                "XDG_CACHE_HOME": str(folder / "cache"),
                "WARM_PYTHON_RANK": str(rank),
                "SLURM_PROCID": str(rank),
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_JOB_ID": str(job),
                "SLURM_STEP_ID": "0",
                **more,
            }
            self.tasks.append(
                subprocess.Popen(
                    [PYTHON, "-m", "tierckpt.run", str(folder / "train.py"), port],
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def ready(self, rank: int) -> list[int]:
        """Attempt, process of the script, and of the shim."""
        stdout = self.tasks[rank].stdout
        assert stdout is not None
        word, *numbers = stdout.readline().split()
        assert word == "ready", self.tasks[rank].communicate()
        return [int(number) for number in numbers]


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Callable[..., Step]]:
    made: list[Step] = []

    def start(job: int, **more: str) -> Step:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Step(folder, job, **more))
        return made[-1]

    yield start
    for each in made:
        for task in each.tasks:
            task.kill()
            task.communicate()


def test_tasks_of_a_step_restart_together(step: Callable[..., Step]) -> None:
    """Two steps at the same time do not meet."""
    one, other = step(11), step(12)
    before = [[each.ready(rank) for rank in range(2)] for each in (one, other)]
    assert [attempt for each in before for attempt, _, _ in each] == [1, 1, 1, 1]
    os.kill(before[0][1][1], signal.SIGKILL)
    after = [one.ready(rank) for rank in range(2)]
    assert [attempt for attempt, _, _ in after] == [2, 2]
    assert [shim for *_, shim in after] == [shim for *_, shim in before[0]]
    for each in (one, other):
        for task in each.tasks:
            assert task.stdin is not None
            print(file=task.stdin, flush=True)
        for task in each.tasks:
            assert task.stdout is not None
            assert task.stdout.readline() == "done\n"
            assert task.wait(60) == 0


def test_a_lost_shim_leaves_the_job_to_the_launcher(step: Callable[..., Step]) -> None:
    job = step(13)
    job.ready(0)
    _, _, shim = job.ready(1)
    os.kill(shim, signal.SIGKILL)
    out, err = job.tasks[0].communicate("\n", timeout=60)
    assert job.tasks[0].returncode != 0
    assert "the shim of rank 1 has ended. The launcher takes over" in err
    assert "attempt 2" not in err
    assert "done" not in out
