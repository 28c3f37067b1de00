"""What the ranks of a run recorded: life by life, what every version is made of.

A file for each rank and checkpointer, with a line of JSON for each thing that happened. The last
line may be cut short: its writer was killed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .order import RECORDS


class Writer:
    """One rank's. A line is with the system when the method returns. Raises OSError."""

    def __init__(self, folder: Path, job: str, rank: int) -> None:
        self._path = folder / RECORDS / f"{job}.r{rank:05d}.jsonl"

    def line(self, what: str, **values: Any) -> None:
        """Add one."""
        data = json.dumps({"what": what, **values}, separators=(",", ":")).encode() + b"\n"
        with self._path.open("ab", buffering=0) as file:
            while data:
                data = data[file.write(data) or 0 :]


@dataclass
class Life:
    """One rank's part of one life of a job."""

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
    states: dict[int, dict[str, str]] = field(default_factory=dict)
    """By version: names and fingerprints of all that this rank has of it."""
    killed: int | None = None
    """At the boundary of which version."""

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
        """Each rank's; of ranks that the last life had."""
        ranks = max(self.lives.items())[1][-1].ranks if self.lives else 0
        return [lives[-1] for rank, lives in sorted(self.lives.items()) if rank < ranks]

    def reached(self, version: int) -> bool:
        """Whether all ranks of the last life have it, or a later one."""
        newest = self.last_lives()
        whole = bool(newest) and len(newest) == newest[0].ranks
        return whole and all(life.last >= version for life in newest)


def read(folder: Path) -> dict[str, Record]:
    """By the checkpointers' scratch names, of the run in `folder`."""
    found: dict[str, Record] = {}
    for path in sorted((folder / RECORDS).glob("*.jsonl")):
        job, rank = path.stem.rsplit(".r", 1)
        found.setdefault(job, Record()).lives[int(rank)] = [*_lives(path)]
    return {job: record for job, record in found.items() if any(record.lives.values())}


def _lives(path: Path) -> Iterator[Life]:
    life: Life | None = None
    with path.open() as file:
        for line in file:
            if not line.endswith("\n"):
                break
            values: Mapping[str, Any] = json.loads(line)
            what = values["what"]
            if what == "attached":
                if life is not None:
                    yield life
                names = ("rank", "ranks", "path", "place", "memory")
                life = Life(**{name: values[name] for name in names})
            elif life is not None:
                _heed(life, what, values)
    if life is not None:
        yield life


def _heed(life: Life, what: str, values: Mapping[str, Any]) -> None:
    if what == "restored":
        life.restored = values["version"]
    elif what == "killed":
        life.killed = values["version"]
    elif what == "state":
        life.states[values["version"]] = values["state"]


__all__ = ["Life", "Record", "Writer", "read"]
