"""What the ranks of a run recorded: life by life, what every version is made of.

A file for each rank and checkpointer, with a line of JSON for each thing that happened. The last
line may be cut short: its writer was killed. Of what a version is made of a digest stands in front,
and the names, which may be many, are read when two digests differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierckpt.coordination.proof_order import RECORDS
from tierckpt.format.manifest import digest

WHO = ("rank", "ranks", "path", "place", "memory")
_STATE = re.compile(rb'{"what":"state","version":(\d+),"digest":"(\w+)",')


class Writer:
    """One rank's. A line is with the system when the method returns. Raises OSError."""

    def __init__(self, folder: Path, job: str, rank: int) -> None:
        self._path = folder / RECORDS / f"{job}.r{rank:05d}.jsonl"

    def state(self, version: int, state: Mapping[str, str]) -> None:
        """Add what a version is made of: names and fingerprints."""
        text = json.dumps(state, separators=(",", ":"), sort_keys=True)
        self.line("state", version=version, digest=digest(text.encode()).hex(), state=state)

    def line(self, what: str, **values: Any) -> None:
        """Add one."""
        data = json.dumps({"what": what, **values}, separators=(",", ":")).encode() + b"\n"
        with self._path.open("ab", buffering=0) as file:
            while data:
                data = data[file.write(data) or 0 :]


@dataclass(frozen=True)
class State:
    """What one rank has of a version."""

    digest: str
    """Of all of it: equal where it is."""
    path: Path
    offset: int
    """Where its line begins."""

    def load(self) -> dict[str, str]:
        """Names and fingerprints. Raises OSError."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            found: dict[str, str] = json.loads(file.readline())["state"]
            return found


@dataclass
class Life:
    """One rank's part of one run of a job."""

    rank: int
    ranks: int
    path: str
    """The script's own."""
    place: str
    """The scratch folder in its place."""
    memory: str
    """The job's folder in memory."""
    restored: int | None = None
    """The version that it went on from; 0: `restore()` found none; None: nobody called it."""
    states: dict[int, State] = field(default_factory=dict)
    """By version."""
    killed: int | None = None
    """At the boundary of which version."""
    passes: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """By version those over data loaders that are under way at its boundary: by number, how many
    batches they have (0: not known) and have yielded."""
    unsaved: list[str] = field(default_factory=list)
    """What was said of objects that are in no checkpoint; see `unsaved_objects`."""
    schedulers: int = 0
    """So many were found."""

    @property
    def last(self) -> int:
        """The newest version; 0: none."""
        return max(self.states, default=0)


@dataclass
class Record:
    """One checkpointer's of a run: a script may have several."""

    lives: dict[int, list[Life]] = field(default_factory=dict)
    """By rank."""

    @property
    def path(self) -> str:
        """The script's own."""
        return self.lives[min(self.lives)][0].path

    @property
    def place(self) -> str:
        """The scratch folder in its place."""
        return self.lives[min(self.lives)][0].place

    def by_rank(self, life: int = 0) -> dict[int, Life]:
        """Each rank's first one, or another one."""
        return {rank: lives[life] for rank, lives in self.lives.items()}

    def firsts(self) -> list[Life]:
        """Each rank's first one."""
        return [*self.by_rank().values()]

    def all_lives(self) -> Iterator[Life]:
        """Of all ranks."""
        for lives in self.lives.values():
            yield from lives

    def last_lives(self) -> list[Life]:
        """Each rank's; of ranks that the last run had."""
        ranks = max(self.lives.items())[1][-1].ranks if self.lives else 0
        return [lives[-1] for rank, lives in sorted(self.lives.items()) if rank < ranks]

    def reached(self, version: int) -> bool:
        """Whether all ranks of the last run have it, or a later one."""
        newest = self.last_lives()
        whole = bool(newest) and len(newest) == newest[0].ranks
        return whole and all(life.last >= version for life in newest)


def read(folder: Path) -> dict[str, Record]:
    """By the checkpointers' scratch names, of the run in `folder`."""
    found: dict[str, Record] = {}
    for path in sorted((folder / RECORDS).glob("*.jsonl")):
        job, rank = path.stem.rsplit(".r", 1)
        found.setdefault(job, Record()).lives[int(rank)] = [*_history(path)]
    return {job: record for job, record in found.items() if any(record.lives.values())}


def taking_part(records: Mapping[str, Record]) -> dict[str, Record]:
    """Without those of which no rank recorded a version: they only read."""
    return {
        job: record
        for job, record in records.items()
        if any(life.states for life in record.all_lives())
    }


def _history(path: Path) -> Iterator[Life]:
    life: Life | None = None
    with path.open("rb") as file:
        offset = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            state = _STATE.match(line)
            if state is not None and life is not None:
                life.states[int(state[1])] = State(state[2].decode(), path, offset)
            elif state is None:
                values: Mapping[str, Any] = json.loads(line)
                if values["what"] == "attached":
                    if life is not None:
                        yield life
                    life = Life(**{name: values[name] for name in WHO})
                elif life is not None:
                    _add(life, values)
            offset += len(line)
    if life is not None:
        yield life


def _add(life: Life, values: Mapping[str, Any]) -> None:
    """What a line says."""
    if values["what"] == "passes":
        life.passes[values["version"]] = {n: (size, done) for n, size, done in values["passes"]}
    elif values["what"] == "unsaved":
        life.unsaved, life.schedulers = values["texts"], values["schedulers"]
    else:
        setattr(life, values["what"], values["version"])


__all__ = ["Life", "Record", "State", "Writer", "read", "taking_part"]
