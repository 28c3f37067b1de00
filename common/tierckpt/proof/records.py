"""Records: the contents of every version, as the ranks of a run wrote them down.

Each rank and checkpointer has a file, with a line of JSON for each event. The last line may be
incomplete, as its writer was killed. A digest stands before the contents of a version; the
contents, which may be long, are read only when two digests differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from tierckpt.coordination.proof_order import RECORDS
from tierckpt.format.manifest import digest

IDENTITY = ("rank", "ranks", "path", "place", "memory")
_STATE = re.compile(rb'{"kind":"state","version":(\d+),"digest":"(\w+)",')


class Writer:
    """The writer of one rank's file. A line has reached the kernel when the method returns. Raises
    OSError."""

    def __init__(self, folder: Path, job: str, rank: int) -> None:
        self._path = folder / RECORDS / f"{job}.r{rank:05d}.jsonl"

    def state(self, version: int, state: Mapping[str, str]) -> None:
        """Add the contents of a version: names and fingerprints."""
        text = json.dumps(state, separators=(",", ":"), sort_keys=True)
        self.line("state", version=version, digest=digest(text.encode()).hex(), state=state)

    def line(self, kind: str, **values: Any) -> None:
        """Add a line."""
        data = json.dumps({"kind": kind, **values}, separators=(",", ":")).encode() + b"\n"
        with self._path.open("ab", buffering=0) as file:
            while data:
                data = data[file.write(data) or 0 :]


class State(Struct, frozen=True):
    """One rank's contents of a version."""

    digest: str
    """Digest of the contents."""
    path: Path
    offset: int
    """Position of the line in the file."""

    def load(self) -> dict[str, str]:
        """The names and fingerprints. Raises OSError."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            found: dict[str, str] = json.loads(file.readline())["state"]
            return found


class RankRun(Struct):
    """One rank's part of one start of a job."""

    rank: int
    ranks: int
    path: str
    """The path in the script."""
    place: str
    """The scratch folder that replaces it."""
    memory: str
    """The job's folder in shared memory."""
    restored: int | None = None
    """The version that it resumed from; 0: `restore()` found none; None: it was not called."""
    states: dict[int, State] = field(default_factory=dict)
    """By version."""
    killed: int | None = None
    """The version of the boundary where it was killed."""
    passes: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """By version, the passes over data loaders in progress at its boundary: by number, batches (0:
    unknown) and batches yielded."""
    witness: tuple[int, str] | None = None
    """The newest batches that all ranks compared after its restore, and what differs; None: its
    restore compared nothing."""
    unsaved: list[str] = field(default_factory=list)
    """Notices about objects that are in no checkpoint; see `hooks.unsaved_objects`."""
    schedulers: int = 0
    """Number of schedulers found."""
    repeated: int | None = None
    """Number of iterations that its `restore()` made again from a journal; None without one."""
    unrepeated: str = ""
    """The reason why others could not be made again exactly; see `Restored`."""

    @property
    def last(self) -> int:
        """The newest version; 0: none."""
        return max(self.states, default=0)


class Record(Struct):
    """The record of one checkpointer in a run; a script may have several."""

    runs: dict[int, list[RankRun]] = field(default_factory=dict)
    """By rank, in order of time."""

    @property
    def path(self) -> str:
        """The path in the script."""
        return self.runs[min(self.runs)][0].path

    @property
    def place(self) -> str:
        """The scratch folder that replaces it."""
        return self.runs[min(self.runs)][0].place

    def by_rank(self, index: int = 0) -> dict[int, RankRun]:
        """Each rank's first run, or the one at `index`."""
        return {rank: runs[index] for rank, runs in self.runs.items()}

    def firsts(self) -> list[RankRun]:
        """Each rank's first run."""
        return [*self.by_rank().values()]

    def all_runs(self) -> Iterator[RankRun]:
        """The runs of all ranks."""
        for runs in self.runs.values():
            yield from runs

    def last_runs(self) -> list[RankRun]:
        """The last run of each rank that the last start had."""
        ranks = max(self.runs.items())[1][-1].ranks if self.runs else 0
        return [runs[-1] for rank, runs in sorted(self.runs.items()) if rank < ranks]

    def reached(self, version: int) -> bool:
        """Whether all ranks of the last start have this version or a later one."""
        newest = self.last_runs()
        whole = bool(newest) and len(newest) == newest[0].ranks
        return whole and all(run.last >= version for run in newest)


def read(folder: Path) -> dict[str, Record]:
    """The records of the run in `folder`, by the checkpointers' scratch names."""
    found: dict[str, Record] = {}
    for path in sorted((folder / RECORDS).glob("*.jsonl")):
        job, rank = path.stem.rsplit(".r", 1)
        found.setdefault(job, Record()).runs[int(rank)] = [*_history(path)]
    return {job: record for job, record in found.items() if any(record.runs.values())}


def taking_part(records: Mapping[str, Record]) -> dict[str, Record]:
    """The records without checkpointers that took no version: those only read."""
    return {
        job: record
        for job, record in records.items()
        if any(run.states for run in record.all_runs())
    }


def _history(path: Path) -> Iterator[RankRun]:
    run: RankRun | None = None
    with path.open("rb") as file:
        offset = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            state = _STATE.match(line)
            if state is not None and run is not None:
                run.states[int(state[1])] = State(state[2].decode(), path, offset)
            elif state is None:
                values: Mapping[str, Any] = json.loads(line)
                if values["kind"] == "attached":
                    if run is not None:
                        yield run
                    run = RankRun(**{name: values[name] for name in IDENTITY})
                elif run is not None:
                    _add(run, values)
            offset += len(line)
    if run is not None:
        yield run


def _add(run: RankRun, values: Mapping[str, Any]) -> None:
    """Add the event of one line to the run."""
    if values["kind"] == "passes":
        run.passes[values["version"]] = {n: (size, done) for n, size, done in values["passes"]}
    elif values["kind"] == "unsaved":
        run.unsaved, run.schedulers = values["texts"], values["schedulers"]
    elif values["kind"] == "witness":
        run.witness = (values["result"][0], values["result"][1])
    elif values["kind"] == "journal":
        run.repeated, run.unrepeated = values["records"], values["why"]
    else:
        setattr(run, values["kind"], values["version"])


__all__ = ["RankRun", "Record", "State", "Writer", "read", "taking_part"]
