"""A Slurm cluster for tests: a controller, and several nodes on this machine.

    with SlurmCluster(nodes=3) as cluster:
        job = cluster.submit(["--nodes=2", "script.sbatch"], environment, folder)
        cluster.lose(cluster.nodes_of(job)[1])

Everything is in one temporary folder, nothing is configured on the machine, and all daemons are
children of this process that stay in the foreground. A node's name is an address of the loopback
interface, so that names can be resolved; a prolog gives every task the name of its node.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support.slurm_here import PATH
from tierckpt.testing import free_ports

PATIENCE_SECONDS = 120.0

CONFIGURATION = """\
ClusterName=tierckpt
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/prolog
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
FirstJobId={first_job}
ReturnToService=2
SlurmdTimeout=300
KillWait=2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={name} Port={port} CPUs=1 RealMemory=100\n"
PROLOG = """\
#!/bin/sh
echo "export TIERCKPT_NODE=$SLURMD_NODENAME"
"""


class SlurmCluster:
    """A controller and its nodes. Not thread-safe."""

    def __init__(self, nodes: int) -> None:
        # Not pytest's folder: it has sockets, and their paths must be short.
        self.folder = folder = Path(tempfile.mkdtemp(prefix="tierckpt-slurm-"))
        self.nodes = [f"127.0.0.{11 + i}" for i in range(nodes)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **os.environ,
            "PATH": PATH,
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def __enter__(self) -> SlurmCluster:
        self._configure()
        try:
            key = ["--key-file", str(self.folder / "munge.key")]
            rest = [f"--{x}-file={self.folder}/munged.{x}" for x in ("pid", "log", "seed")]
            socket_ = ["--socket", str(self.folder / "munge.socket"), "--num-threads", "2"]
            # Forced: it refuses a folder that others cannot enter.
            self._start("munged", "--foreground", "--force", *key, *rest, *socket_)
            self.wait_for((self.folder / "munge.socket").exists, "munged")
            self._start("slurmctld", "-D", "-i")
            for node in self.nodes:
                self._start_node(node)
            self.wait_for(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "the nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End everything, jobs included."""
        with contextlib.suppress(subprocess.SubprocessError):
            self._ask("scancel", "--user", str(os.getuid()))
            self.wait_for(lambda: not self._ask("squeue", "--noheader"), "the end of all jobs")
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for node in self.nodes:
            self._kill(node)
        shutil.rmtree(self.folder)

    # --- commands of users -----------------------------------------------------------------------

    def submit(self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path) -> int:
        """Submit a job with `sbatch`; returns its number."""
        return int(self._ask("sbatch", "--parsable", *arguments, more=environment, cwd=cwd))

    def scontrol(self, *arguments: str) -> str:
        """Run `scontrol`, as administrators and scripts do."""
        return self._ask("scontrol", *arguments)

    def scancel(self, *arguments: str) -> None:
        """End jobs, or send them signals."""
        self._ask("scancel", *arguments)

    def job(self, number: int) -> dict[str, str]:
        """The controller's record of a job."""
        words = self.scontrol("show", "job", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def nodes_of(self, number: int) -> list[str]:
        """Nodes of a job, in the order of their tasks."""
        return self.scontrol("show", "hostnames", self.job(number)["NodeList"]).split()

    def states(self) -> dict[str, str]:
        """Of every node."""
        said = self._ask("sinfo", "--noheader", "--Node", "--format=%N %T")
        return dict(line.split() for line in said.splitlines())

    # --- loss of nodes ---------------------------------------------------------------------------

    def lose(self, node: str) -> None:
        """Kill the node's processes, and report it as down, as a cluster's monitoring does. The
        controller itself would notice after SlurmdTimeout, which is long here: a shorter one would
        take healthy nodes of a busy machine for lost."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        self._kill(node)
        self.scontrol("update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def wait_for(self, true: Callable[[], Any], what: str) -> None:
        """Poll until the condition holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(subprocess.CalledProcessError):  # it does not listen yet
                if true():
                    return
            if time.monotonic() > deadline:
                self.give_up(f"waited in vain for {what}")
            time.sleep(0.1)

    def give_up(self, why: str) -> NoReturn:
        """Fail with the output of the daemons."""
        logs = sorted(self.folder.glob("*.log"))
        texts = [f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in logs]
        raise AssertionError("\n".join([why, *texts]))

    # ---------------------------------------------------------------------------------------------

    def _configure(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        prolog = self.folder / "prolog"
        prolog.write_text(PROLOG)
        prolog.chmod(0o755)
        (self.folder / "state").mkdir()
        controller_port, *ports = free_ports(1 + len(self.nodes))
        host = socket.gethostname().split(".")[0]
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=host,
                user=os.getuid(),
                folder=self.folder,
                controller_port=controller_port,
                first_job=1 + secrets.randbelow(9000),
            )
            + "".join(
                NODE.format(name=name, host=host, port=port)
                for name, port in zip(self.nodes, ports, strict=True)
            )
        )

    def _start(self, name: str, *arguments: str, as_: str = "") -> None:
        program = shutil.which(name, path=PATH)
        with (self.folder / f"{as_ or name}.log").open("ab") as log:
            self._daemons[as_ or name] = subprocess.Popen(
                [str(program), *arguments],
                env={**self._environment, "SLURMD_NODENAME": as_},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, as_=node)

    def _ask(
        self,
        program: str,
        *arguments: str,
        more: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> str:
        done = subprocess.run(
            [program, *arguments],
            env={**self._environment, **(more or {})},
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            said = f"{program} {' '.join(arguments)}: {done.stdout}{done.stderr}"
            raise SlurmError(done.returncode, said)
        return done.stdout.strip()

    def _kill(self, node: str) -> None:
        """SIGKILL all processes of a node, and the daemons of its tasks."""
        while left := list(self._processes(node)):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _processes(self, node: str) -> Iterator[int]:
        mine = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"SLURMD_NODENAME={node}".encode() in environment and mine in environment:
                    yield int(pid)


class SlurmError(subprocess.CalledProcessError):
    """A failed command of Slurm; the text is its output."""

    def __str__(self) -> str:
        return str(self.cmd)
