"""Findings of checks, and the subject that checks examine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tierckpt.config import Config


class Mark(StrEnum):
    """Meaning of a finding; only a cross makes the exit status 1."""

    GOOD = "good"
    ABSENT = "absent"
    """Optional, and not there."""
    WARNING = "warning"
    """Works, but slower or less safely than it could."""
    CROSS = "cross"
    """Does not work."""


@dataclass(frozen=True)
class Finding:
    """One fact."""

    name: str
    """A few letters, e.g. `torch`."""
    mark: Mark
    text: str
    cure: str = ""
    """Commands or settings that change a mark to good; empty if there is nothing to do."""


@dataclass(frozen=True)
class Subject:
    """The job, node and environment to examine."""

    config: Config = field(default_factory=Config)
    """Its settings, as far as they are valid."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Settings that replace the environment's."""
    state_bytes: int = 0
    """Bytes of parameters and optimizer state of the whole job; 0: unknown."""
    nodes: int = 1
    """Number of nodes of the job."""
    towards: str = ""
    """Host name of another node; empty: unknown."""
    root: Path = Path("/")
    """Root of /proc, /sys and /run."""

    @property
    def node_bytes(self) -> int:
        """Bytes of one copy of this node's shards; 0: unknown."""
        return -(-self.state_bytes // self.nodes)

    def read(self, path: str) -> str:
        """Content of a file of /proc or /sys; empty if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""


Check = Callable[[Subject], Iterable[Finding]]
"""May raise anything, and may hang."""


def good(name: str, text: str) -> Finding:
    """A finding that needs no cure."""
    return Finding(name, Mark.GOOD, text)


def absent(name: str, text: str, cure: str = "") -> Finding:
    """An optional thing that is not there."""
    return Finding(name, Mark.ABSENT, text, cure)


def warning(name: str, text: str, cure: str = "") -> Finding:
    """A limited thing."""
    return Finding(name, Mark.WARNING, text, cure)


def cross(name: str, text: str, cure: str = "") -> Finding:
    """A thing that does not work."""
    return Finding(name, Mark.CROSS, text, cure)
