"""Jobs of examples/restarts: their scripts, started as by a user, and records of their ranks."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from tests.support.waiting import is_seen
from tests.support.warm_python.servers import PYTHON, THROUGHOUT
from tierckpt.testing import free_ports

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "restarts"
PATIENCE_SECONDS = 150.0
STEPS = 60
OPTIONS = ["--steps", str(STEPS), "--step-seconds", "0.05"]
"""Arguments of train.py: the same training in every test, long enough for a fault half-way."""
Line = dict[str, Any]
Curve = dict[int, str]


class RestartJob:
    """One job, in its own folder, with any kind of launcher.

    Args:
        folder: for journals, logs and disks.
        shm_dir: for memory; nodes in it are distinguished by their names.
        launcher: folder of the launcher's own logs, if not `folder`.
    """

    def __init__(self, folder: Path, shm_dir: Path, launcher: Path | None = None) -> None:
        self.folder, self.shm_dir, self._launcher = folder, shm_dir, launcher
        self.disks = folder / "disks"
        self.journals = folder / "journals"
        self.options = [*OPTIONS, "--journal", str(self.journals)]
        self._started: list[subprocess.Popen[bytes]] = []

    def environment(self, **more: str) -> dict[str, str]:
        """Environment of the command that starts the job."""
        return {
            **os.environ,
            **THROUGHOUT,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(self.folder),
            "SCRATCH": str(self.disks),
            "TIERCKPT_SHM_DIR": str(self.shm_dir),
            "TIERCKPT_PEER_INTERFACE": "lo",
            "TIERCKPT_LOCAL_EVERY_STEPS": "4",
            "TIERCKPT_LOCAL_EVERY_SECONDS": "0",
            "TIERCKPT_SLOTS": "3",
            **more,
        }

    def start(self, *command: str, **more: str) -> subprocess.Popen[bytes]:
        """Start a command in examples/restarts, with `more` in its environment."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=EXAMPLES,
                env=self.environment(**more),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def over(self, process: subprocess.Popen[bytes], ranks: int) -> None:
        """Wait for the end, which all ranks must have reached. The exit status does not count: gloo
        sometimes aborts in a process after its work."""
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.give_up("the job did not end")
        for rank in range(ranks):
            if self.newest_life(rank)[-1] != {"done": True}:
                self.give_up(f"rank {rank} ended with {self.newest_life(rank)[-1]}")

    def end(self) -> None:
        """Kill all remaining processes."""
        for process in self._started:
            for pid in descendants(process.pid):
                kill(pid)
            process.wait()

    # --- faults ----------------------------------------------------------------------------------

    def trainers(self, node: str | None = None) -> list[int]:
        """Process ids of ranks, on a node."""
        return [
            pid
            for pid, environment in self._processes()
            if node is None or f"TIERCKPT_NODE={node}" in environment
            if "train.py" in arguments_of(pid)[1:3]  # later among them in a launcher's
        ]

    def wipe(self, node: str) -> None:
        """Kill a node's agents, and remove its disk and memory."""
        for pid, environment in self._processes():
            if f"TIERCKPT_NODE={node}" in environment:
                kill(pid)
        for gone in [*self.shm_dir.glob(f"*/*@{node}"), self.disks / node]:
            shutil.rmtree(gone, ignore_errors=True)

    def _processes(self) -> Iterator[tuple[int, list[str]]]:
        mine = f"TIERCKPT_SHM_DIR={self.shm_dir}"
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                raw = Path(f"/proc/{pid}/environ").read_bytes()
                environment = raw.decode(errors="replace").split("\0")
                if mine in environment:
                    yield int(pid), environment

    # --- records ---------------------------------------------------------------------------------

    def lines(self, rank: int) -> list[Line]:
        """Journal lines of a rank, of all runs."""
        path = self.journals / f"journal-r{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(x) for x in text.splitlines(keepends=True) if x.endswith("\n")]

    def starts(self, rank: int = 0) -> list[Line]:
        """The first journal line of each run."""
        return [x for x in self.lines(rank) if "start" in x]

    def newest_life(self, rank: int) -> list[Line]:
        """Journal lines of a rank since its last start; never empty."""
        lines = self.lines(rank)
        begins = [i for i, x in enumerate(lines) if "start" in x]
        return lines[begins[-1] :] if begins else [{"start": None}]

    def step(self, rank: int = 0) -> int:
        """The last step of this run; -1 before the first."""
        return max((x["step"] for x in self.newest_life(rank) if "step" in x), default=-1)

    def kept(self, ranks: int, level: str) -> bool:
        """True when a version of this run is on that level of all ranks' nodes."""
        kept = [
            {
                x["version"]
                for x in self.newest_life(rank)
                if (x.get("event"), x.get("level")) == ("committed", level)
            }
            for rank in range(ranks)
        ]
        return bool(set.intersection(*kept))

    def curve(self, rank: int) -> Curve:
        """Exact loss by step; a repeated step must have had the same loss."""
        losses: Curve = {}
        for line in self.lines(rank):
            if "step" in line:
                was = losses.setdefault(line["step"], line["loss"])
                assert was == line["loss"], f"rank {rank}, step {line['step']}"
        return losses

    def lost_nothing(self) -> None:
        """Check that every run started with the weights that an earlier run had at that step."""
        weights: dict[int, str] = {}
        for line in self.lines(0):
            if "step" in line:
                weights[line["step"] + 1] = line["digest"]
            elif line.get("start"):
                assert weights[line["start"]] == line["digest"]

    def wait_for(self, true: Callable[[], Any], what: str) -> None:
        """Poll until the condition holds."""
        if not is_seen(true, PATIENCE_SECONDS):
            self.give_up(f"waited in vain for {what}")

    def give_up(self, why: str) -> NoReturn:
        """Fail with the output of all processes."""
        logs = [*self.folder.glob("log"), *self.folder.glob("slurm-*.out")]
        logs += sorted(self._launcher.glob("*.log")) if self._launcher else []
        texts = [f"--- {p.name}\n{p.read_text(errors='replace')[-5000:]}" for p in logs]
        ends = [str(self.newest_life(rank)[-3:]) for rank in range(3)]
        raise AssertionError("\n".join([why, *texts, "--- ends of the journals", *ends]))


@functools.cache
def undisturbed_curves(ranks: int) -> list[Curve]:
    """Every rank's undisturbed curve, computed once in a test run."""
    memory = os.environ["TIERCKPT_SHM_DIR"]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=memory) as shm:
        job = RestartJob(Path(folder), Path(shm))
        place = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
            "TIERCKPT_PATH": str(job.disks),
            "WORLD_SIZE": str(ranks),
        }
        command = (PYTHON, "train.py", *job.options)
        try:
            started = [job.start(*command, **place, RANK=str(rank)) for rank in range(ranks)]
            for process in started:
                job.over(process, 0)
            curves = [job.curve(rank) for rank in range(ranks)]
        finally:
            job.end()
        if any(sorted(curve) != list(range(STEPS)) for curve in curves):
            job.give_up("the undisturbed run failed")
        return curves


def arguments_of(pid: int) -> list[str]:
    """A process's command line."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def state_of(pid: int) -> str:
    """A process's state, `T` when it is stopped; empty when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return ""


def descendants(pid: int) -> list[int]:
    """A process and all its descendants."""
    parents: dict[int, int] = {}
    for each in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
            parents[int(each)] = int(stat[1])
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found


def kill(pid: int) -> None:
    """Kill with SIGKILL, as the system does."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
