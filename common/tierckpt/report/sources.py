"""Sources: what one job has left, found by its folder.

The folder is the job's path, its persistent_path, or a folder above these. Events and traces are
found in it, or by the records of the job's runs, or by the claim of a running job.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from tierckpt._text import is_url
from tierckpt.errors import ConfigError, TierckptError
from tierckpt.events import Record, decode, lines_of
from tierckpt.goodput.account import Account, account
from tierckpt.goodput.records import read
from tierckpt.lineage.tree import tree_of
from tierckpt.offline.survey import MissingPathError
from tierckpt.tracing.timeline import Timeline
from tierckpt.tracing.traces import START, load
from tierckpt.watch.observer import Observer

if TYPE_CHECKING:
    from tierckpt.lineage.history import JobNode
    from tierckpt.watch.view import View

DEPTH = 2
"""Folders below the given one in which events and traces are found."""
MAX_TRACES = 16
"""Ranks with traces that are read, the lowest ones: each may have 64 MiB."""
EVENTS, TRACES, USAGE = "events-r*.jsonl", "trace-r*.json", "usage-r*.jsonl"


class Copy(Struct):
    """A version on one level, over all ranks."""

    level: str
    version: int
    at: float = 0.0
    """Unix time when the last rank had stored its part."""
    seconds: float = 0.0
    """Memory: stall of the training on the slowest rank. Other levels: the longest write."""
    background_seconds: float = 0.0
    """Memory: time of copying on the slowest rank, beside the training."""
    nbytes: int = 0


class Usage(Struct, frozen=True):
    """Cores in use in the time before `at`."""

    at: float
    """Unix time."""
    seconds: float
    cores: dict[str, float]
    """By rank, and for `agent`."""


class Job(Struct):
    """All of one job."""

    path: str
    view: View | None = None
    history: JobNode | None = None
    account: Account | None = None
    copies: list[Copy] = field(default_factory=list)
    """In order of time."""
    incidents: list[Record] = field(default_factory=list)
    """Events `skipped`, `failed`, `drifted` and `rejected`, each once, in order of time."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of incidents by name and level."""
    restores: list[Record] = field(default_factory=list)
    """Events `restored` of the lowest rank, with a version."""
    timeline: Timeline | None = None
    usage: list[Usage] = field(default_factory=list)
    """Of the node with the lowest rank."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, as text."""
    events_hint: str = ""
    """What is missing without events, and how to have them; empty: they are there."""
    trace_hint: str = ""

    @property
    def name(self) -> str:
        """A short name, for titles."""
        return Path(self.path).name or self.path


def read_job(path: str) -> Job:
    """Read everything. Raises ConfigError if the folder has nothing of a job, or several jobs."""
    job = Job(path)
    with suppress(MissingPathError):
        job.history = tree_of(path)
        job.notes += job.history.troubles
    events, traces = _folders(job)
    files = [*chain.from_iterable(sorted(folder.glob(EVENTS)) for folder in events)]
    if not (files or traces or (job.history and job.history.runs)):
        hint = f"; {job.history.hint}" if job.history and job.history.hint else ""
        raise ConfigError(
            f"{path} has nothing of a job in it; give the job's path, or a folder that has the "
            f"job's path, its events and its traces in it{hint}"
        )
    with suppress(TierckptError, OSError):
        job.view = Observer([path], str(events[0]) if events else "").look()
    _read_events(job, files)
    _read_traces(job, traces)
    return job


def _folders(job: Job) -> tuple[list[Path], list[Path]]:
    """The folders with events, and those with traces."""
    runs = job.history.every_run() if job.history else []
    records = [run.record for run in runs if run.record]
    found = []
    for pattern, named in (
        (EVENTS, {record.events for record in records}),
        (TRACES, {record.traces for record in records}),
    ):
        here = {Path(name) for name in named if name}
        if not is_url(job.path):
            below = chain.from_iterable(
                Path(job.path).glob("*/" * depth + pattern) for depth in range(DEPTH + 1)
            )
            here |= {file.parent for file in below}
        there = {folder.resolve() for folder in here if any(folder.glob(pattern))}
        # A process set has a folder of its own in that of the job.
        found.append(sorted(each for each in there if each.parent not in there))
    return found[0], found[1]


# --- events --------------------------------------------------------------------------------------


def _read_events(job: Job, files: list[Path]) -> None:
    if not files:
        job.events_hint = (
            "There are no events: start the job with TIERCKPT_EVENTS_DIR=FOLDER (the setting "
            "events_dir)."
        )
        return
    with suppress(ConfigError):  # the job has just started
        job.account = account(*read(files))
        job.notes += job.account.notes
    copies: dict[tuple[str, int, int], Copy] = {}
    incidents: dict[tuple[str, str, int, int], Record] = {}
    for file in files:
        for run, event in _events_of(file):
            name, level, version = event["name"], event["level"], event["version"]
            if name in ("sealed", "committed"):
                _add(copies.setdefault((level, version, run), Copy(level, version)), event)
            elif name in ("skipped", "failed", "drifted", "rejected"):
                incidents.setdefault((name, level, version, run), event)
            elif name == "restored" and version > 0 and file == files[0]:
                job.restores.append(event)
    job.copies = sorted(copies.values(), key=lambda copy: copy.at)
    job.incidents = sorted(incidents.values(), key=lambda event: event["time_seconds"])
    job.counts = Counter(" on ".join(filter(None, key[:2])) for key in incidents)


def _events_of(file: Path) -> Iterator[tuple[int, Record]]:
    """The events of a rank, with the number of its run."""
    run = 0
    for event in filter(None, map(decode, lines_of(file))):
        run += event["name"] == "started"
        yield run, event


def _add(copy: Copy, event: Record) -> None:
    seconds = event["seconds"]
    spent = seconds.get("stall", 0.0) if copy.level == "memory" else sum(seconds.values())
    copy.at = max(copy.at, event["time_seconds"])
    copy.seconds = max(copy.seconds, spent)
    copy.background_seconds = max(copy.background_seconds, seconds.get("copy", 0.0))
    copy.nbytes += event["nbytes"]


# --- traces --------------------------------------------------------------------------------------


def _read_traces(job: Job, folders: list[Path]) -> None:
    if not folders:
        job.trace_hint = (
            "There is no trace: start the job with TIERCKPT_TRACE_DIR=FOLDER (the setting "
            "trace_dir), which records the first 50 steps of each run."
        )
        return
    folder = max(folders, key=lambda each: max(file.stat().st_mtime for file in each.glob(TRACES)))
    files = sorted(folder.glob(TRACES))
    horovod = [each for each in sorted(folder.glob("*.json")) if _is_horovods(each)]
    if folders[1:] or files[MAX_TRACES:]:
        job.notes.append(f"of the traces, {len(files[:MAX_TRACES])} ranks in {folder} are read")
    try:
        job.timeline = load(files[:MAX_TRACES], horovod[-1] if horovod else None)
        job.notes += job.timeline.notes
    except TierckptError as error:
        job.trace_hint = f"{error}."
    for file in sorted(folder.glob(USAGE))[:1]:
        job.usage = [*_usage(lines_of(file))]


def _is_horovods(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return START.encode() in file.read(4096)
    return False


def _usage(lines: Iterable[bytes]) -> Iterator[Usage]:
    for line in lines:
        with suppress(ValueError, TypeError, AttributeError):  # half a line of a killed agent
            at, seconds, cores = json.loads(line)
            yield Usage(
                float(at), float(seconds), {name: float(each) for name, each in cores.items()}
            )


__all__ = ["Copy", "Job", "Usage", "read_job"]
