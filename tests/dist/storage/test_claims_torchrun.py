"""Real torchruns at one shared path: two launches with one name, and one that lost a node."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.thorough import on_demand
from tierckpt.storage import CLAIM_PREFIX
from tierckpt.testing import free_ports

pytestmark = on_demand("torchruns take half a minute; what they prove is tested with made-up ones")

PATIENCE_SECONDS = 120.0
RANK = """
import os, sys, time, torch, torch.distributed as dist, ddp_ckpt
from tierckpt.storage import claims
from tierckpt.storage.job_directory import JobBusyError
claims.HERE_SECONDS = 1.0
dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
try:
    ckpt = ddp_ckpt.Checkpointer(net, opt, path=sys.argv[1], agent="inline", local_every_steps=1)
except JobBusyError as error:
    print("REFUSED", error, flush=True)
    os._exit(0)
print("PID", os.getpid(), dist.get_world_size(), flush=True)
with ckpt:
    for step in range(ckpt.restore(), 1000):
        opt.zero_grad(); net(torch.ones(2, 8)).sum().backward(); opt.step(); ckpt.step()
        print("STEP", step, flush=True); time.sleep(0.2)
"""


class Torchrun:
    """One agent, for one rank, on a node of its own."""

    def __init__(self, folder: Path, shm_dir: Path, name: str, port: int, *options: str) -> None:
        self._log = folder / f"{name}.log"
        (shm_dir / name).mkdir()
        own = {"TIERCKPT_NODE": name, "TIERCKPT_SHM_DIR": str(shm_dir / name)}
        own["OMP_NUM_THREADS"] = "1"
        (folder / "rank.py").write_text(RANK)
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-id=same"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        command += [*options, "--nproc-per-node=1", str(folder / "rank.py"), str(folder / "ckpts")]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **own}, stdout=log, stderr=log
            )

    def said(self, word: str) -> list[str]:
        lines = self._log.read_text().splitlines()
        return [line.partition(f"{word} ")[2] for line in lines if line.startswith(f"{word} ")]

    def pid(self) -> int:
        return int(self.said("PID")[-1].split()[0])

    def kill(self) -> None:
        self.process.kill()
        for line in self.said("PID"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def torchrun(tmp_path: Path, shm_dir: Path) -> Iterator[Callable[..., Torchrun]]:
    made: list[Torchrun] = []

    def start(name: str, port: int, *options: str) -> Torchrun:
        made.append(Torchrun(tmp_path, shm_dir, name, port, *options))
        return made[-1]

    yield start
    for each in made:
        each.kill()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_torchruns_of_one_name_are_two_jobs(
    torchrun: Callable[..., Torchrun], tmp_path: Path
) -> None:
    ports = free_ports(2)
    first = torchrun("a", ports[0], "--nnodes=1")
    until(lambda: first.said("STEP"))
    second = torchrun("b", ports[1], "--nnodes=1")
    until(lambda: second.said("REFUSED"))
    (why,) = second.said("REFUSED")
    assert f"another job uses {tmp_path / 'ckpts'} (process {first.pid()} on" in why
    assert "started by torchrun same" in why
    steps = len(first.said("STEP"))
    until(lambda: len(first.said("STEP")) > steps)


def test_a_node_that_hangs_keeps_the_next_round_of_its_agents_not_out(
    torchrun: Callable[..., Torchrun], tmp_path: Path
) -> None:
    """The hanging rank has its lock; the agent of the other one has started the next round."""
    conf = "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=3,is_host="
    options = ("--nnodes=1:2", "--max-restarts=3")
    port = free_ports(1)[0]
    first, second = (torchrun(n, port, f"{conf}{n == 'a'}", *options) for n in "ab")
    until(lambda: first.said("STEP") and second.said("PID"))
    hung = [second.pid(), second.process.pid]
    for pid in hung:
        os.kill(pid, signal.SIGSTOP)
    os.kill(first.pid(), signal.SIGKILL)
    until(lambda: len(first.said("PID")) == 2)
    steps = len(first.said("STEP"))
    until(lambda: len(first.said("STEP")) > steps)
    marks = [
        path.name for path in (tmp_path / "ckpts").iterdir() if path.name.startswith(CLAIM_PREFIX)
    ]
    assert len({name.split(".")[2] for name in marks}) == 2, "the one that hangs has its own"
