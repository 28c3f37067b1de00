"""Runs: a command, started as a job with an order, and watched until it has ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tierckpt.coordination.proof_order import PROGRESS, VARIABLE, ProofOrder
from tierckpt.errors import TierckptError
from tierckpt.storage.memory.job_directory import JobDirectory

from .records import Record, read, taking_part
from .survivors import end_survivors

LOOK_SECONDS = 0.1
GRACE_SECONDS = 15.0
"""From SIGTERM to SIGKILL when a command is given up."""
MOST_LAUNCHES = 4
LAST_LINES = 12
_ERROR = re.compile(r"(\[[^\]]*\]:? ?)*\s*[\w.]+(Error|Exception): ")
"""Python's format, perhaps after a launcher's prefix."""
_REPORT = re.compile(r".*torch/distributed/elastic/multiprocessing/api\.py.* failed \(exitcode")
"""The last such line begins torchrun's own report: that a rank failed, not why."""
ENVIRONMENT = {
    # Otherwise torchrun lets all starts of a job share one key-value store, and a restarted gloo
    # process may read the address of a dead one.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class ProveError(TierckptError):
    """A run failed to do its part of the test."""


@dataclass
class Run:
    """One run of the command: one launch, or several if it is killed and restarted."""

    name: str
    order: ProofOrder
    command: Sequence[str]
    patience_seconds: float
    """The run is given up after this time without a step."""
    on_step: Callable[[int], None] = lambda version: None
    launches: int = 0
    log_begins: int = 0
    """Position in the log of the newest launch's output. Earlier launches were killed, and say
    so."""
    may_end_early: bool = False
    """A script that ends by itself before the last version has done its part: `order` then has the
    last one that it made."""
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """The output of the command."""
        return self.order.folder / "log"

    def carry_out(self) -> None:
        """Launch until all ranks have the last version. The order must be written. Raises
        ProveError."""
        try:
            while True:
                was_killed = self.order.mark.exists()
                status = self._launch()
                found = read(self.order.folder)
                self.records = taking_part(found) or found
                # With several checkpointers, the first one to reach the version ends the script.
                if any(record.reached(self.order.until) for record in self.records.values()):
                    break
                if self.may_end_early and status == 0 and self.records and self._last:
                    self.order = replace(self.order, until=self._last)
                    break
                if was_killed or not self.order.mark.exists():
                    raise ProveError(self._why(status))
                if self.launches >= MOST_LAUNCHES:
                    raise ProveError(self._why(status))
        except BaseException:
            end_survivors(self.order.folder)
            raise
        finally:
            self.clean()
        if self.order.kill_at is not None and not self.order.mark.exists():
            raise ProveError(
                f"{self.name}: no rank was killed, as no version was complete on all ranks before "
                f"the last one. Give more steps (--kill-after, --steps); see {self.log}"
            )

    @property
    def _last(self) -> int:
        """The last version that all ranks of some checkpointer have."""
        runs = [record.last_runs() for record in self.records.values()]
        return max(min((run.last for run in ranks), default=0) for ranks in runs)

    def _launch(self) -> int:
        self.launches += 1
        environment = {**ENVIRONMENT, **os.environ, VARIABLE: str(self.order.folder)}
        with self.log.open("ab") as log:
            self.log_begins = log.tell()
            try:
                process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise ProveError(f"{self.command[0]} cannot be started: {error}") from error
        with _shutdown(process):
            self._watch(process)
        return process.returncode

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        newest, since = -1, time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
                return
            version = self._progress()
            if version != newest:
                newest, since = version, time.monotonic()
                self.on_step(version)
            if time.monotonic() - since > self.patience_seconds:
                raise ProveError(
                    f"{self.name} made no step for {self.patience_seconds:g} s and was given up "
                    f"(--patience); {self._last_lines()}"
                )

    def _progress(self) -> int:
        try:
            return int((self.order.folder / PROGRESS).read_text())
        except (OSError, ValueError):
            return 0

    def _why(self, status: int) -> str:
        """Why the run is not complete, and what to do."""
        ended = f"exit status {status}" if status >= 0 else f"signal {-status}"
        if not self.records:
            made_none = f"{self.name}: the command ended ({ended}) and made no Checkpointer"
            if status == 0:
                made_none += f" (its processes need the environment, above all {VARIABLE})"
            return f"{made_none}; {self._last_lines()}"
        last = max(each.last for record in self.records.values() for each in record.last_runs())
        if status == 0:
            return (
                f"{self.name}: the script ended by itself at version {last}, but the test needs "
                f"version {self.order.until}. Give fewer steps (--steps, --kill-after), or make "
                f"the script train longer; {self._last_lines()}"
            )
        where = f"after version {last}" if last else "before its first step"
        return f"{self.name}: the command failed {where} ({ended}); {self._last_lines()}"

    def _last_lines(self) -> str:
        output = self.log.read_bytes()[self.log_begins :]
        lines = output.decode(errors="replace").splitlines()
        reports = [number for number, line in enumerate(lines) if _REPORT.match(line)]
        lines = lines[: reports[-1]] if reports else lines
        last = "".join(f"\n  {line}" for line in lines[-LAST_LINES:])
        errors = [line.strip() for line in lines if _ERROR.match(line)]
        first = errors[0] if errors else ""
        if first and first not in last:  # launchers print much after the error
            return f"the first error is {first!r}; its output is in {self.log}, and ends:{last}"
        return f"its output is in {self.log}" + (f", and ends:{last}" if last else "")

    def clean(self) -> None:
        """Remove the run's files from this machine's shared memory."""
        with contextlib.suppress(OSError, ValueError):
            ranks = [e for record in read(self.order.folder).values() for e in record.all_runs()]
            for memory in {Path(each.memory) for each in ranks}:
                job, _, node = memory.name.partition("@")
                there = JobDirectory(memory.parent, job, node)
                if not there.alive():
                    there.remove()


@contextlib.contextmanager
def _shutdown(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the process and its children if the block is interrupted."""
    try:
        yield
    except BaseException:
        for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(seconds)
        raise


__all__ = ["ProveError", "Run"]
