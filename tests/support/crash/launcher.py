"""A launcher and its machine: start, kill and reboot of a job, and access to its records.

    job.live(rules={1: "kill@seal:version=12"})   # rank 1 kills itself, the launcher the other
    resumed = job.live()                          # the next run, to the end
    assert resumed.start == 11
    job.ended_as_undisturbed()

Nothing here decides by the clock: waits are for a journal line, a mark or the end of a process. A
wait gives up after PATIENCE_SECONDS, and shows the output of the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from tests.support.crash.scenario import RANKS, VARIABLE, Scenario
from tests.support.waiting import is_seen
from tests.support.warm_python.servers import PYTHON
from tierckpt import _faults
from tierckpt.format import ShardKey
from tierckpt.storage import JobDirectory, LocalStore, job_id_of

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 120.0
Line = dict[str, Any]


class Zygote:
    """The process that forks ranks (`zygote.py`)."""

    def __init__(
        self,
        log: Path,
        module: str = "tests.support.crash.job",
        *others: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`module`: the program of the ranks, and all that it imports; `others`: modules that some
        of them import."""
        self._log = log
        with log.open("ab") as err:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "tests.support.crash.zygote", module, *others],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                cwd=ROOT,
                env={**quiet_environment(), **(environment or {})},
            )
        self._answer("ready")

    def fork(self, environment: Mapping[str, str], log: Path) -> Process:
        assert self._process.stdin is not None
        order = {"environment": dict(environment), "log": str(log)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Process(int(self._answer(r"\d+")))

    def _answer(self, expected: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not re.fullmatch(expected, line):
            raise AssertionError(f"the zygote said {line!r}\n{self._log.read_text()}")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def quiet_environment() -> dict[str, str]:
    """Environment of every trainer: one thread each, or two ranks compete for the cores."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # Otherwise a restarted gloo job reads addresses of the previous run from torchrun's store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


class Process:
    """A child of another process, held by a descriptor, so that no other process is signalled."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = None  # over already

    def ended(self, timeout_seconds: float = 0.0) -> bool:
        if self._fd is not None:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if poll.poll(timeout_seconds * 1000):
                self.forget()
        return self._fd is None

    def signal(self, number: signal.Signals) -> None:
        if self._fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        if not self.ended(PATIENCE_SECONDS):
            raise AssertionError(f"process {self.pid} outlived SIGKILL")

    def wake(self) -> None:
        """Continue it after SIGSTOP."""
        self.signal(signal.SIGCONT)

    def forget(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Job:
    """A two-rank job and its files on this machine; it has as many runs as the test starts."""

    def __init__(
        self, zygote: Zygote, folder: Path, shm_dir: Path, expected: Mapping[int, Expected] | None
    ) -> None:
        self.zygote = zygote
        self.folder = folder
        self.shm_dir = shm_dir
        self.expected = expected
        self.store = LocalStore(folder / "ckpts")
        self.settings: dict[str, Any] = {
            "path": str(self.store.directory),
            "shm_dir": str(shm_dir),
            "slots": 3,
            "local_every_steps": 4,
            "local_every_seconds": 0,
        }
        self.lives: list[Life] = []
        self.foreign: subprocess.Popen[bytes] | None = None
        """A launcher outside of this project."""
        self._watched: list[Process] = []
        self.scenario = Scenario(str(folder), settings=self.settings)
        for rank in range(RANKS):
            self.scenario.marks(rank).mkdir(parents=True)

    # --- start and end -------------------------------------------------------------------------

    def start(self, rules: Mapping[int, str] | None = None, **changes: Any) -> Life:
        """Start a new run. `changes` are fields of the scenario; `settings` are added."""
        settings = self.settings
        if changes.get("settings") is not None:
            settings = {**settings, **changes.pop("settings")}
        scenario = replace(
            self.scenario,
            life=len(self.lives) + 1,
            rules={str(rank): text for rank, text in (rules or {}).items()},
            **{"settings": settings, **changes},
        )
        life = Life(self, scenario)
        self.lives.append(life)
        return life

    def live(self, rules: Mapping[int, str] | None = None, **changes: Any) -> Life:
        """Play a whole run: until all ranks end, or one does and the launcher kills the other."""
        return self.start(rules, **changes).until_over()

    def reboot(self) -> None:
        """Kill every process and remove all shared memory, as a loss of power does."""
        self.kill_everything()
        for entry in self.shm_dir.iterdir():
            shutil.rmtree(entry)

    def kill_everything(self) -> None:
        for life in self.lives:
            life.kill()
        if self.foreign is not None:
            self.foreign.terminate()  # its end ends its ranks
            self.foreign.wait()
        for agent in [*self._watched, *self.agents()]:
            agent.kill()
        self._watched.clear()

    def agents(self, rank: int | None = None) -> list[Process]:
        """Living agents of this job, of any run."""
        found = [Process(pid) for pid in self._agent_pids(rank)]
        self._watched += found
        return found

    def _agent_pids(self, rank: int | None = None) -> list[int]:
        found = []
        ranks = range(RANKS) if rank is None else (rank,)
        marks = [f"{_faults.FIRED_VARIABLE}={self.scenario.marks(r)}\0".encode() for r in ranks]
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if b"tierckpt.agent.process" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    continue
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if any(mark in environment for mark in marks):
                    found.append(int(pid))
        return found

    def agents_end(self) -> None:
        """Return when every agent of this job has ended by itself."""
        while agents := self.agents():  # the replacement of each may have started
            for agent in agents:
                if not agent.ended(PATIENCE_SECONDS):
                    self.give_up("waited in vain for the agents' end")

    # --- records -------------------------------------------------------------------------------

    def journal(self, rank: int, life: int | None = None, **having: Any) -> list[Line]:
        """Lines of one rank, of one run or of all, that have these values."""
        path = self.folder / f"journal-r{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(x) for x in text.splitlines(keepends=True) if x.endswith("\n")]
        return [
            x
            for x in lines
            if life in (None, x["life"]) and all(x.get(k) == v for k, v in having.items())
        ]

    def fired(self, rank: int, rule: str) -> bool:
        """True when the rule fired, in any run."""
        name = "".join(c if c.isalnum() else "_" for c in rule)
        return (self.scenario.marks(rank) / name).exists()

    def losses(self, rank: int, life: int | None = None) -> dict[int, str]:
        """Exact loss by step. A step in two runs must have had the same loss, except in runs with
        another weight decay."""
        found: dict[int, str] = {}
        others = {x.number for x in self.lives if x.scenario.decay is not None}
        for line in self.journal(rank, life):
            if "loss" in line and line["life"] not in others:
                assert found.setdefault(line["step"], line["loss"]) == line["loss"], line
        return found

    def ended_as_undisturbed(self) -> None:
        """Check that the whole course and the final state are those of the undisturbed job, and
        that no shared memory and no process remain."""
        assert self.expected is not None
        for rank in range(RANKS):
            losses, final = self.expected[rank]
            assert self.losses(rank) == losses, f"rank {rank}"
            found = [x["done"] for x in self.journal(rank) if "done" in x]
            assert found, f"rank {rank} did not end"
            for state in found:
                differing = [k for k in final | state if final.get(k) != state.get(k)]
                assert differing == [], f"rank {rank}"
        self.agents_end()
        assert list(self.shm_dir.rglob("*")) == []

    def committed(self, rank: int, life: int | None = None) -> list[int]:
        """Versions that were reported to this rank as written to disk."""
        return [x["version"] for x in self.journal(rank, life, event="committed", level="local")]

    def sealed(self, rank: int, life: int | None = None) -> list[int]:
        """Versions that this rank reported as sealed in its memory."""
        return [x["version"] for x in self.journal(rank, life, event="sealed")]

    def segments(self) -> list[Path]:
        """Files of this job's slots."""
        return [path for job in self._memories() for path in job.segments()]

    def in_memory_of(self, rank: int) -> dict[int, int]:
        """Generation of each version that this rank has sealed."""
        sealed = [manifest for job in self._memories() for _, manifest in job.sealed()]
        return {m.id.version: m.id.generation for m in sealed if m.shard == rank}

    def _memories(self) -> list[JobDirectory]:
        """Folders of all nodes; each rank has its own node."""
        job = job_id_of(self.store.directory)
        return [JobDirectory.at(self.shm_dir, job, f"node{rank}") for rank in range(RANKS)]

    def on_disk(self, rank: int) -> list[ShardKey]:
        keys = self.store.keys()
        return [k for k in keys if k.shard == rank]

    def both_have(self, versions: Callable[[int], Iterable[int]]) -> int:
        """The newest of `versions(rank)` that all ranks have; 0 if none."""
        return max(set.intersection(*(set(versions(r)) for r in range(RANKS))), default=0)

    # --- waiting -------------------------------------------------------------------------------

    def wait_for(
        self, true: Callable[[], Any], what: str, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        if not is_seen(true, patience_seconds):
            self.give_up(f"waited in vain for {what}")

    def wait_fired(self, rank: int, rule: str) -> None:
        self.wait_for(lambda: self.fired(rank, rule), f"the rule {rule} on rank {rank}")

    def give_up(self, why: str) -> NoReturn:
        for life in self.lives:
            for process in life.processes:
                process.signal(signal.SIGUSR1)  # dumps its stacks
        time.sleep(1)
        raise AssertionError(f"{why}\n{self.output()}")

    def output(self) -> str:
        """Output of ranks and agents, and the end of the journals."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}")
        for rank in range(RANKS):
            lines = [str(x)[:200] for x in self.journal(rank)][-40:]
            parts.append(f"--- end of the journal of rank {rank}\n" + "\n".join(lines))
            fired = sorted(p.name for p in self.scenario.marks(rank).iterdir())
            parts.append(f"--- fired on rank {rank}: {', '.join(fired)}")
        return "\n".join(parts)


Expected = tuple[dict[int, str], dict[str, str]]
"""Losses by step, and digests of the final state by name."""


class Life:
    """One start of the job: a process per rank."""

    def __init__(self, job: Job, scenario: Scenario) -> None:
        self.job = job
        self.scenario = scenario
        self.number = scenario.life
        meeting = job.folder / f"meeting{self.number}"
        self.processes = [
            job.zygote.fork(
                {
                    **quiet_environment(),
                    VARIABLE: scenario.to_json(),
                    "CRASH_MEETING": f"file://{meeting}",
                    "RANK": str(rank),
                },
                job.folder / f"life{self.number}-r{rank}.log",
            )
            for rank in range(RANKS)
        ]

    def until_over(self) -> Life:
        """Wait as a launcher does: when one rank fails, end the others."""
        done: set[int] = set()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(done) < RANKS:
            for rank, process in enumerate(self.processes):
                if rank not in done and process.ended(0.01):
                    if not self._done(rank):
                        self.kill()
                        return self
                    done.add(rank)
            if time.monotonic() > deadline:
                self.job.give_up(f"life {self.number} did not end")
        return self

    def kill(self, *ranks: int) -> Life:
        """SIGKILL these ranks, at once, or all."""
        chosen = [self.processes[r] for r in ranks or range(RANKS)]
        for process in chosen:
            process.signal(signal.SIGKILL)
        for process in chosen:
            process.kill()
        return self

    def _done(self, rank: int) -> bool:
        return any("done" in x for x in self.job.journal(rank, self.number))

    @property
    def survived(self) -> bool:
        """True when the run trained to the end."""
        return all(self._done(rank) for rank in range(RANKS))

    def resumed(self) -> Line:
        """The first journal line of the run; it is the same on all ranks."""
        told = [[x for x in self.job.journal(r, self.number) if "start" in x] for r in range(RANKS)]
        assert all(len(x) == 1 for x in told), self.job.output()
        assert len({json.dumps(x[0]) for x in told}) == 1, told
        return told[0][0]

    @property
    def start(self) -> int:
        """The version from which the run resumed."""
        return int(self.resumed()["start"])

    def passed(self, rank: int) -> int:
        """The last boundary that this rank is known to have passed: the version being taken."""
        steps = [x["step"] + 1 for x in self.job.journal(rank, self.number) if "step" in x]
        started = [x["start"] for x in self.job.journal(rank, self.number) if "start" in x]
        return int(max([0, *steps, *started]))

    def promised(self) -> int:
        """The oldest version that the next run may resume after this one was killed, with a
        version to memory at every step.

        If all ranks passed boundary v, all sealed v-1 before. So the next run resumes v-1 or
        newer: at most the version that the slowest rank was taking is lost.
        """
        slowest = min(self.passed(rank) for rank in range(RANKS))
        started = self.resumed()["start"] if self._begun() else 0
        return max(slowest - 1, started)

    def _begun(self) -> bool:
        return all(
            any("start" in x for x in self.job.journal(r, self.number)) for r in range(RANKS)
        )

    def waiting(self, gate: str) -> Life:
        """Return when all ranks stand at the gate."""
        self.job.wait_for(
            lambda: all(self.job.journal(r, self.number, waiting=gate) for r in range(RANKS)),
            f"both ranks at {gate}",
        )
        return self

    def open(self, gate: str) -> Life:
        (self.job.folder / gate).touch()
        return self
