"""Runs: a command, started as a job with an order, and watched until it has ended.

A run starts from the seed: a verified copy of a version, in the local level's format. Its progress
is a bar on a terminal, else one line.

Survivors are processes of a run that outlive its command. Launchers give ranks sessions of their
own, and a killed launcher leaves its ranks running. All have the run's order in their environment,
which identifies them.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from tierckpt.coordination.proof_order import PROGRESS, VARIABLE, ProofOrder
from tierckpt.errors import TierckptError
from tierckpt.storage.job_directory import JobDirectory
from tierckpt.storage.local import LocalStore

from .records import Record, read, taking_part

if TYPE_CHECKING:
    import rich.progress
    from rich.console import Console

    from tierckpt.offline.stored_version import Shard

__all__ = ["Bar", "ProveError", "Run", "copy_version", "end_survivors", "link_all", "version_in"]


END_SECONDS = 10.0
"""Time to wait for the end of a process after SIGKILL."""


def end_survivors(folder: Path) -> int:
    """Kill all processes on this machine that have the run's order; returns their number. All have
    ended on return, except those stuck in the kernel."""
    ended = 0
    while found := [*_survivors(folder)]:
        for pidfd in found:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        stuck = [pidfd for pidfd in found if not select.select([pidfd], [], [], END_SECONDS)[0]]
        for pidfd in found:
            os.close(pidfd)
        ended += len(found)
        if stuck:
            break
    return ended


def _survivors(folder: Path) -> Iterator[int]:
    """A pidfd for each, which the caller closes: a process number alone may have been reused."""
    mark = os.fsencode(f"{VARIABLE}={folder}")
    for number in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            pidfd = os.pidfd_open(number)
            try:
                theirs = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
            except OSError:
                theirs = []
            if mark in theirs and number != os.getpid():
                yield pidfd
            else:
                os.close(pidfd)


def copy_version(path: str, version: int | None, folder: Path) -> int:
    """Copy this version, or the one that a restart takes, into `folder`; returns its number. Files
    at `path` are only read. Raises as `open_version` and reading do."""
    from tierckpt.offline.stored_version import open_version  # imports torch

    with closing(open_version(path, version, lambda nbytes: None)) as found:
        store = LocalStore(folder)
        store.create()
        for shard in found.shards:
            _copy(shard, store)
        return found.manifest.id.version


def _copy(shard: Shard, store: LocalStore) -> None:
    manifest = shard.manifest
    with store.draft(manifest.key, manifest.image_bytes) as draft:
        for low, data in shard.all_bytes():
            draft.write(memoryview(data), low)
        draft.commit(manifest.encode())


def link_all(folder: Path, target: Path) -> None:
    """Hard-link all files below `folder` into `target`. This is safe: a store never writes to a
    file with several names."""
    target.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            link_all(path, target / path.name)
        else:
            os.link(path, target / path.name)


def version_in(folder: Path) -> int | None:
    """The newest version in a store below `folder`; None if there is none."""
    stores = [LocalStore(path) for path in {p.parent for p in folder.rglob("*.manifest")}]
    keys = chain.from_iterable(map(LocalStore.keys, stores))
    return max((key.id.version for key in keys), default=None)


class Bar:
    """The display of one run, used in a `with`."""

    def __init__(self, name: str, start: int, until: int, console: Console) -> None:
        self._name, self._start, self._until, self._console = name, start, until, console
        self._since = time.monotonic()
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def __enter__(self) -> Bar:
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description:12}"), BarColumn())
            steps = TextColumn("step {task.fields[at]} of {task.fields[until]}")
            self._bar = Progress(*columns, steps, TimeElapsedColumn(), console=self._console)
            total = self._until - self._start
            at, until = self._start, self._until
            self._task = self._bar.add_task(self._name, total=total, at=at, until=until)
            self._bar.start()
        return self

    def step(self, version: int) -> None:
        """Show that the run has reached this version."""
        if self._bar is not None and self._task is not None and version:
            at = min(version, self._until)  # the end takes one or two steps more
            self._bar.update(self._task, completed=at - self._start, at=at)

    def __exit__(self, *error: object) -> None:
        seconds = time.monotonic() - self._since
        if self._bar is not None:
            self._bar.stop()
        elif error[0] is None:
            text = f"{self._name}: up to step {self._until}, {seconds:.0f} s"
            self._console.print(text, soft_wrap=True)


LOOK_SECONDS = 0.1
GRACE_SECONDS = 15.0
"""From SIGTERM to SIGKILL when a command is given up."""
MAX_LAUNCHES = 4
LAST_LINES = 12
_ERROR = re.compile(r"(\[[^\]]*\]:? ?)*\s*[\w.]+(Error|Exception): ")
"""Python's format, perhaps after a launcher's prefix."""
_REPORT = re.compile(r".*torch/distributed/elastic/multiprocessing/api\.py.* failed \(exitcode")
"""The last such line starts torchrun's own report: that a rank failed, not why."""
ENVIRONMENT = {
    # Otherwise torchrun lets all starts of a job share one key-value store, and a restarted gloo
    # process may read the address of a dead one.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class ProveError(TierckptError):
    """A run failed to do its part of the test."""


class Run(Struct):
    """One run of the command: one launch, or several if it is killed and restarted."""

    name: str
    order: ProofOrder
    command: Sequence[str]
    patience_seconds: float
    """The run is given up after this time without a step."""
    on_step: Callable[[int], None] = lambda version: None
    launches: int = 0
    log_start: int = 0
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
                if self.launches >= MAX_LAUNCHES:
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
            self.log_start = log.tell()
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
        output = self.log.read_bytes()[self.log_start :]
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
