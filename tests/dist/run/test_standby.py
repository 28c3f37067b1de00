"""Spares of `tierckpt run`: they take the ranks of a lost node."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.restart_job import RestartJob, undisturbed_curves
from tests.support.warm_python.servers import PYTHON
from tierckpt.testing import free_ports

LATE_STEP = 20
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def job(tmp_path: Path, shm_dir: Path) -> Iterator[RestartJob]:
    made = RestartJob(tmp_path, shm_dir)
    yield made
    made.end()


@pytest.fixture
def start(job: RestartJob, tmp_path: Path) -> Start:
    """Start the shim of a rank, or else a spare, on a node; all of them meet at one port."""
    meeting, store = map(str, free_ports(2))

    def started(
        node: str,
        rank: int | None = None,
        ranks: int = 2,
        script: str = "train.py",
        cache: str = "cache",
    ) -> subprocess.Popen[bytes]:
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks)} if rank is not None else {}
        command = [PYTHON, "-m", "tierckpt.run", "--rendezvous", f"127.0.0.1:{meeting}"]
        return job.start(
            *(*command, *(["--standby"] if rank is None else []), script, *job.options),
            **{
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": store,
                "TIERCKPT_NODE": node,
                "TIERCKPT_PATH": str(job.disks / node),
                "TIERCKPT_PEER_REDUNDANCY": "xor",
                "XDG_CACHE_HOME": str(tmp_path / cache),
                "WARM_PYTHON_RANK": str(rank or 0),
                **place,
            },
        )

    return started


def log(job: RestartJob) -> str:
    return (job.folder / "log").read_text()


def wait_for_spares(job: RestartJob, count: int) -> None:
    job.wait_for(lambda: log(job).count("this spare waits") == count, "the spares")


def wait_until_protected(job: RestartJob, *nodes: tuple[int, ...]) -> None:
    """One rank of each node reports the version; `nodes` has the ranks of each."""

    def protected(rank: int) -> bool:
        return any(
            (line.get("event"), line.get("level")) == ("committed", "peer")
            for line in job.newest_life(rank)
        )

    job.wait_for(
        lambda: job.step() >= LATE_STEP and all(any(map(protected, ranks)) for ranks in nodes),
        "a protected version",
    )


def test_a_spare_takes_the_rank_of_a_lost_node(job: RestartJob, start: Start) -> None:
    """Its processes, memory and disk are lost. The losses are those of an undisturbed run, and a
    spare not needed ends with the job."""
    first, _ = start("a", 0), start("b", 1)
    spare = start("c")
    wait_for_spares(job, 1)
    other = start("d")
    wait_for_spares(job, 2)
    wait_until_protected(job, (0,), (1,))
    job.wipe("b")
    job.over(first, 2)
    assert (first.returncode, spare.wait(60), other.wait(60)) == (0, 0, 0)
    assert "node b is lost; spare c takes rank 1; attempt 2 of 4 starts" in log(job)
    first_start, second_start = job.starts(1)
    assert second_start["start"] > first_start["start"] == 0
    assert second_start["levels"]["peer"] == 1
    assert [job.curve(rank) for rank in range(2)] == undisturbed_curves(2)
    job.lost_nothing()


def test_all_ranks_of_a_node_are_replaced_together(job: RestartJob, start: Start) -> None:
    """One shim is killed, though its node lives: the other one there ends its script and itself."""
    first, _, killed, dismissed = (start(node, rank, 4) for rank, node in enumerate("aabb"))
    spares = [start("c"), start("c")]
    wait_for_spares(job, 2)
    wait_until_protected(job, (0, 1), (2, 3))
    killed.kill()
    assert dismissed.wait(60) == 1
    job.over(first, 4)
    assert [each.wait(60) for each in (first, *spares)] == [0, 0, 0]
    assert "node b is lost; spare c takes ranks 2, 3; attempt 2 of 4 starts" in log(job)
    assert "a spare has taken rank 3" in log(job)
    job.lost_nothing()


def test_a_spare_of_another_program_or_user_is_refused(job: RestartJob, start: Start) -> None:
    """The other user has another key. One that waits ends by a signal."""
    start("a", 0), start("b", 1)
    waiting = start("e")
    wait_for_spares(job, 1)
    spare, stranger = start("c", script="other.py"), start("d", cache="theirs")
    assert spare.wait(60) == 2
    assert "runs another program: this spare ends" in log(job)
    assert stranger.wait(60) == 1
    assert "a process at 127.0.0.1 was refused: it does not know the key of this job" in log(job)
    assert "rank 0's shim refuses this process" in log(job)
    waiting.terminate()
    assert waiting.wait(60) == -signal.SIGTERM
