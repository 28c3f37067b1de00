"""Attempts of a job with failing ranks, under each launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.rank_pool import HOROVODRUN, MPIRUN
from tests.support.warm_python.servers import PYTHON, THROUGHOUT
from tierckpt.run.shim import PARTS
from tierckpt.testing import free_ports

LOOP = """\
    start = int(ckpt.restore())
    print(f"attempt {{attempt}} rank {{rank}} starts at {{start}}", flush=True)
    for step in range(start, 12):
        optimizer.zero_grad()
        model(torch.rand(2, 4)).sum().backward()
        {failure}
        optimizer.step()
        ckpt.step()
"""
DDP = (
    """
import os, sys, time
import torch, torch.distributed as dist
sys.path.insert(0, {root!r})
attempt = int(os.environ["TIERCKPT_ATTEMPT"])
for theirs, ours in (("OMPI_COMM_WORLD_RANK", "RANK"), ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE")):
    os.environ.setdefault(ours, os.environ.get(theirs, "0"))
dist.init_process_group("gloo")
rank = dist.get_rank()
assert len(os.listdir(f"/proc/{{os.getppid()}}/task")) == 1, "the shim has a thread"
import ddp_ckpt
torch.manual_seed(9)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.Adam(model.parameters())
torch.manual_seed(rank)
with ddp_ckpt.Checkpointer(model, optimizer, path="ckpts", shm_dir=os.environ["SHM"]) as ckpt:
"""
    + LOOP
    + """    total = sum(p.sum() for p in model.parameters()).item().hex()
    print(f"rank {{rank}} ends at {{ckpt.iteration}} with {{total}}", flush=True)
dist.barrier()
"""
)
HOROVOD = (
    """
import os, sys
import torch, horovod.torch as hvd
sys.path.insert(0, {root!r})
import horovod_ckpt
attempt = int(os.environ["TIERCKPT_ATTEMPT"])
hvd.init()
rank = hvd.rank()
assert hvd.size() == 2
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
)
torch.manual_seed(rank)
with horovod_ckpt.install(optimizer, model, path="ckpts", shm_dir=os.environ["SHM"]) as ckpt:
"""
    + LOOP
    + """    print(f"rank {{rank}} ends at {{ckpt.iteration}}", flush=True)
hvd.barrier()
hvd.shutdown()
"""
)
KILL = "if step == 5 and rank == 1 and attempt == 1: os.kill(os.getpid(), 9)"
TWICE = "if step == 4 * attempt and rank == 2 - attempt: os.kill(os.getpid(), 9)"
RAISE = "if step == 5 and rank == 0 and attempt == 1: raise ValueError('no')"
EARLY = "if step == 0 and rank == 1: os._exit(7)"


class Done:
    """The output of a job."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    def lines(self, word: str) -> list[str]:
        found = [x.partition("rank ")[2] for x in self.out.splitlines() if word in x]
        return sorted(found)

    @property
    def said(self) -> list[str]:
        found = [x.partition("tierckpt run: ")[2] for x in (self.err + self.out).splitlines()]
        return [x for x in found if x]


@pytest.fixture
def job(tmp_path: Path, shm_dir: Path) -> Callable[..., Done]:
    def run(
        launcher: list[str],
        failure: str,
        *options: str,
        text: str = DDP,
        meanwhile: Callable[[subprocess.Popen[str]], str] | None = None,
        **more: str,
    ) -> Done:
        script = tmp_path / "train.py"
        script.write_text(text.format(root=os.getcwd(), failure=failure))
        env = {
            **os.environ,
            **THROUGHOUT,
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
            "SHM": str(shm_dir),
            "TIERCKPT_AGENT_LINGER_SECONDS": "0",
            **more,
        }
        command = [*launcher, *options, str(script)]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            started = meanwhile(process) if meanwhile is not None else ""
            out, err = process.communicate(timeout=90)
        finally:
            process.kill()
        return Done(process.returncode, started + out, err)

    return run


