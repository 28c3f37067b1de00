"""The orders for one run of the job; tests read them without importing torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "CRASH_JOB"
"""The environment variable that holds a Scenario as JSON."""
RANKS = 2
STEPS = 25

PHASES = ("begin", "forward", "backward", "optimizer", "scheduler", "boundary")
"""Phases of one step; each but the first is over when its fault point is reached."""


@dataclass
class Scenario:
    """Orders for one run."""

    folder: str
    """Folder of journals and marks."""
    life: int = 1
    steps: int = STEPS
    settings: dict[str, Any] | None = None
    """Settings of the Checkpointer; None: train without one."""
    rules: dict[str, str] = field(default_factory=dict)
    """Faults, by rank; see `tierckpt._faults`."""
    decay: float | None = None
    """Weight decay, set after the restore, so that this run computes something else."""
    gates: dict[str, int] = field(default_factory=dict)
    """Step by name: before it, all ranks wait for the file of that name in `folder`."""
    late_release: dict[str, int] = field(default_factory=dict)
    """Version by rank: its layers are all released at the barrier, not before."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def marks(self, rank: int) -> Path:
        """Folder in which a rule of this rank leaves a file when it fires."""
        return Path(self.folder) / f"marks-r{rank}"
