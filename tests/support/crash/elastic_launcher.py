"""Elastic Horovod on this machine, as a test drives it: hosts come and go, processes are killed.

    job.start(min_np=2, spares=1, rules=["kill@elastic:place=backward,step=3,rank=1"])
    job.until_over() assert job.course() == undisturbed

A host is another spelling of this machine's loopback address: Horovod takes different spellings for
different hosts. It never reuses a host on which a process died.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support.crash.launcher import ROOT, Process, quiet_environment
from tests.support.waiting import is_seen
from tests.support.warm_python.servers import PYTHON
from tierckpt import _faults

PATIENCE_SECONDS = 240.0
Line = dict[str, Any]
Moment = tuple[int, int, int]
"""Rank, steps made, epoch, for a job of constant size."""


class ElasticJob:
    """One job, started once or several times."""

    def __init__(
        self, folder: Path, shm_dir: Path, hvd: str = "horovod.torch", **settings: str
    ) -> None:
        """`hvd`: the module that the script imports as Horovod; `settings`: Tierckpt's own."""
        self.folder = folder
        self.shm_dir = shm_dir
        self.path = folder / "ckpts"
        self._hvd = hvd
        self._settings = {f"TIERCKPT_{name.upper()}": text for name, text in settings.items()}
        self._launcher: subprocess.Popen[bytes] | None = None
        self._names = (f"127.0.0.{'1':0>{n}}" for n in range(1, 100))
        self.hosts: list[str] = []
        for made in ("marks", "tmp", "ckpts"):
            (folder / made).mkdir()
        script = folder / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        script.chmod(0o755)

    # --- actions of a launcher and a cluster ---------------------------------------------------

    def start(
        self, min_np: int, spares: int = 0, rules: Sequence[str] = (), **options: Any
    ) -> ElasticJob:
        """Start two workers, each on a host of its own; `options` are the script's."""
        self.hosts = [next(self._names) for _ in range(2 + spares)]
        self._tell_hosts()
        command = [PYTHON, "-m", "horovod.runner.launch", "--gloo"]
        command += ["-np", "2", "--min-np", str(min_np), "--max-np", "2"]
        command += ["--network-interfaces", "lo"]
        command += ["--host-discovery-script", str(self.folder / "hosts.sh")]
        command += [PYTHON, "-m", "tests.support.crash.elastic_job"]
        with (self.folder / "log").open("ab") as log:
            self._launcher = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment(rules, options),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def _environment(self, rules: Sequence[str], options: dict[str, Any]) -> dict[str, str]:
        options = {"steps": 20, "gates": {}, "joins": [], "machines": False, **options}
        return {
            **quiet_environment(),
            "ELASTIC_FOLDER": str(self.folder),
            "ELASTIC_OPTIONS": json.dumps(options),
            "ELASTIC_HVD": self._hvd,
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
            "TIERCKPT_PATH": str(self.path),
            "TIERCKPT_SHM_DIR": str(self.shm_dir),
            "TIERCKPT_EVENTS_DIR": str(self.folder / "events"),
            "TIERCKPT_LOCAL_EVERY_STEPS": "4",
            "TIERCKPT_LOCAL_EVERY_SECONDS": "0",
            # Every commit is taken, also on a machine so busy that the disk lags.
            "TIERCKPT_SLOTS": "3",
            "TIERCKPT_WHEN_BUSY": "wait",
            **self._settings,
            _faults.FAULTS_VARIABLE: ";".join(rules),
            _faults.FIRED_VARIABLE: str(self.folder / "marks"),
            "TMPDIR": str(self.folder / "tmp"),  # Horovod, killed, leaves files there
        }

    def add_host(self) -> str:
        self.hosts.append(next(self._names))
        self._tell_hosts()
        return self.hosts[-1]

    def remove_host(self, name: str) -> None:
        self.hosts.remove(name)
        self._tell_hosts()

    def _tell_hosts(self) -> None:
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{name}:1\n" for name in self.hosts))
        new.rename(self.folder / "hosts")

    def open(self, gate: str) -> None:
        (self.folder / f"gate-{gate}").touch()

    def until_over(self) -> None:
        """Wait until Horovod reports the success of the job."""
        assert self._launcher is not None
        try:
            status = self._launcher.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.give_up("the job did not end")
        assert status == 0, self.output()

    def kill(self) -> None:
        """SIGKILL the launcher and every worker; agents keep running."""
        self._kill(lambda command: b"tierckpt.agent.process" not in command)

    def kill_everything(self) -> None:
        self._kill(lambda command: True)

    def lose_memory(self) -> None:
        """Remove the rest after `kill`, agents and shared memory, as a reboot would."""
        self.kill_everything()
        for entry in self.shm_dir.iterdir():
            shutil.rmtree(entry)

    def _kill(self, chosen: Callable[[bytes], bool]) -> None:
        def victims() -> list[int]:
            # The tracker ends with those it serves, and removes the semaphores they left.
            found = [(p, c) for p, c in self._processes() if b"resource_tracker" not in c]
            return [pid for pid, command in found if chosen(command)]

        while pids := victims():
            processes = [Process(pid) for pid in pids]
            for process in processes:
                process.signal(signal.SIGKILL)
            for process in processes:
                process.kill()
        if self._launcher is not None:
            self._launcher.wait()

    def _processes(self) -> Iterator[tuple[int, bytes]]:
        """Processes of this job that still exist: id and command line."""
        mark = f"ELASTIC_FOLDER={self.folder}\0".encode()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes():
                    yield int(pid), Path(f"/proc/{pid}/cmdline").read_bytes()

    # --- records -------------------------------------------------------------------------------

    def journal(self, **having: Any) -> list[Line]:
        """Lines that have these values, or this key if the value is `...`; in order of time."""
        path = self.folder / "journal.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [x for x in found if all(k in x and v in (..., x[k]) for k, v in having.items())]

    def course(self) -> dict[Moment, dict[str, str]]:
        """The state at every commit, by name of its parts. Commits that happened twice, because of
        a failure in between or a restore, must have had the same state."""
        found: dict[Moment, dict[str, str]] = {}
        for line in self.journal(digests=...):
            moment = (line["rank"], line["step"], line["epoch"])
            assert found.setdefault(moment, line["digests"]) == line["digests"], moment
        return found

    def losses(self) -> dict[tuple[int, int], str]:
        """Exact loss by rank and step."""
        return {(x["rank"], x["step"]): x["loss"] for x in self.journal(loss=...)}

    def fired(self) -> int:
        """Number of rules that fired."""
        return len(list((self.folder / "marks").iterdir()))

    def events(self, name: str) -> list[Line]:
        paths = sorted((self.folder / "events").glob("*.jsonl"))
        lines = [json.loads(x) for p in paths for x in p.read_text().splitlines()]
        return [x for x in lines if x["name"] == name]

    def left_nothing(self) -> None:
        """After the end, when agents have finished, no process and no shared memory remain."""
        while found := [Process(pid) for pid, _ in self._processes()]:
            for process in found:
                if not process.ended(PATIENCE_SECONDS):
                    self.give_up("waited in vain for the end of all processes")
        assert list(self.shm_dir.rglob("*")) == []

    def wait_for(self, true: Callable[[], Any], what: str) -> None:
        if not is_seen(true, PATIENCE_SECONDS):
            self.give_up(f"waited in vain for {what}")

    def give_up(self, why: str) -> NoReturn:
        raise AssertionError(f"{why}\n{self.output()}")

    def output(self) -> str:
        """Output of all processes, and the end of the journal."""
        log = (self.folder / "log").read_text(errors="replace").replace("\0", "")
        lines = [str({k: v for k, v in x.items() if k != "digests"}) for x in self.journal()]
        return "\n".join(["--- log", log[-8000:], "--- end of the journal", *lines[-40:]])