def torchrun(*options: str) -> list[str]:
    how = ["--nproc-per-node", "2", "--monitor-interval", "0.1", *options, "-m", "tierckpt.run"]
    return [PYTHON, "-m", "torch.distributed.run", *how]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The ends of both ranks without a failure."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "train.py").write_text(DDP.format(root=os.getcwd(), failure="pass"))
    (folder / "memory").mkdir()
    env = {**os.environ, **THROUGHOUT, "SHM": str(folder / "memory"), "TIERCKPT_ATTEMPT": "1"}
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "train.py"],
        cwd=folder,
        env={**env, "OMP_NUM_THREADS": "1", "TIERCKPT_AGENT_LINGER_SECONDS": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return Done(0, done.stdout, "").lines("ends at")


@pytest.mark.parametrize("how", ["agent store", "static"])
def test_torchrun(how: str, job: Callable[..., Done], undisturbed: list[str]) -> None:
    """Whether the ranks share the store of torchrun's agent (where restarts fail without the
    shim), or rank 0 opens one."""
    options = ("--master-port", str(free_ports(1)[0])) if how == "static" else ("--standalone",)
    done = job(torchrun(*options), TWICE)
    assert done.status == 0, done.err
    assert done.lines("ends at") == undisturbed
    assert done.said == [
        "rank 1 was killed by SIGKILL; attempt 2 of 4 starts",
        "rank 0 was killed by SIGKILL; attempt 3 of 4 starts",
    ]
    starts = [x for x in done.out.splitlines() if x.startswith("attempt 2 rank 0")]
    assert int(starts[0].split()[-1]) >= 3  # nothing was lost, but perhaps a version under way


def test_an_exception_of_one_rank_and_the_times(
    job: Callable[..., Done], undisturbed: list[str], tmp_path: Path
) -> None:
    done = job(torchrun("--standalone"), RAISE, "--times", "times", "-v")
    assert done.status == 0, done.err
    assert done.lines("ends at") == undisturbed
    assert "ValueError: no" in done.err
    assert done.said[0] == "rank 0 ended with status 1; attempt 2 of 4 starts"
    assert done.said[1].startswith("attempt 2 passed its first boundary "), done.said
    assert len(done.said) == 2
    (line,) = (tmp_path / "times").read_text().splitlines()
    record = json.loads(line)
    assert tuple(record["parts"]) == PARTS
    total = sum(record["parts"].values())
    assert total == pytest.approx(record["boundary"] - record["failed"])


def test_the_launcher_takes_over(job: Callable[..., Done]) -> None:
    done = job(torchrun("--standalone"), EARLY, "--max-restarts", "1")
    assert done.status == 1
    early = "rank 1 ended with status 7 for the second time in a row before its first"
    assert done.said[1].startswith(early)
    assert "exitcode  : 7" in done.err  # torchrun's report


SLOW = """time.sleep(0.05)
        if step == 2: print("under way", flush=True)
        if ckpt.should_exit(): break"""
LONG = DDP.replace("range(start, 12)", "range(start, 100000)") + "import sys\nsys.exit(75)"


def test_a_job_told_to_end_is_not_started_again(job: Callable[..., Done]) -> None:
    """The last checkpoint is taken, and the status of the script, as for a batch script that
    requeues the job, is not taken for a failure."""

    def terminate(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        assert lines[2:] == ["under way\n"] * 2
        process.terminate()
        return "".join(lines)

    done = job(torchrun("--standalone"), SLOW, text=LONG, meanwhile=terminate)
    assert done.lines("starts at") == ["0 starts at 0", "1 starts at 0"]
    assert done.said == []
    assert "a last checkpoint is taken" in done.err.lower(), done.err


def test_a_job_without_time_left_is_not_started_again(
    job: Callable[..., Done], tmp_path: Path
) -> None:
    """No process sends a signal, and all ranks end with status 75."""
    (tmp_path / "ckpts").mkdir()
    halt = [sys.executable, "-m", "tierckpt", "halt", str(tmp_path / "ckpts"), "--after-version"]
    subprocess.run([*halt, "3", "--force"], check=True, capture_output=True)
    done = job(torchrun("--standalone"), SLOW, text=LONG)
    assert done.said == []
    assert "exitcode  : 75" in done.err
    assert done.lines("starts at") == ["0 starts at 0", "1 starts at 0"]


def test_horovodrun(job: Callable[..., Done], launchable: Callable[[str], None]) -> None:
    """Each attempt has a rendezvous server of its own, as addresses of dead ranks stay."""
    launchable(HOROVODRUN)
    command = [PYTHON, "-m", "horovod.runner.launch", "--gloo", "-np", "2"]
    command += ["--network-interfaces", "lo", PYTHON, "-m", "tierckpt.run"]
    done = job(command, TWICE, text=HOROVOD)
    assert done.status == 0, done.err
    assert len(done.lines("ends at 12")) == 2
    assert done.said == [
        "rank 1 was killed by SIGKILL; attempt 2 of 4 starts",
        "rank 0 was killed by SIGKILL; attempt 3 of 4 starts",
    ]


def test_horovod_over_mpi_is_left_to_mpirun(
    job: Callable[..., Done], launchable: Callable[[str], None]
) -> None:
    launchable(MPIRUN)
    launchable(HOROVODRUN)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    done = job([*command, PYTHON, "-m", "tierckpt.run"], KILL, text=HOROVOD)
    assert done.status != 0
    assert "attempt 2" not in done.out + done.err


def test_mpirun(
    job: Callable[..., Done], launchable: Callable[[str], None], undisturbed: list[str]
) -> None:
    """With gloo; the shims meet at MASTER_PORT, which the first attempt uses, too."""
    launchable(MPIRUN)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    done = job([*command, PYTHON, "-m", "tierckpt.run"], KILL, **where)
    assert done.status == 0, done.err
    assert done.lines("ends at") == undisturbed
