"""The records of one run of a job: its place in the history, who started it, when and how, and how
it ended. Pure.

The first is written when the run begins, the second when it ends; a killed run has no second one.
Nothing needs them to restore: they explain the history to people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .ids import VersionId

FACTS = (
    "host",
    "user",
    "launcher",
    "command",
    "git",
    "best",
    "events",
    "traces",
    "persistent",
)
"""Facts that are one text each."""
TRAINING_END = "the training's end"
"""The reason of an end that nobody asked for: the training has made its last step."""


@dataclass(frozen=True)
class RunRecord:
    """One run. Unknown facts are empty."""

    run_id: str
    generation: int
    began: VersionId | None = None
    """The version of this job that it restored; None: it began without one."""
    fork: str = ""
    """The version of another job that it began from, `PATH@v40`; empty: none."""
    started_seconds: float = 0.0
    """Unix time, by the clock of the node that wrote the record."""
    ranks: int = 1
    nodes: int = 1
    host: str = ""
    user: str = ""
    launcher: str = ""
    """The launcher's name, perhaps with its own name for the launch."""
    command: str = ""
    """SHA-256 of the script's path and arguments, each with a zero byte at its end."""
    git: str = ""
    """The commit of the repository that contains the script."""
    best: str = ""
    """The setting `best`: whether the lowest or the highest metric is the best."""
    events: str = ""
    """The setting `events_dir`, absolute, for commands that read events."""
    traces: str = ""
    """The setting `trace_dir`, absolute."""
    persistent: str = ""
    """Directory or URL of the job's persistent level; empty: it has none."""
    software: Mapping[str, str] = field(default_factory=dict)
    """Versions by name: of Python, tierckpt, torch, and frameworks in use."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the record, with the names of FORMAT.md."""
        values: dict[str, Any] = {
            "run_id": self.run_id,
            "generation": self.generation,
            "began": None if self.began is None else (self.began.generation, self.began.version),
            "fork": self.fork,
            "started_seconds": self.started_seconds,
            "ranks": self.ranks,
            "nodes": self.nodes,
        }
        values |= {name: getattr(self, name) for name in FACTS}
        return {**values, "software": dict(self.software)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> RunRecord:
        """Read the fields that `to_json` made; ignore others. Raises KeyError, ValueError or
        TypeError if they are not a record of a run."""
        began = values["began"]
        return RunRecord(
            run_id=str(values["run_id"]),
            generation=int(values["generation"]),
            began=None if began is None else VersionId(*map(int, began)),
            fork=str(values.get("fork", "")),
            started_seconds=float(values["started_seconds"]),
            ranks=int(values["ranks"]),
            nodes=int(values["nodes"]),
            **{name: str(values.get(name, "")) for name in FACTS},
            software={str(k): str(v) for k, v in dict(values.get("software", {})).items()},
        )


@dataclass(frozen=True)
class RunEnd:
    """The end of a run, as one of its ranks noted it."""

    run_id: str
    ended_seconds: float
    """Unix time, by the clock of the rank's node."""
    reason: str
    """Why the training ended, in words: `the training's end`, a signal, or an error's type."""
    rank: int = 0
    failed: bool = False
    """An error ended the training on this rank."""
    version: int = 0
    """The last version that this rank took, or began with."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the record, with the names of FORMAT.md."""
        return dict(vars(self))

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> RunEnd:
        """Read the fields that `to_json` made; ignore others. Raises KeyError, ValueError or
        TypeError if they are not a record of an end."""
        return RunEnd(
            run_id=str(values["run_id"]),
            ended_seconds=float(values["ended_seconds"]),
            reason=str(values["reason"]),
            rank=int(values.get("rank", 0)),
            failed=bool(values.get("failed", False)),
            version=int(values.get("version", 0)),
        )


__all__ = ["TRAINING_END", "RunEnd", "RunRecord"]
