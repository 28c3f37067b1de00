"""A node with a network of its own is lost with its disk: the copy of its journal leads on.

Real network namespaces on a bridge. Making them takes root; without it, the tests are skipped.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.net_nodes import network_fixture
from tests.support.restart_job import RestartJob, undisturbed_curves
from tests.support.warm_python.servers import PYTHON
from tierckpt.journal import FOLDER, MAX_WAITING, names_in
from tierckpt.testing import Network

LATE_STEP = 20
MEETING, STORE = 29512, 29513
"""Ports; each network has its own."""


network = network_fixture(3)


@pytest.fixture
def job(network: Network, tmp_path: Path, shm_dir: Path) -> Iterator[RestartJob]:
    made = RestartJob(tmp_path, shm_dir)
    yield made
    made.end()


def start(
    job: RestartJob, network: Network, node: int, rank: int | None
) -> subprocess.Popen[bytes]:
    """Start the shim of a rank, or else a spare, on a node."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2"} if rank is not None else {}
    meeting = network.address(0)
    shim = [PYTHON, "-m", "tierckpt.run", "--rendezvous", f"{meeting}:{MEETING}"]
    shim += ["--standby"] if rank is None else []
    settings = {
        "GLOO_SOCKET_IFNAME": "net0",
        "TIERCKPT_PEER_INTERFACE": "net0",
        "TIERCKPT_PEER_REDUNDANCY": "partner",
        "TIERCKPT_NODE": f"node{node}",
        "TIERCKPT_PATH": str(job.disks / f"node{node}"),
        "TIERCKPT_MEMORY_EVERY_STEPS": "0",
        "TIERCKPT_LOCAL_EVERY_STEPS": "0",
        "TIERCKPT_LOCAL_JOURNAL_STEPS": "1000",
        "TIERCKPT_WHEN_BUSY": "wait",
    }
    return job.start(
        *(*network.inside(node), *shim, "train.py", *job.options),
        **{
            "MASTER_ADDR": meeting,
            "MASTER_PORT": str(STORE),
            "XDG_CACHE_HOME": str(job.folder / "cache"),
            **settings,
            **place,
        },
    )


def test_a_spare_continues_from_the_copy(job: RestartJob, network: Network) -> None:
    """The processes, the memory and the disk of a node are lost."""
    first, _ = start(job, network, 0, 0), start(job, network, 1, 1)
    start(job, network, 2, None)
    log = job.folder / "log"
    job.wait_for(lambda: "this spare waits" in log.read_text(), "the spare")
    job.wait_for(lambda: job.step() >= LATE_STEP, "a late step")
    job.wait_for(lambda: job.kept(1, "peer"), "a protected version")
    job.wipe("node1")
    reached = job.step()
    job.over(first, 2)
    for rank in range(2):
        assert job.starts(rank)[1]["start"] >= reached - MAX_WAITING
    assert [job.curve(rank) for rank in range(2)] == undisturbed_curves(2)
    job.lost_nothing()
    assert [names_in(job.disks / f"node{node}" / FOLDER) for node in (0, 2)] == [[], []]
