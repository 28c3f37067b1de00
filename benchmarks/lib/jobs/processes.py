"""The processes of a job: commands of launchers, and forks of a process that has imported torch."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lib.jobs.plan import LOOK_SECONDS, Plan
from lib.processes import MARK, Family
from lib.training.launchers import LAUNCHERS

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parents[1]
RANK = str(HERE / "rank.py")
LINGER_SECONDS = 120
"""An agent waits for the next start, which may take long on a busy machine."""
RESTARTS = ("--max-restarts", "1000")
SHIM = ("-m", "tierckpt.run", *RESTARTS)
LOOPBACKS = tuple(f"127.0.0.{'1':0>{zeros}}" for zeros in range(1, 50))
"""Names of this machine. Horovod excludes a host after the death of a rank there, so each death
needs another name."""
PR_SET_PDEATHSIG = 1


class JobError(RuntimeError):
    """A job did not end as it should; the text has the last output of its ranks."""


def torchrun(
    world: int, shim: Sequence[str] = (), nodes: Sequence[str] = ("--standalone",)
) -> list[str]:
    """torchrun for `world` ranks a node, which looks for failures often; the script follows."""
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, "--monitor-interval", "0.1"]
    return [*command, "--nproc-per-node", str(world), *RESTARTS, *shim]


def horovodrun(world: int, folder: str) -> list[str]:
    """Elastic horovodrun with Gloo on this machine; the command of a rank follows. A script in
    `folder` prints the hosts."""
    hosts = Path(folder, "hosts.sh")
    hosts.write_text("#!/bin/sh\n" + "".join(f"echo {host}:1\n" for host in LOOPBACKS))
    hosts.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "horovod.runner.launch",
        "--gloo",
        "--network-interfaces",
        "lo",
    ]
    sizes = [word for name in ("-np", "--min-np", "--max-np") for word in (name, str(world))]
    return [*command, *sizes, "--host-discovery-script", str(hosts)]


class Processes:
    """The processes of a job, with the agents that outlive them. `close` ends them all."""

    def __init__(self, plan: Plan) -> None:
        plan.make_folders()
        self.plan = plan
        self.family = Family(uuid.uuid4().hex)
        self.output = Path(plan.folder) / "output"
        self.output.touch()
        self.environment = {
            "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TIERCKPT_AGENT_LINGER_SECONDS": str(LINGER_SECONDS),
            # What one job has learnt, the next one knows.
            "XDG_CACHE_HOME": str(Path(plan.folder).parent / "cache"),
            MARK: self.family.token,
        }
        self.all: list[subprocess.Popen[bytes]] = []

    @property
    def rank(self) -> list[str]:
        """The script of a rank with its argument."""
        return [RANK, self.plan.to_json()]

    def start(self, command: Sequence[str], **variables: Any) -> subprocess.Popen[bytes]:
        """Start a process with further variables; its output goes to that of the job."""
        more = {name: str(value) for name, value in variables.items()}
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **self.environment, **more},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.all.append(process)
        return process

    def start_ranks(self) -> None:
        """Start all ranks, without restarts."""
        command = [sys.executable, *self.rank]
        starter = LAUNCHERS[self.plan.launcher]
        self.all += starter.start(self.plan.world, command, self.environment, self.output)

    def wait(self, true: Callable[[], bool], limit_s: float) -> None:
        """Wait for a condition. Raises JobError if the first process ends before, or too late."""
        deadline = time.monotonic() + limit_s
        while not true():
            has_ended = self.all[0].poll() is not None
            if time.monotonic() > deadline or (has_ended and not true()):
                raise JobError(self.last_words())
            time.sleep(LOOK_SECONDS)

    def last_words(self) -> str:
        """The end of the ranks' output."""
        text = self.output.read_text(errors="replace")
        return f"{self.plan.method}: the job failed; its last output:\n{text[-3000:]}"

    def lose_memory(self) -> None:
        """Lose the agents and shared memory, as when the machine has lost its power."""
        self.family.kill()
        shutil.rmtree(self.plan.memory)
        Path(self.plan.memory).mkdir()

    def close(self) -> None:
        self.family.kill()
        for process in self.all:
            process.kill()
            process.wait()
        shutil.rmtree(self.plan.memory, ignore_errors=True)


# --- forks ---------------------------------------------------------------------------------------


class Forked:
    """A rank that was forked from this process, held by a pidfd: it starts within a hundredth of a
    second, without imports."""

    def __init__(self, job: Processes, train: Callable[[], None]) -> None:
        """Fork; the child trains, and ends with this process. Raises RuntimeError unless this
        process has one thread: no other one may hold a lock."""
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise RuntimeError(f"cannot fork safely: {threads} threads")
        parent, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            _be_rank(job, parent, train)
        self.fd = os.pidfd_open(self.pid)
        self.ended, self.status = False, -1

    def kill(self) -> None:
        """Send SIGKILL; `reap` waits for the end."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for the end of the process."""
        if not self.ended:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.fd)
            self.ended = True


def wait_for_any(ranks: Sequence[Forked], seconds: float, *others: int) -> set[int]:
    """Return when a rank has ended, or another descriptor is ready, after `seconds` at most; the
    descriptors that are."""
    poll = select.poll()
    for fd in (*(rank.fd for rank in ranks if not rank.ended), *others):
        poll.register(fd, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)}
    for rank in ranks:
        if not rank.ended and rank.fd in ready:
            rank.reap()
    return ready


def _be_rank(job: Processes, parent: int, train: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.setsid()
            os.environ.update(job.environment)
            log = os.open(job.output, os.O_WRONLY | os.O_APPEND)
            for target in (1, 2):
                os.dup2(log, target)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            train()
            status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without the teardown of gloo, which sometimes aborts
